"""Several attentions measured at once: those that are alike, as the layers of a model mostly are, in one go.

To begin an operation, and to find its code in no cache, takes longer than most of them take to run.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from attnscale.attending.call import Call
from attnscale.measure.bound import max_bound
from attnscale.measure.foreseen import foreseen_variances
from attnscale.measure.measuring import looks_at_all
from attnscale.measure.pool import Unpooled
from attnscale.measure.row_blocks import look_at_alike
from attnscale.measure.row_sums import RowSums
from attnscale.measure.sampling import Sample, sample_rows
from attnscale.measure.stats import ScoreStats


def goes_with_others(call: Call, rows: int) -> bool:
    """Whether it can be measured with calls of its shape: one sequence on a CPU, no mask and no soft-cap, some rows."""
    is_plain = call.visibility.is_plain and call.softcap is None
    return is_plain and call.query.device.type == "cpu" and len(call.query) == 1 and not looks_at_all(call, rows)


def measured_together(calls: Sequence[Call], rows: int, lses: Sequence[Tensor | None]) -> list[ScoreStats]:
    """measured() of calls that go with others, all of one shape and visibility."""
    length, uneven = calls[0].query.shape[-2], not calls[0].visibility.is_full
    drawn = (sample_rows(rows, 1, length, uneven, foreseen) for foreseen in foreseen_variances(calls, lses))
    samples = [sample for sample in drawn if sample is not None]
    found = look_at_alike(calls, [sample.positions for sample in samples])
    return [_stats(*each) for each in zip(calls, lses, samples, found, strict=True)]


def _stats(call: Call, lse: Tensor | None, sample: Sample, found: Callable[[], RowSums]) -> ScoreStats:
    bound = max_bound(call, lse)
    return ScoreStats(call.query.shape[1], exact=False, pool=Unpooled(found, lambda: bound, sample))
