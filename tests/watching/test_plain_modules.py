"""Layers of torch's own that are not entered and left: what they are a part of, and what they are alone."""

import pytest
import torch
from torch import nn

from attnscale import watch
from attnscale.errors import InputError
from attnscale.watching.settings import Settings
from attnscale.watching.watcher import Watcher


def test_a_plain_layer_is_told_to_have_run_and_is_a_part_of_what_is_around_it():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4), nn.Softmax(-1)))
    watcher = Watcher(model, Settings())
    stacks = []
    model[1][0].register_forward_pre_hook(lambda *_: stacks.append(list(watcher.running.stack)))
    model[1][1].register_forward_pre_hook(lambda *_: stacks.append(list(watcher.running.stack)))
    watcher.running.attach()
    try:
        model(torch.randn(2, 4))
    finally:
        watcher.running.detach()
    assert stacks == [["", "1"], ["", "1", "1.1"]]
    assert watcher.running.called == {"", "0", "1", "1.0", "1.1"}


def test_a_plain_layer_that_runs_alone_has_run():
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
    with pytest.raises(InputError, match="saw none"), watch(model):
        model[0](torch.randn(2, 4))
