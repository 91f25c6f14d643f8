"""The numbers of one attention call inside a training step, written to a buffer without waiting for the GPU."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.measure.cuda.launch import capturing
from attnscale.measure.cuda.sampled import SampledRows, measure_rows, measures
from attnscale.measure.lengths import add_lengths_
from attnscale.measure.pooled import Pooled, Table
from attnscale.measure.sampling import design
from attnscale.measure.stats import ScoreStats
from attnscale.measure.uncertainty import Uncertainty
from attnscale.visibility import Visibility


class Probed(NamedTuple):
    """Statistics of a probed call, on its device; their `max_bound` is no more than `max`: lengths tell it."""

    found: SampledRows

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
    table: Tensor,
    lengths: Tensor,
) -> Probed | None:
    """Measure about `rows` rows a head into a table; None where no kernel takes the call.

    The mask, (batch or 1, heads or 1, q_len or 1, kv_len), is of booleans. Rows of `padding`, (batch, q_len), and
    `hidden_keys`, (batch or 1, kv_len), do not count. To `lengths` is added what add_lengths_() adds.
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
        add_lengths_(lengths, query, key, padding, hidden_keys)
        return Probed(measure_rows(call, planned, None, table=table))
