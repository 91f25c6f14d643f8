"""QKClip on ranks: the same bits on all of them, as one process has it, for one collective a step."""

import pytest
import torch

from tests.ranks import on_ranks

from . import clip_rank_runs
from .clip_rank_runs import STEPS, Case

CASES = {
    "DDP": Case("ddp", 2, batches=(0, 1)),
    "the module inside DDP, compiled": Case("inside ddp", 2, kind="normed", batches=(0, 1), compiled="whole"),
    "FSDP2, compiled": Case("fsdp", 2, kv_heads=2, batches=(0, 1), compiled="parts"),
    "FSDP2, gains of every head": Case("fsdp", 2, kind="gains", batches=(0, 1)),
    "heads shared out": Case("tp", 2),
    "heads shared out, keys whole": Case("tp", 2, heads=2, kv_heads=1),
    "other layers shared out, heads whole": Case("tp elsewhere", 2, kind="normed"),
    "keys shared out": Case("keys", 2),
    "a rank without data in the first step": Case("copies", 2, batches=(0, 1), idle=((1, 0),)),
    "a rank without data when it is first measured inside": Case("copies", 2, batches=(0, 1), idle=((0, 1),)),
    "FSDP2 × heads": Case("fsdp x tp", 4, batches=(0, 1)),
    "HSDP": Case("hsdp x", 4, batches=(0, 1, 2, 3)),
    "copies × heads, of which one group is given": Case("ddp x tp", 4, batches=(0, 1)),
}


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_clip_as_one_process(world, tmp_path):
    cases = {name: case for name, case in CASES.items() if case.world == world}
    on_ranks(clip_rank_runs.on_ranks, world, str(tmp_path), list(cases.values()))
    held = zip(*(torch.load(tmp_path / f"{rank}.pt") for rank in range(world)), strict=True)
    for (name, case), ranks in zip(cases.items(), held, strict=True):
        compare(name, case, ranks)


def compare(name, case, ranks):
    """What each rank holds, with the others and with one process on all data."""
    expected, told = clip_rank_runs.in_one_process(case)
    first, *_ = ranks[0]
    assert all(told[1:]), name
    for rank, (parameters, heads, counts, is_inside, left) in enumerate(ranks):
        assert is_inside, name
        assert left == [], name
        if "tp" not in case.layout and (rank, 0) not in case.idle:  # who has seen no layer yet cannot name it
            assert [[(layer.removeprefix("module."), head) for layer, head in step] for step in heads] == told, name
        # a second where much was taken from some heads, and the effect is judged; none among ranks with other heads
        assert counts[STEPS - 1] in ([{}] if case.layout == "tp" else [{"all_reduce": 1}, {"all_reduce": 2}]), name
        for each, wanted in expected.items():
            assert torch.equal(parameters[each], first[each]), (name, each)
            torch.testing.assert_close(
                parameters[each], wanted, rtol=1e-4, atol=1e-6, msg=lambda text, at=(name, each): f"{at}: {text}"
            )
