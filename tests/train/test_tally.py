"""What a rank saw, on its way into a record: the same whether a kernel pooled it or its rows were pooled here."""

import torch

from attnscale.declared import Declared
from attnscale.measure import score_stats
from attnscale.measure.pooled import Table, pack
from attnscale.measure.stats import ScoreStats
from attnscale.train.tally import PendingTallies, records, whole_layers
from attnscale.watching.gradients import GradientLengths
from attnscale.watching.layer import Layer


def _layer(name, heads, pooled, by_kernel, gradients):
    stats = ScoreStats(heads, exact=True, pool=Table(pack(pooled, errors=False)) if by_kernel else pooled)
    norms = {side: torch.arange(1.0, heads + 1, dtype=torch.float64) for side in ("query_norm", "key_norm")}
    return Layer(
        name, "sdpa", heads, heads, 11, (), 5, 7, False, None, stats, torch.full((heads,), 0.3),
        declared=Declared(), gradients=gradients, **norms,
    )  # fmt: skip


def _records(by_kernel):
    torch.manual_seed(0)
    layers = {}
    for number, heads in enumerate((3, 5, 2)):
        pooled = score_stats(torch.randn(2, heads, 5, 11), torch.randn(2, heads, 7, 11)).pooled
        lengths = () if number == 1 else (GradientLengths(torch.rand(heads).double(), torch.rand(heads).double()),)
        is_table = by_kernel == "all" or (by_kernel == "some" and number == 0)
        layers[f"layer {number}"] = _layer(f"layer {number}", heads, pooled, is_table, lengths)
    return records(whole_layers(PendingTallies(layers, 0).tallies()))


def test_records_are_the_same_from_the_tables_of_kernels_and_from_rows():
    plain = _records("none")
    assert _records("all") == plain == _records("some")
    assert [len(layer.numbers["max"]) for layer in plain.values()] == [3, 5, 2]
    assert ["query_gradient" in layer.numbers for layer in plain.values()] == [True, False, True]
