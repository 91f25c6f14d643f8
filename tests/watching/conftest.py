import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Models as small as these run faster on one thread, and much faster where another process has the other core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _unreadable_operations_are_errors(monkeypatch):
    monkeypatch.setattr("attnscale.watching.watcher.RAISE_FAILURES", True)
