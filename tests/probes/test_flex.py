"""FlexAttention inside compiled models: its functions are called with sampled rows; maxima are the kernel's own."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import attnscale
from attnscale import Monitor, QKClip
from attnscale.errors import NotInsideWarning

from .runs import VOCABULARY, tokens

pytestmark = pytest.mark.filterwarnings("default")  # torch's own, of FlexAttention and its compiler
LENGTH, HEADS = 24, 2
KINDS = ("documents", "window", "soft-cap")


class Flex(nn.Module):
    """One layer with documents, a window or a soft-cap."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.made = nn.Embedding(VOCABULARY, 32), nn.Linear(32, 96)
        self.register_buffer("documents", torch.arange(LENGTH) // 7)
        documents = self.documents
        masks = {
            "documents": lambda b, h, i, j: documents[i] == documents[j],
            "window": lambda b, h, i, j: (j <= i) & (i - j < 5),
        }
        self.block_mask = create_block_mask(masks.get(kind, causal), None, None, LENGTH, LENGTH, device="cpu")
        scores = {
            "soft-cap": lambda s, b, h, i, j: 3 * torch.tanh(s / 3),
            "bias": lambda s, b, h, i, j: s - 0.1 * (i - j),
        }
        self.score_mod = scores.get(kind)

    def forward(self, given):
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2).contiguous()  # in one buffer torch 2.11 does not take them
            for part in self.made(2 * self.embedding(given)).chunk(3, -1)
        )
        return flex_attention(query, key, value, score_mod=self.score_mod, block_mask=self.block_mask)


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    counters.clear()


def causal(b, h, i, j):
    return j <= i


def run_steps(model, run, after, steps=3):
    """Without gradients, which FlexAttention has on a GPU alone."""
    with torch.no_grad():
        for step in range(steps):
            run(tokens(step, length=LENGTH)[:, :-1])
            after()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["aot_eager", "eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_model_tells_what_watching_it_does(kind, backend):
    model, records = Flex(kind), []
    run = torch.compile(model, backend=backend, fullgraph=True)
    monitor = Monitor(model, 1, None, [records.append])
    run_steps(model, run, monitor.step)
    monitor.close()
    assert counters["stats"]["unique_graphs"] == 1  # the first was followed from outside
    assert len(records) == 3
    for step, record in enumerate(records):
        with torch.no_grad(), attnscale.watch(model, rows=None) as seen:
            model(tokens(step, length=LENGTH)[:, :-1])
        layer, found = seen.layers["Flex"], record.layers["Flex"].numbers
        for number, expected in {
            "total_spread": layer.stats.std, "max": layer.stats.max, "entropy_ratio": layer.stats.entropy_ratio,
            "scale_applied": layer.scales, "key_norm": layer.key_norm,
        }.items():  # fmt: skip
            assert found[number] == pytest.approx(expected.tolist(), rel=1e-4), number


@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_clipped_by_what_the_kernel_tells_of_its_rows(kind):
    model = Flex(kind)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    with QKClip(model, 1.5) as clip:
        run_steps(model, run, clip.step, 1)
        assert clip.is_inside
        with torch.no_grad():
            model.made.weight[:64] *= 2
        with torch.no_grad(), attnscale.watch(model, rows=None) as seen:
            model(tokens(1, length=LENGTH)[:, :-1])
        with torch.no_grad():
            run(tokens(1, length=LENGTH)[:, :-1])
        report = clip.step()
    expected = seen.layers["Flex"].stats.max
    assert {head.head: head.maximum for head in report.heads} == pytest.approx(
        {head: value for head, value in enumerate(expected.tolist()) if value > 1.5}, rel=1e-5
    )
    with torch.no_grad(), attnscale.watch(model, rows=None) as seen:
        model(tokens(1, length=LENGTH)[:, :-1])
    assert (seen.layers["Flex"].stats.max <= 1.5).all()


@pytest.mark.parametrize(
    ("kind", "is_compiled", "reason"),
    [("documents", False, "FlexAttention that is not compiled takes no probe"), ("bias", True, "a bias is added")],
)
def test_elsewhere_the_model_is_traced_at_sampled_steps_and_that_is_told(kind, is_compiled, reason):
    model, records = Flex(kind), []
    run = torch.compile(model, backend="aot_eager") if is_compiled else model
    monitor = Monitor(model, 1, None, [records.append])
    with pytest.warns(NotInsideWarning, match=f"the whole model is traced.* {reason}"):
        run_steps(model, run, monitor.step)
    monitor.close()
    with torch.no_grad(), attnscale.watch(model, rows=None) as seen:
        model(tokens(2, length=LENGTH)[:, :-1])
    assert records[2].layers["Flex"].numbers["max"] == pytest.approx(seen.layers["Flex"].stats.max.tolist(), rel=1e-4)
