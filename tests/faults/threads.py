"""A second thread runs the model that is trained and watched: it is neither seen nor felt."""

import threading

import torch

import attnscale
from attnscale.torch_internals import modes_in_place
from tests.train.training import LENGTH, batch, loss_of, small_model

STEPS = 100
ROWS = 4 * 3 * LENGTH  # of a batch of four, three heads


def _trained_beside(evaluate, every):
    """How many of STEPS steps ran, left no mode behind, and recorded the rows of the batch alone."""
    model, records, ended, other = small_model(), [], threading.Event(), batch(7, 5)
    failures = []

    def run():
        while not ended.is_set():
            try:
                evaluate(model, other[:, :-1])
            except Exception as error:
                failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    survived = 0
    try:
        monitor = attnscale.Monitor(model, every=every, rows=None, sinks=[records.append])
        for step in range(STEPS):
            recorded = len(records)
            loss_of(model, batch(4, step)).backward()
            monitor.step()
            survived += {layer.rows for each in records[recorded:] for layer in each.layers.values()} <= {ROWS}
        monitor.close()
    finally:
        ended.set()
        thread.join()
    return 0 if modes_in_place() or failures or not records else survived


def _plainly(model, tokens):
    with torch.no_grad():
        model(tokens)


def _watching(model, tokens):
    with attnscale.watch(model), torch.no_grad():
        model(tokens)


def evaluations(folder):
    runs = [_trained_beside(evaluate, every) for evaluate in (_plainly, _watching) for every in (1, 3)]
    return STEPS * len(runs), sum(runs)


FAULTS = {"a model is evaluated beside its training": evaluations}
