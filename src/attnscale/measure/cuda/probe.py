"""The numbers of one attention call inside a training step, written to a buffer without waiting for the GPU."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.measure.cuda.launch import capturing
from attnscale.measure.cuda.sampled import SampledRows, measure_rows, measures
from attnscale.measure.pooled import Pooled, Table
from attnscale.measure.sampling import design
from attnscale.measure.stats import ScoreStats
from attnscale.measure.uncertainty import Uncertainty
from attnscale.visibility import Visibility


class Probed(NamedTuple):
    """Statistics of a probed call, on its device."""

    found: SampledRows
    lengths: Tensor  # (2, heads): mean lengths of queries, and of the key of each head

    @property
    def stats(self) -> ScoreStats:
        """Statistics, on the device."""
        return self.found.stats(capturing())

    def on_host(self, table: Tensor) -> Pooled:
        """Return what a table says that was copied to the host; what tells errors is fetched when one is asked for."""
        return Table(table, partial(self._errors_on_host, table))()

    def _errors_on_host(self, table: Tensor) -> Uncertainty:
        sample = replace(self.found.sample, positions=self.found.sample.positions.cpu())
        found = self.found._replace(sample=sample, sums=self.found.sums.cpu(), table=table)
        errors = found.stats(refreshed=False).pooled.uncertainty
        assert errors is not None  # only some rows were looked at
        return errors


def probe(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    padding: Tensor | None,
    hidden_keys: Tensor | None,
    scale: float,
    is_causal: bool,
    rows: int,
    table: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Probed | None:
    """Measure about `rows` rows a head; None where no kernel takes the call.

    The mask, (batch or 1, heads or 1, q_len or 1, kv_len), is of booleans. Rows of `padding`, (batch, q_len), and
    `hidden_keys`, (batch or 1, kv_len), do not count. `table` and `lengths`, float64 as Probed has them, are written
    to; without them new ones are.
    """
    seen = Visibility(last=0 if is_causal else None, mask=mask)
    seen = seen if padding is None else seen.without_rows(padding)
    call = Call(query, key, key, seen, 0.0, scale, None)
    takes_mask = mask is None or (mask.dim() == 4 and mask.dtype == torch.bool and mask.shape[-1] == key.shape[2])
    if not takes_mask or len(query) != len(key) or not measures(call):
        return None
    planned = design(rows, query.shape[2], len(query), not seen.is_full)
    if planned is None:
        return None  # so many rows are all there are
    with torch.no_grad():
        lengths = query.new_empty((2, query.shape[1]), dtype=torch.float64) if lengths is None else lengths
        longest_query = _measure_lengths(query, padding, lengths[0])
        longest_key = _measure_lengths(key, hidden_keys, lengths[1])
        return Probed(measure_rows(call, planned, abs(scale) * longest_query * longest_key, table=table), lengths)


def _measure_lengths(vectors: Tensor, left_out: Tensor | None, lengths: Tensor) -> Tensor:
    """Write the root mean square length of what counts, for each query head; return the length of the longest.

    Where nothing would count, everything does.
    """
    squares = torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float32).square_()  # (batch, heads, positions)
    if left_out is None:
        mean = squares.mean((0, 2), dtype=torch.float64)
    else:
        counted = (~(left_out & ~left_out.all())).expand(len(vectors), -1)
        mean = torch.where(counted.unsqueeze(1), squares, 0.0).sum((0, 2), dtype=torch.float64) / counted.sum()
    group = len(lengths) // vectors.shape[1]
    torch.sqrt(mean.repeat_interleave(group), out=lengths)
    longest: Tensor = squares.amax((0, 2)).sqrt_().repeat_interleave(group)
    return longest
