"""What is followed belongs to the thread that watches; others run plainly and unseen."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import attnscale
from attnscale.errors import InputError
from attnscale.torch_internals import modes_in_place
from tests.train.training import LENGTH, batch, loss_of, small_model

ROWS = 4 * 3 * LENGTH  # of a batch of four, three heads


@pytest.fixture
def beside():
    """Runs something over and over on another thread, and gives its failures; ended with the test."""
    ended, failures, threads = threading.Event(), [], []

    def begin(work):
        def run():
            while not ended.is_set():
                try:
                    work()
                    assert modes_in_place() == 0
                except Exception as error:
                    failures.append(error)

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        return failures

    yield begin
    ended.set()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("every", [1, 2])
def test_evaluation_on_another_thread_is_neither_seen_nor_felt(beside, gradients, every):
    model, records, other = small_model(), [], batch(7, 5)

    def evaluate():
        with torch.set_grad_enabled(gradients):
            model(other[:, :-1])

    beside(evaluate)
    monitor = attnscale.Monitor(model, every=every, rows=None, sinks=[records.append])
    for step in range(30):
        loss_of(model, batch(4, step)).backward()
        monitor.step()
    monitor.close()
    assert modes_in_place() == 0
    assert [record.step for record in records] == list(range(0, 30, every))
    assert {layer.rows for record in records for layer in record.layers.values()} == {ROWS}


def test_two_threads_that_watch_one_model_see_their_own():
    model = small_model()

    def watched(size):
        for seed in range(8):
            with attnscale.watch(model, rows=None) as seen:
                model(batch(size, seed)[:, :-1])
            assert {int(layer.stats.rows.sum()) for layer in seen.layers.values()} == {size * 3 * LENGTH}
        return modes_in_place()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(watched, (2, 5))) == [0, 0]


class Slow(nn.Module):
    """An attention that waits in its middle until it is let go."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.inside, self.go_on = threading.Event(), threading.Event()

    def forward(self, x):
        self.inside.set()
        assert self.go_on.wait(30)
        return self.attention(x, x, x)[0]


def test_a_monitor_closed_by_another_thread_leaves_no_mode_behind():
    model = Slow()
    with ThreadPoolExecutor(1) as trainer:
        monitor = trainer.submit(attnscale.Monitor, model, every=1).result()
        forward = trainer.submit(model, torch.randn(2, 5, 6))
        assert model.inside.wait(30)
        monitor.close()
        time.sleep(0.01)
        model.go_on.set()
        assert forward.result().shape == (2, 5, 6)
        assert trainer.submit(modes_in_place).result() == 0
    assert modes_in_place() == 0
    assert not nn.modules.module._global_forward_hooks


def test_a_model_that_ran_only_on_another_thread_gives_a_warning():
    model = small_model()
    with ThreadPoolExecutor(1) as pool, pytest.raises(InputError, match="on another thread"), attnscale.watch(model):
        pool.submit(model, batch()[:, :-1]).result()
