"""The zoo runs, and its oracle tells the scores: what the tests of watching stand on."""

import pytest
import torch

from tests.others import OTHERS_MAY_WARN
from tests.zoo import BUGS, CORRECT, ENTRIES, FAMILIES, recording

pytestmark = OTHERS_MAY_WARN  # torch's own: nested tensors, TorchScript, FlexAttention


def test_the_zoo_is_large():
    assert len(CORRECT) >= 40
    assert len(BUGS) >= 20
    families = {family.__name__.rsplit(".", 1)[-1] for family in FAMILIES}
    assert {name.split(".")[0] for name in ENTRIES} == families


@pytest.mark.parametrize("name", ENTRIES)
def test_every_entry_runs_in_train_and_in_eval(name):
    entry = ENTRIES[name]
    model, inputs = entry.build()
    for mode in (model.train(), model.eval()):
        with torch.set_grad_enabled(entry.gradients):
            output = mode(*inputs)
        assert output.isfinite().all() == (entry.code not in ("non_finite", "undefined_rows"))


@pytest.mark.parametrize("name", [name for name, entry in CORRECT.items() if entry.statistics != "none"])
def test_the_oracle_tells_the_scores_of_every_layer(name):
    entry = CORRECT[name]
    model, inputs = entry.build()
    with recording(model) as scores, torch.no_grad():
        model.train()(*inputs)
    assert set(scores) == set(entry.layers)
    for path, expected in entry.layers.items():
        assert expected.heads in (None, scores[path].shape[1])
        assert not scores[path].isnan().any()
        assert scores[path].isfinite().any(-1).any()
