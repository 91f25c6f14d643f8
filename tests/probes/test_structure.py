"""Whether a model holds the modules that it held: asked at every step, so told without a walk through the model."""

import gc

import pytest
import torch
from torch import nn

from attnscale.probes.placement import Structure


def model():
    made = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 5), nn.ReLU()), nn.Module())
    made[2].register_module("none", None)
    return made


def replace(made):
    made[1][0] = nn.Linear(3, 5)


def replace_where_it_lay(made):
    """So that the new one may have the address of the old."""
    del made[1]._modules["0"]
    gc.collect()
    made[1]._modules = {"0": nn.Linear(3, 5), **made[1]._modules}


def take_out(made):
    made[1][1] = None


def put_in(made):
    made[2].none = nn.ReLU()


def turn_round(made):
    made[1]._modules = dict(reversed(made[1]._modules.items()))


def append(made):
    made.append(nn.ReLU())


@pytest.mark.parametrize("change", [replace, replace_where_it_lay, take_out, put_in, turn_round, append])
def test_a_change_of_its_modules_is_noticed(change):
    made = model()
    structure = Structure(made)
    assert structure.matches(made)
    change(made)
    assert not structure.matches(made)
    assert Structure(made).matches(made)


def test_another_model_of_the_same_modules_is_another():
    made = model()
    assert not Structure(made).matches(nn.Sequential(*made))


def test_what_a_model_computes_with_may_change():
    made = model()
    structure = Structure(made)
    made[0].weight = nn.Parameter(torch.zeros(3, 2))
    assert structure.matches(made)


def test_modules_that_hold_each_other_twice_are_known():
    made = model()
    made.append(made[1])
    assert Structure(made).matches(made)
