"""Records as TensorBoard curves, one a layer and number; layers share a section, and a chart, a number."""

from attnscale.diagnose.finding import grouped
from attnscale.errors import SettingError
from attnscale.measure.statistics import logged
from attnscale.train.record import Record
from attnscale.train.sinks.scalars import PREFIX, scalars


class TensorBoard:
    """Write to an event file in a folder; alarms as text. With `heads` each head has its own curve as well."""

    tool = "tensorboard"

    def __init__(self, folder: str, *, heads: bool = False) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise SettingError(
                "The sink 'tensorboard:…' needs the package tensorboard; run 'pip install tensorboard'."
            ) from None
        self._heads, self._writer = heads, SummaryWriter(folder)
        charts = {name: ["Multiline", [f"^{PREFIX}{name}/"]] for name in logged()}
        self._writer.add_custom_scalars({"attnscale": charts})

    def __call__(self, record: Record) -> None:
        """Add a point to every curve; those of ranks that were not merged are rank 0's."""
        if record.rank:
            return
        for tag, value in scalars(record, heads=self._heads):
            self._writer.add_scalar(tag, value, record.step)
        for group in grouped(record.alarms):
            self._writer.add_text("attnscale/alarms", str(group), record.step)
        self._writer.flush()

    def close(self) -> None:
        """Finish the file."""
        self._writer.close()
