"""In every layout of ranks, clip_qk_ and QKClip leave the same bits on all ranks, and the numbers of one process."""

import pytest
import torch

from tests.ranks import on_ranks

from . import layout_runs
from .layout_runs import D_MODEL, STEPS, Case

NOT_SHARDED = "are not sharded by head"
CASES = {
    "DDP": Case("ddp", 2, batches=(0, 1)),
    "a DDP rank that measured nothing": Case("ddp", 2, "normed", kv_heads=2, batches=(0, 1), blind=(1,)),
    "the module inside DDP, compiled": Case("inside ddp", 2, "normed", batches=(0, 1), compiled="whole"),
    "FSDP2, compiled": Case("fsdp", 2, kv_heads=2, batches=(0, 1), compiled="parts"),
    "FSDP2, gains of every head": Case("fsdp", 2, "gains", batches=(0, 1)),
    "an FSDP2 rank that measured nothing": Case("fsdp", 2, kv_heads=2, batches=(0, 1), blind=(0,)),
    "tensor parallel": Case("tp", 2),
    "tensor parallel, keys whole": Case("tp", 2, heads=2, kv_heads=1),
    "tensor parallel, gains of every head whole": Case("tp", 2, "gains", left=NOT_SHARDED),
    "tensor parallel, gains whole": Case("tp", 2, "normed", left=NOT_SHARDED),
    "other layers tensor parallel, heads whole": Case("tp elsewhere", 2, "normed"),
    "context parallel": Case("keys", 2),
    "a rank without data in the first step": Case("copies", 2, batches=(0, 1), idle=((1, 0),)),
    "a rank without data when it is first measured inside": Case("copies", 2, batches=(0, 1), idle=((0, 1),)),
    "FSDP2, rows of a head on two ranks": Case("fsdp", 4, heads=2, kv_heads=2, batches=(0, 1, 2, 3)),
    "FSDP2 × TP": Case("fsdp x tp", 4, batches=(0, 1)),
    "FSDP2 × TP, keys whole": Case("fsdp x tp", 4, heads=2, kv_heads=1, batches=(0, 1)),
    "HSDP": Case("hsdp x", 4, batches=(0, 1, 2, 3)),
    "copies × TP, of which one group is passed": Case("ddp x tp", 4, batches=(0, 1)),
}


@pytest.mark.filterwarnings("default")  # torch's own
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_clip_as_one_process(world, tmp_path):
    cases = {name: case for name, case in CASES.items() if case.world == world}
    on_ranks(layout_runs.on_ranks, world, str(tmp_path), list(cases.values()))
    held = zip(*(torch.load(tmp_path / f"{rank}.pt") for rank in range(world)), strict=True)
    for (name, case), ranks in zip(cases.items(), held, strict=True):
        compare_once(name, case, [each for each, _ in ranks])
        if not case.left:
            compare_trained(name, case, [each for _, each in ranks])


def compare_once(name, case, ranks):
    expected = layout_runs.whole(layout_runs.made(case)) if case.left else layout_runs.once_in_one_process(case)
    for parameters, scales, left in ranks:
        assert bool(left) == bool(case.left), name
        assert all(case.left in each for each in left), name
        assert scales == pytest.approx([(D_MODEL // case.heads) ** -0.5] * len(scales), rel=1e-5), name
        assert_equal_parameters(name, parameters, ranks[0][0], expected, rtol=1e-5)


def compare_trained(name, case, ranks):
    expected, heads_of_one = layout_runs.trained_in_one_process(case)
    assert all(heads_of_one[1:]), name
    for rank, (parameters, heads, counts, is_inside, left) in enumerate(ranks):
        assert is_inside, name
        assert left == [], name
        if "tp" not in case.layout and (rank, 0) not in case.idle:  # who has seen no layer yet cannot name it
            assert heads == heads_of_one, name
        # a second where much was taken from some heads, and the effect is judged; none among ranks with other heads
        assert set(counts[STEPS - 1]) == (set() if case.layout == "tp" else {"c10d.allreduce_"}), name
        assert sum(counts[STEPS - 1].values()) <= 2, name
        assert_equal_parameters(name, parameters, ranks[0][0], expected, rtol=1e-4)


def assert_equal_parameters(name, parameters, of_first, expected, rtol):
    for each, wanted in expected.items():
        assert torch.equal(parameters[each], of_first[each]), (name, each)
        torch.testing.assert_close(
            parameters[each], wanted, rtol=rtol, atol=1e-6, msg=lambda text, at=(name, each): f"{at}: {text}"
        )


def test_parameters_that_fsdp1_flattened_are_refused(tmp_path):
    on_ranks(layout_runs.flattened, 2, str(tmp_path))
    for rank in range(2):
        answers = (tmp_path / f"{rank}.txt").read_text(encoding="utf-8").splitlines()
        assert len(answers) == 18
        assert all("FSDP1" in answer for answer in answers), answers
