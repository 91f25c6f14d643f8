"""Layers have the same names whatever wraps the model, or parts of it, so that a resumed run continues its history."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import attnscale
from tests.others import OTHERS_MAY_WARN
from tests.train.training import batch, loss_of, small_model
from tests.zoo.entry import Block, SelfAttention

pytestmark = OTHERS_MAY_WARN  # Dynamo reads .grad of what is no leaf
NAMES = ["blocks.0.attention", "blocks.1.attention"]


class Wrapper(nn.Module):
    """Holds a module under the name that FSDP1 uses; FSDP1 itself needs a process group."""

    def __init__(self, wrapped):
        super().__init__()
        self._fsdp_wrapped_module = wrapped

    def forward(self, *args, **kwargs):
        return self._fsdp_wrapped_module(*args, **kwargs)


def blocks_in(wrapper):
    def wrap(model):
        for number, block in enumerate(model.blocks):
            model.blocks[number] = wrapper(block)
        return model

    return wrap


def everywhere(model):
    for block in model.blocks:
        block.attention = Wrapper(checkpoint_wrapper(block.attention))
    return nn.DataParallel(blocks_in(nn.DataParallel)(model))


WRAPPERS = {
    "DDP": nn.DataParallel,  # which holds the model as DDP does
    "torch.compile": lambda model: torch.compile(model, backend="eager"),
    "compiled blocks": blocks_in(lambda block: torch.compile(block, backend="eager")),
    "FSDP1": lambda model: Wrapper(blocks_in(Wrapper)(model)),
    "checkpointing": blocks_in(checkpoint_wrapper),
    "all at once": everywhere,
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_watch_a_monitor_and_qk_clip_name_layers_without_their_wrappers(name):
    model = WRAPPERS[name](small_model())
    with attnscale.watch(model) as seen:
        loss_of(model, batch())
    assert list(seen.layers) == NAMES
    records, monitor, clip = [], attnscale.Monitor(model, every=1), attnscale.QKClip(model, threshold=1e-3)
    monitor.sinks.append(records.append)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    reports = []
    for step in range(4):
        loss_of(model, batch(seed=step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        reports.append(clip.step())
        monitor.step()
    monitor.close()
    clip.close()
    assert [sorted(record.layers) for record in records] == [NAMES] * 4
    assert {head.layer for report in reports if report is not None for head in report.heads} == set(NAMES)


class Plain(SelfAttention):
    def __init__(self, d_model, heads):
        super().__init__(d_model, heads)
        self.softmax_scale = 0.25

    def forward(self, x):
        attend = torch.nn.functional.scaled_dot_product_attention
        return self.merge(attend(*self.project(x), scale=self.softmax_scale))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(24, Plain(24, 2)) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_scale_attribute_of_a_wrapped_module_is_found_and_changed(name):
    model, x = WRAPPERS[name](Model()), torch.randn(1, 5, 24)
    with torch.no_grad():
        layers = attnscale.audit(model, x).layers
        assert {path: layer.declared.scale for path, layer in layers.items()} == dict.fromkeys(NAMES, 0.25)
        report = attnscale.rescale_(model, "inverse_sqrt", x)
        assert {(head.layer, round(head.after**-2)) for head in report.heads} == {(path, 12) for path in NAMES}
        folded = {path: layer.declared.folded for path, layer in attnscale.audit(model, x).layers.items()}
    assert folded == pytest.approx(dict.fromkeys(NAMES, 4 * 12**-0.5))


def test_a_layer_that_is_the_model_is_named_by_its_own_class():
    with attnscale.watch(model := nn.DataParallel(Plain(24, 2))) as seen:
        model(torch.randn(1, 5, 24))
    assert list(seen.layers) == ["Plain"]


class Named(nn.Module):
    """Two blocks under names that wrappers use too."""

    def __init__(self, first, second):
        super().__init__()
        self.block = Block(24, Plain(24, 2))
        setattr(self.block if first == "block" else self, second, Block(24, Plain(24, 2)))
        self.second = f"{first}.{second}".removeprefix(".")

    def forward(self, x):
        return self.get_submodule(self.second)(self.block(x))


@pytest.mark.parametrize(("first", "second"), [("block", "_orig_mod"), ("", "module")])
def test_a_wrapper_name_is_kept_where_it_distinguishes_layers(first, second):
    with attnscale.watch(model := Named(first, second)) as seen:
        model(torch.randn(1, 5, 24))
    assert list(seen.layers) == ["block.attention", f"{model.second}.attention"]
