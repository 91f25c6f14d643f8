"""Clipping parameters that are sharded over ranks, or copied to them: as one process would, on all the data."""

import pytest
import torch

import attnscale
from tests.ranks import on_ranks

from . import rank_runs
from .models import watched


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_ranks_clip_as_one_process_on_all_data(tmp_path, kind):
    """axolotl-ai-cloud/axolotl issue 3265: each rank clipped its own shard by its own maximum."""
    model, batches = rank_runs.model_and_batches()
    seen = watched(model, (torch.cat(batches),))
    expected = attnscale.clip_qk_(model, seen, rank_runs.THRESHOLD)
    assert {head.head for head in expected.heads} == {2, 4}
    on_ranks(rank_runs.clip, rank_runs.WORLD, str(tmp_path), kind)
    for rank in range(rank_runs.WORLD):
        parameters, told, highest = torch.load(tmp_path / f"{rank}.pt")
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameters[name], parameter.detach(), rtol=1e-5, atol=1e-6)
        assert [head[:2] for head in told] == [(head.layer, head.head) for head in expected.heads]
        assert [head[3] for head in told] == pytest.approx([head.gamma for head in expected.heads], rel=1e-5)
        assert highest <= rank_runs.THRESHOLD


def test_tensor_parallel_ranks_clip_their_own_heads_as_one_process_would(tmp_path):
    model, x = rank_runs.exploding_transformer()
    expected = attnscale.clip_qk_(model, watched(model, (x,)), rank_runs.THRESHOLD)
    assert [(head.layer, head.head) for head in expected.heads] == [
        ("blocks.0.attention", 1),
        ("blocks.1.attention", 2),
    ]
    on_ranks(rank_runs.tensor_parallel, rank_runs.WORLD, str(tmp_path))
    for rank in range(rank_runs.WORLD):
        parameters, told, left, highest = torch.load(tmp_path / f"{rank}.pt")
        assert left == []
        assert [head[:2] for head in told] == [(f"blocks.{rank}.attention", 1 - rank)]
        assert highest <= rank_runs.THRESHOLD
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameters[name], parameter.detach(), rtol=1e-5, atol=1e-6)


def test_flattened_parameters_are_refused(tmp_path):
    on_ranks(rank_runs.flattened, rank_runs.WORLD, str(tmp_path))
    for rank in range(rank_runs.WORLD):
        answers = (tmp_path / f"{rank}.txt").read_text(encoding="utf-8").splitlines()
        assert len(answers) == 18
        assert all("FSDP1" in answer for answer in answers), answers
