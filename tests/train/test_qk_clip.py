"""QKClip does at every step what watch() and clip_qk_ do, for eager and compiled models of every layout."""

import copy
import json
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from attnscale import QKClip
from attnscale.errors import InputError, NotInsideWarning

from ..acting.models import before_and, between
from .clip_runs import (
    MODELS,
    Attention,
    Biased,
    by_hand,
    data,
    growing,
    highest,
    made,
    trained,
    with_clip,
)

pytestmark = [  # torch's own
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what its compiler imports
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Lazy modules are a new feature"),
]


def each_block(model):
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    return model


WAYS = {
    "eager": lambda model: model,
    "aot_eager": lambda model: torch.compile(model, backend="aot_eager"),
    "each block": each_block,
}


CASES = [
    *((name, "eager", 1) for name in MODELS),
    ("grouped keys", "aot_eager", 1),
    ("latent keys", "each block", 1),
    ("gains kept as 1 + weight", "aot_eager", 1),
    ("tied", "each block", 1),
    ("written out, grouped keys", "aot_eager", 1),
    ("written out, capped", "each block", 1),
    *(("plain", way, 3) for way in WAYS),
    *((name, way, 3) for name in ("reentrant checkpoints", "checkpoints") for way in ("eager", "each block")),
]


@pytest.mark.parametrize(("name", "way", "micro_batches"), CASES)
def test_every_layout_is_clipped_as_by_hand_by_the_maxima_of_all_micro_batches(name, way, micro_batches):
    threshold = between(highest(made(**MODELS[name]), parts=micro_batches))
    expected, model = made(**MODELS[name]), made(**MODELS[name])
    told = by_hand(expected, threshold, micro=micro_batches)
    clip, reports = with_clip(model, threshold, 4, WAYS[way], micro=micro_batches)
    assert clip.is_inside
    clip.close()
    assert any(report.heads for report in told[1:]), "nothing was clipped where it is measured inside"
    for one, other in zip(told, reports, strict=True):
        assert bool(one.heads) == (other is not None and bool(other.heads))
        for mine, theirs in zip(one.heads, () if other is None else other.heads, strict=bool(one.heads)):
            assert (mine.layer, mine.head, mine.measured) == (theirs.layer, theirs.head, theirs.measured)
            assert theirs.maximum == pytest.approx(mine.maximum, rel=1e-4)
            assert theirs.gamma == pytest.approx(mine.gamma, rel=1e-4)
            assert [each.rows for each in theirs.touched] == [each.rows for each in mine.touched]
    for (parameter, wanted), found in zip(expected.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6, msg=lambda text, p=parameter: f"{p}: {text}")


@pytest.mark.parametrize(("way", "steps"), [("eager", 300), ("aot_eager", 50)])
def test_heads_that_never_pass_keep_their_weights_to_the_last_bit(way, steps):
    plain, clipped = made(), made()
    with QKClip(clipped, 1e6) as clip:
        trained(plain, WAYS[way](plain), steps, optimizer=torch.optim.SGD(plain.parameters(), 0.01))
        reports, optimizer = [], torch.optim.SGD(clipped.parameters(), 0.01)
        trained(clipped, WAYS[way](clipped), steps, optimizer=optimizer, after=lambda: reports.append(clip.step()))
        assert (clip.steps, clip.is_inside, any(reports)) == (steps, True, False)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), clipped.parameters(), strict=True))


def test_a_clip_is_attached_to_an_optimiser_and_removed():
    model, other = made(), made()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with QKClip(model, 2.0) as clip, QKClip(other, 2.0) as beside:
        handle = clip.attach(optimizer)
        trained(model, model, 3, optimizer=optimizer)
        trained(other, other, 3, optimizer=torch.optim.SGD(other.parameters(), 0.05), after=beside.step)
        assert clip.steps == 3
        assert clip.last is not None
        handle.remove()
        trained(model, model, 1, optimizer=optimizer)
        assert clip.steps == 3
    trained(other, other, 1, optimizer=torch.optim.SGD(other.parameters(), 0.05))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_a_resumed_run_goes_on_as_one_that_was_not_broken_off():
    whole, model = made(), made()
    with_clip(whole, 2.0, 4)[0].close()
    clip, _ = with_clip(model, 2.0, 2)
    state = json.loads(json.dumps(clip.state_dict()))
    clip.close()
    assert state == {"steps": 2, "threshold": 2.0}
    again = made()
    again.load_state_dict(pickle.loads(pickle.dumps(model.state_dict())))
    resumed, optimizer = QKClip(again, 50.0), growing(again)
    again(data(9))  # forgotten
    resumed.load_state_dict(state)
    for step in (2, 3):
        again(data(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        resumed.step()
    assert (resumed.steps, resumed.threshold) == (4, 2.0)
    resumed.close()
    for one, other in zip(whole.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_close_leaves_nothing_in_place(steps):
    before = F.scaled_dot_product_attention
    model = made()
    attributes = {name: {*vars(module)} for name, module in model.named_modules()}
    clip, _ = with_clip(model, 2.0, steps)
    clip.close()
    clip.close()
    assert F.scaled_dot_product_attention is before
    plain = made()
    for (name, module), other in zip(model.named_modules(), plain.modules(), strict=True):
        assert type(module) is type(other)
        assert {*vars(module)} == attributes[name]
    with pytest.raises(InputError, match="closed"):
        clip.step()


def test_copies_of_a_model_that_is_clipped_are_plain():
    model = made()
    clip, _ = with_clip(model, 2.0, 2)
    assert type(model.blocks[0].attention) is not Attention
    assert type(copy.deepcopy(model).blocks[0].attention) is Attention
    clip.close()


def test_steps_without_a_forward_or_without_gradients_change_nothing():
    model = made()
    clip = QKClip(model, 2.0)
    before = before_and(model)
    assert clip.step() is None
    assert clip.step() is None
    assert not clip.is_inside
    trained(model, model, 2, after=clip.step)
    assert clip.is_inside
    before = before_and(model)
    assert clip.step() is None
    with torch.no_grad():
        model.eval()(100 * data(0))
    model.train()
    assert clip.step() is None
    assert clip.steps == 6
    assert all(torch.equal(each, before[name]) for name, each in model.named_parameters())
    trained(model, model, 1)
    assert clip.step().heads
    clip.close()


class WithLoss(nn.Module):
    """A model that computes its loss itself, as Hugging Face's do, through a softmax that is no attention."""

    def __init__(self):
        super().__init__()
        self.inner = made()

    def forward(self, x):
        return F.cross_entropy(self.inner(x).flatten(0, 1), torch.zeros(x.shape[:2], dtype=torch.int64).flatten())


def test_a_model_that_computes_its_own_loss_is_measured_inside():
    model = WithLoss()
    clip, _ = with_clip(model, 2.0, 3)
    assert clip.is_inside
    assert clip.last.heads
    clip.close()


class Captured(Attention):
    """Keeps torch's function for itself, where no name leads elsewhere."""

    def __init__(self, *given):
        super().__init__(*given)
        self.attend = F.scaled_dot_product_attention

    def forward(self, x):
        query, key = self.make(x)
        return self.attend(query, key, self.value(x), enable_gqa=True)


def test_sdpa_under_an_own_name_gives_a_warning_and_is_clipped_by_traces():
    model = made(Captured)
    with pytest.warns(NotInsideWarning, match="SDPA by a name of its own"):
        clip, reports = with_clip(model, 2.0, 7)
    assert not clip.is_inside
    assert reports[0] is not None
    assert reports[-1] is not None
    clip.close()


def mixed():
    """The first attention is a fused kernel; to know what is in the scores of the second, it must be traced."""
    model = made()
    model.blocks[1].attention.__class__ = Biased
    with torch.no_grad():
        model.blocks[1].attention.q_proj.weight[:11] *= 4.0
    return model


@pytest.mark.parametrize("make", [lambda: made(Biased), mixed])
@pytest.mark.parametrize("way", ["eager", "aot_eager"])
def test_a_model_in_which_no_probe_fits_is_traced_at_every_step_with_one_warning(make, way):
    threshold = between(highest(make()))
    expected, model = make(), make()
    told = by_hand(expected, threshold)
    with pytest.warns(NotInsideWarning, match=r"uncompiled at every step .*: its scores") as warned:
        clip, reports = with_clip(model, threshold, 4, WAYS[way])
    assert len([each for each in warned if each.category is NotInsideWarning]) == 1
    assert not clip.is_inside
    clip.close()
    assert [bool(report) for report in reports] == [bool(report.heads) for report in told]
    for one, other in zip(expected.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
