"""Bugs that people reported, and their fixed twins, in weights as training leaves them."""

import pytest
import torch
from torch import nn

from attnscale import audit
from attnscale.diagnose import is_trained
from tests.others import OTHERS_MAY_WARN
from tests.zoo import ENTRIES

pytestmark = OTHERS_MAY_WARN
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
