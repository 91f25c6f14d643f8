"""Records in the run that MLflow has active."""

from importlib import import_module

from attnscale.diagnose.finding import grouped
from attnscale.errors import SettingError
from attnscale.train.record import Record
from attnscale.train.sinks.scalars import scalars

LONGEST_TAG = 5000  # characters of the text of a tag


class MLflow:
    """Log one metric a layer and number, at the step of the record; every alarm as a tag of its own, with its step."""

    tool = "mlflow"

    def __init__(self) -> None:
        try:
            self._mlflow = import_module("mlflow")
        except ImportError:
            raise SettingError("The sink 'mlflow' needs the package mlflow; run 'pip install mlflow'.") from None

    def __call__(self, record: Record) -> None:
        """Log one point of every curve."""
        if record.rank:
            return
        if self._mlflow.active_run() is None:
            raise SettingError("The sink 'mlflow' needs an active run; call mlflow.start_run() before training.")
        self._mlflow.log_metrics({_allowed(name): value for name, value in scalars(record)}, step=record.step)
        for group in grouped(record.alarms):
            tag = f"attnscale.{group.first.code}.{group.first.severity}.step_{record.step}"
            self._mlflow.set_tag(_allowed(tag), f"step {record.step}: {group}"[:LONGEST_TAG])


def _allowed(name: str) -> str:
    """Replace what MLflow does not take in a name by underscores.

    >>> _allowed("attnscale_spread/layer[3]")
    'attnscale_spread/layer_3_'
    """
    return "".join(sign if sign.isascii() and (sign.isalnum() or sign in "_-./ ") else "_" for sign in name)
