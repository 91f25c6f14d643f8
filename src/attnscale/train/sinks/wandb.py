"""Records in the run that Weights & Biases has open."""

from importlib import import_module
from typing import Any

from attnscale.diagnose.finding import grouped
from attnscale.errors import SettingError
from attnscale.train.record import Record
from attnscale.train.sinks.scalars import PREFIX, scalars

STEP = "attnscale/step"  # the axis of all curves: the step that W&B counts is not the training step


class WeightsAndBiases:
    """Log curves over `attnscale/step`, and alarms as alerts. With `heads` each head has its own curve as well."""

    tool = "wandb"

    def __init__(self, *, heads: bool = False) -> None:
        try:
            self._wandb = import_module("wandb")
        except ImportError:
            raise SettingError("The sink 'wandb' needs the package wandb; run 'pip install wandb'.") from None
        self._heads, self._run = heads, None

    def __call__(self, record: Record) -> None:
        """Log one point of every curve."""
        if record.rank:
            return
        run = self._wandb.run
        if run is None:
            raise SettingError("The sink 'wandb' needs an open run; call wandb.init() before training.")
        if run is not self._run:
            run.define_metric(STEP, hidden=True)
            for curves in ("attnscale/*", f"{PREFIX}*"):
                run.define_metric(curves, step_metric=STEP)
            self._run = run
        # W&B drops what comes with a step below its own. So a loop that logs with its training step must find W&B's
        # step no further than that, and records after W&B's step passed theirs need rows of their own.
        at: dict[str, Any] = {"step": record.step} if record.step >= run.step else {}
        run.log({**dict(scalars(record, heads=self._heads)), STEP: record.step}, **at)
        for group in grouped(record.alarms):
            run.alert(title=f"attnscale: {group.first.code} in {group.first.place}", text=str(group))
