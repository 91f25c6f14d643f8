"""What several ranks hold stays the same on all of them to the last bit, in every layout, and as one process has it."""

import time

import pytest
import torch
from torch import nn

import attnscale
from tests.ranks import on_ranks

from . import layout_runs
from .models import watched

# layout, ranks, kind of attention, heads, key heads, batches of the run, ranks that saw nothing
CASES = {
    "DDP": ("ddp", 2, "plain", 4, 4, [0, 1], ()),
    "FSDP2": ("fsdp", 2, "plain", 4, 4, [0, 1], ()),
    "FSDP2, rows of a head on two ranks": ("fsdp", 4, "plain", 2, 2, [0, 1, 2, 3], ()),
    "tensor parallel": ("tp", 2, "plain", 4, 4, [0], ()),
    "keys whole on both ranks": ("tp", 2, "plain", 2, 1, [0], ()),
    "other layers shared out, heads whole": ("tp elsewhere", 2, "normed", 4, 2, [0], ()),
    "the module inside DDP": ("inside ddp", 2, "plain", 4, 4, [0, 1], ()),
    "a DDP rank that saw nothing": ("ddp", 2, "normed", 4, 2, [0], (1,)),
    "an FSDP rank that saw nothing": ("fsdp", 2, "plain", 4, 2, [1], (0,)),
    "FSDP2 × TP, keys whole": ("fsdp x tp", 4, "plain", 2, 1, [0, 1], ()),
    "HSDP": ("hsdp x", 4, "plain", 4, 4, [0, 1, 2, 3], ()),
    "copies × TP, of which one group is given": ("ddp x tp", 4, "plain", 4, 4, [0, 1], ()),
}


@pytest.mark.filterwarnings("default")  # torch's own
@pytest.mark.parametrize("world", [2, 4])
def test_replicas_stay_equal_and_as_in_one_process(world, tmp_path):
    for case, ranks in clipped_on_ranks([case for case in CASES.values() if case[1] == world], tmp_path):
        compare(case, ranks)


@pytest.mark.filterwarnings("default")  # torch's own
@pytest.mark.parametrize("kind", ["gains", "normed"])
def test_heads_made_by_a_gain_that_is_whole_on_tensor_parallel_ranks_are_left_and_say_why(kind, tmp_path):
    ((_, ranks),) = clipped_on_ranks([("tp", 2, kind, 4, 4, [0], ())], tmp_path)
    before = layout_runs.made(kind, 4, 4)
    for parameters, _, left in ranks:
        assert left
        assert all("are not sharded by head" in each for each in left)
        assert all(torch.equal(parameters[name], each) for name, each in layout_runs.whole(before).items())


def test_parameters_that_fsdp1_flattened_are_refused(tmp_path):
    on_ranks(layout_runs.flattened, 2, str(tmp_path))
    for rank in range(2):
        answers = (tmp_path / f"{rank}.txt").read_text(encoding="utf-8").splitlines()
        assert len(answers) == 18
        assert all("FSDP1" in answer for answer in answers), answers


def clipped_on_ranks(cases, folder):
    """Clip on ranks: each case with what its ranks hold then."""
    (world,) = {case[1] for case in cases}
    on_ranks(layout_runs.clip_all, world, str(folder), world, cases)
    held = zip(*(torch.load(folder / f"{rank}.pt") for rank in range(world)), strict=True)
    return list(zip(cases, held, strict=True))


def compare(case, ranks):
    """What each rank of a case holds, with the others and with one process on all they saw."""
    _, _, kind, heads, kv_heads, batches, _ = case
    one = layout_runs.made(kind, heads, kv_heads)
    before = layout_runs.whole(one)
    expected = attnscale.clip_qk_(
        one, watched(one, (torch.cat([layout_runs.data(which) for which in batches]),)), layout_runs.THRESHOLD
    )
    assert expected.heads
    assert [name for name, parameter in one.named_parameters() if not torch.equal(parameter, before[name])], case
    for parameters, scales, left in ranks:
        assert left == [], case
        assert scales == pytest.approx([(layout_runs.D_MODEL // heads) ** -0.5] * len(scales), rel=1e-5), case
        for name, parameter in one.named_parameters():
            assert torch.equal(parameters[name], ranks[0][0][name]), (case, name)
            torch.testing.assert_close(parameters[name], parameter.detach(), rtol=1e-5, atol=1e-6)


def test_thousands_of_heads_are_clipped_within_a_second():
    """6,400 heads took 70 s: every head was compared with every other, and with every row."""
    torch.manual_seed(0)
    layers, heads = 100, 64
    model = nn.ModuleList(nn.MultiheadAttention(2 * heads, heads, batch_first=True) for _ in range(layers))
    x = torch.randn(1, 3, 2 * heads)
    with torch.no_grad(), attnscale.watch(model, rows=None) as seen:
        for layer in model:
            layer(x, x, x)
    limit = min(float(layer.stats.max.min()) for layer in seen.layers.values()) / 2
    began = time.process_time()
    report = attnscale.clip_qk_(model, seen, threshold=abs(limit) / 1e3)
    taken = time.process_time() - began
    assert len(report.heads) > 0.9 * layers * heads
    assert taken < 5  # of the processor; 70 s before, and 0.33 in benchmarks/clip.py
