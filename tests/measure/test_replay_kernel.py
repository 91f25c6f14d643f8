"""A replay launches what its function would, with the pointers of the tensors that it is given."""

import pytest
import torch

from attnscale.measure.pooled import TABLE
from attnscale.probes import maxima

from .interpreting import UNFIT, mended_interpreter  # noqa: F401

if UNFIT:
    pytest.skip(UNFIT, allow_module_level=True)

from attnscale.measure.cuda import launch, lengths, replay, sampled

batch, heads, kv_heads, length, head_dim = 2, 6, 3, 37, 16
SCALE = torch.tensor([0, 18, 36]), torch.full((heads,), 0.3), torch.full((heads,), 0.3), None, 0.01
WEIGHTS = torch.ones(5, dtype=torch.float64)


def on_heads(count):
    return torch.randn(batch, length, count, head_dim).transpose(1, 2)


def table_and_lengths():
    return torch.zeros(heads, TABLE, dtype=torch.float64), torch.zeros(2, 3, heads, dtype=torch.float64)


def positions_and_sums():
    return torch.arange(5, dtype=torch.int32).expand(batch, -1).contiguous(), torch.zeros(8, 1, batch, heads, 5)


def hidden_keys():
    return torch.arange(length).expand(batch, -1).contiguous() > 30


def rows_of_sdpa():
    hidden = hidden_keys()
    given = on_heads(heads), on_heads(kv_heads), ~hidden[:, None, None, :], hidden
    return given, (*positions_and_sums(), *table_and_lengths()), (True, True, 0.3, WEIGHTS)


def rows_of_written_scores():
    scores = torch.randn(batch, heads, length, length)
    given = sampled.WrittenScores(scores, on_heads(heads), on_heads(heads), hidden_keys())
    positions, sums = positions_and_sums()
    own = positions, torch.zeros(heads), sums, *table_and_lengths(), torch.zeros(heads, dtype=torch.float64)
    return given, own, (True, *SCALE, WEIGHTS)


def norms():
    return (on_heads(heads), on_heads(kv_heads), None, hidden_keys()), (table_and_lengths()[1],), ()


def largest_scores():
    buffer = torch.zeros(4, heads + 2)
    return (on_heads(heads), on_heads(kv_heads), None, None), (buffer,), (2, heads + 2, False, True, 0.3)


CASES = [
    (sampled.launch_probe, rows_of_sdpa),
    (sampled.launch_scores, rows_of_written_scores),
    (lengths.launch_lengths, norms),
    (maxima._raise_largest_again, largest_scores),
]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(launch, "_are_taken", lambda vectors: True)
    monkeypatch.setattr(launch, "is_intercepted", lambda *tensors: False)


@pytest.mark.parametrize(("replayed", "made"), CASES, ids=lambda case: getattr(case, "__name__", ""))
def test_a_replay_launches_what_its_function_would(monkeypatch, replayed, made):
    again = []
    monkeypatch.setattr(replay.Replay, "_can_replay", lambda *_: replay.RECORDING.launches is None)
    monkeypatch.setattr(launch.Launch, "on", lambda self, grid: lambda *args: again.append((self, args)))
    mine = replay.Replay(replayed._function)
    first, second = made(), made()
    mine(first[0], first[1], *first[2])
    mine(second[0], second[1], *first[2])  # constants are the same objects at every step

    replay.RECORDING.launches = expected = []
    replayed._function(second[0], second[1], *first[2])
    replay.RECORDING.launches = None
    known = [each for each in (*second[0], *second[1]) if each is not None]
    assert len(again) == len(expected) >= 1
    for (own, arguments), (theirs, _, wanted) in zip(again, expected, strict=True):
        assert own is theirs
        pointers = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in wanted]
        tensors = sum(isinstance(each, torch.Tensor) for each in wanted)
        assert arguments[tensors:] == tuple(pointers[tensors:])
        for found, pointer in zip(arguments[:tensors], pointers[:tensors], strict=True):
            is_scratch = not any(0 <= pointer - each.data_ptr() < each.nbytes for each in known)
            assert found == pointer or is_scratch


def test_a_function_that_launches_no_kernel_runs_each_time(monkeypatch):
    monkeypatch.setattr(replay.Replay, "_can_replay", lambda *_: True)
    given, (buffer,), constants = largest_scores()
    monkeypatch.setattr(launch, "_are_taken", lambda vectors: False)
    buffer[:, maxima.LIMIT] = -1e9
    mine = replay.Replay(maxima._raise_largest)
    for _ in range(3):
        buffer[2, :heads] = -torch.inf
        mine(given, (buffer,), *constants)
        assert buffer[2, :heads].isfinite().all()
