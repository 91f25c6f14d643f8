"""FlexAttention inside compiled models: its functions are called with sampled rows; maxima are the kernel's own."""

import pytest
import torch
from torch._dynamo.utils import counters

import attnscale
from attnscale import QKClip
from attnscale.errors import NotInsideWarning

from .models import flex, tokens
from .runs import start_monitor, whole

pytestmark = pytest.mark.filterwarnings("default")  # torch's own, of FlexAttention and its compiler
KINDS = ("documents", "window", "soft-cap")
PATH = "blocks.0"


def run_steps(run, after, steps=3):
    """Run without gradients, which FlexAttention has on a GPU only."""
    with torch.no_grad():
        for step in range(steps):
            run(tokens(step)[:, :-1])
            after()


def watched(model, step):
    with torch.no_grad(), attnscale.watch(model, rows=None) as seen:
        model(tokens(step)[:, :-1])
    return seen.layers[PATH]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["aot_eager", "eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_model_records_what_watch_shows(kind, backend):
    model = flex(kind)
    run, monitor, records = start_monitor(model, whole(backend, fullgraph=True))
    run_steps(run, monitor.step)
    monitor.close()
    assert counters["stats"]["unique_graphs"] == 1  # the first step is traced
    assert len(records) == 3
    for step, record in enumerate(records):
        layer, found = watched(model, step), record.layers[PATH].numbers
        for number, expected in {
            "total_spread": layer.stats.std, "max": layer.stats.max, "entropy_ratio": layer.stats.entropy_ratio,
            "scale_applied": layer.scales, "key_norm": layer.key_norm,
        }.items():  # fmt: skip
            assert found[number] == pytest.approx(expected.tolist(), rel=1e-4), number


@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_clipped_by_the_maxima_of_the_kernel(kind):
    model = flex(kind)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    with QKClip(model, 1.5) as clip:
        run_steps(run, clip.step, 1)
        assert clip.is_inside
        with torch.no_grad():
            model.blocks[0].projections[0].weight[:64] *= 2  # of queries and keys
        expected = watched(model, 1).stats.max
        with torch.no_grad():
            run(tokens(1)[:, :-1])
        report = clip.step()
    over = {head: value for head, value in enumerate(expected.tolist()) if value > 1.5}
    assert over
    assert {head.head: head.maximum for head in report.heads} == pytest.approx(over, rel=1e-5)
    assert (watched(model, 1).stats.max <= 1.5).all()


@pytest.mark.parametrize(
    ("kind", "is_compiled", "reason"),
    [("documents", False, "FlexAttention that is not compiled takes no probe"), ("bias", True, "a bias is added")],
)
def test_flex_attention_that_takes_no_probe_is_traced_with_a_warning(kind, is_compiled, reason):
    model = flex(kind)
    run, monitor, records = start_monitor(model, whole() if is_compiled else None)
    with pytest.warns(NotInsideWarning, match=f"the whole model is traced.* {reason}"):
        run_steps(run, monitor.step)
    monitor.close()
    assert records[2].layers[PATH].numbers["max"] == pytest.approx(watched(model, 2).stats.max.tolist(), rel=1e-4)
