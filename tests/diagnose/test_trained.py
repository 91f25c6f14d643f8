"""Trained models: how they are told from initialised ones, and bugs in weights as training leaves them."""

import pytest
import torch
from torch import nn

from attnscale import audit
from attnscale.diagnose import is_trained
from tests.others import OTHERS_MAY_WARN
from tests.zoo import ENTRIES

pytestmark = OTHERS_MAY_WARN


def encoder():
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)


def without_norms(bias=True):
    return nn.Sequential(nn.Linear(16, 64, bias=bias), nn.ReLU(), nn.Linear(64, 16, bias=bias))


def zero_biases():
    model = without_norms()
    for module in (model[0], model[2]):
        nn.init.xavier_normal_(module.weight)
        nn.init.zeros_(module.bias)
    return model


def zero_gains():
    model = encoder()
    nn.init.zeros_(model.norm1.weight)
    return model


@pytest.mark.parametrize("make", [encoder, without_norms])
def test_a_model_is_at_initialisation_until_it_takes_a_step(make):
    model = make()
    assert not is_trained(model)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(20):
        model(torch.randn(3, 5, 16)).square().mean().backward()
        optimiser.step()
    assert is_trained(model)


@pytest.mark.parametrize(
    "make",
    [
        zero_biases,
        zero_gains,
        lambda: without_norms(bias=False),  # nothing shows training
        lambda: nn.Sequential(nn.LayerNorm(16, elementwise_affine=False), nn.Linear(16, 16, bias=False)),
        lambda: without_norms().to(torch.bfloat16),
        lambda: without_norms().to(torch.float16),
    ],
)
def test_these_count_as_initialisations(make):
    assert not is_trained(make())


# Bugs that people reported, and their fixed twins
FAMILIES = ("reported.", "reported_norms.", "reported_ports.", "designs_of_reports.")
REPORTED = {name: entry for name, entry in ENTRIES.items() if name.startswith(FAMILIES)}
BUGS = [name for name, entry in REPORTED.items() if entry.code is not None]
CORRECT = [name for name, entry in REPORTED.items() if entry.code is None]
# Found whatever the state of the weights, but worth a note only where training may have made up for it.
TRAINED_SPREAD = 1.5  # of the scores, where the multiplier is right


def scale_of(entry):
    return next(iter(entry.layers.values())).scale


def trained(name, gain_of_each_side):
    """The model of an entry with weights as training leaves them: norms and biases moved, queries and keys longer."""
    model, inputs = ENTRIES[name].build()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            module = model.get_submodule(path.rpartition(".")[0])
            if isinstance(module, nn.Linear) and parameter.dim() == 2 and path.split(".")[-2] in ("q_proj", "k_proj"):
                parameter *= gain_of_each_side
            elif "norm" in path or path.endswith("bias"):
                parameter += 0.1 * torch.randn_like(parameter)
    assert is_trained(model)
    return model, inputs


def weights_for(name, state):
    """The gain of queries and keys, each: what makes a spread of 1.5 under the scale of the bug, or of its twin."""
    entry, gain = ENTRIES[name], (3 * TRAINED_SPREAD) ** 0.5
    twin = ENTRIES.get(f"{name}Fixed")
    if state == "ported" or twin is None or not scale_of(entry) or not scale_of(twin):
        return gain
    return gain * abs(scale_of(twin) / scale_of(entry)) ** 0.5


def accusations(model, inputs):
    return [finding for finding in audit(model, *inputs).findings if finding.severity != "note"]


@pytest.mark.parametrize("state", ["trained", "ported"])
@pytest.mark.parametrize("name", BUGS)
def test_a_reported_bug_is_found_in_good_weights(name, state):
    found = accusations(*trained(name, weights_for(name, state)))
    assert {finding.code for finding in found} == {ENTRIES[name].code}


@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_design_is_left_alone_when_trained(name):
    assert [str(each) for each in accusations(*trained(name, weights_for(name, "trained")))] == []
