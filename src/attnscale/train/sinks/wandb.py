"""Records in the run that Weights & Biases has open."""

from importlib import import_module

from attnscale.diagnose.finding import grouped
from attnscale.errors import SettingError
from attnscale.train.record import Record
from attnscale.train.sinks.scalars import scalars


class WeightsAndBiases:
    """Add to what the training loop logs next, so that the steps of its own curves stay as they are."""

    tool = "wandb"

    def __init__(self) -> None:
        try:
            self._wandb = import_module("wandb")
        except ImportError:
            raise SettingError("The sink 'wandb' needs the package wandb; run 'pip install wandb'.") from None

    def __call__(self, record: Record) -> None:
        """Log one point, without committing the step."""
        if record.rank:
            return
        run = self._wandb.run
        if run is None:
            raise SettingError("The sink 'wandb' needs an open run; call wandb.init() before training.")
        run.log({**dict(scalars(record)), "attnscale/step": record.step}, commit=False)
        for group in grouped(record.alarms):
            run.alert(title=f"attnscale: {group.first.code} in {group.first.place}", text=str(group))
