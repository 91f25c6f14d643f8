"""A clip that has no effect, or that is not there at the next step, is stopped, and nothing is destroyed by it."""

import logging
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as older_spectral_norm

import attnscale
from attnscale.acting import head_rows
from attnscale.errors import NotFollowedWarning, SettingError

from ..train.clip_runs import LatentKeys
from .models import (
    D_MODEL,
    HEAD_DIM,
    HEADS,
    WAYS,
    Attention,
    assert_changed_as_told,
    batch,
    before_and,
    made,
    maxima,
    parameters,
    sharpened,
    touched,
    watched,
    with_qk_clip,
)

NO_EFFECT = "its scores did not decrease when its weights were scaled down"
KINDS = {"plain": {}, "one key": {"kv_heads": 1}, "latent keys": {"kind": LatentKeys}}
ACTIONS = {
    "clip_qk_": lambda model, inputs, **more: attnscale.clip_qk_(model, watched(model, inputs), 1e-3, **more),
    "rescale_": lambda model, inputs, **more: attnscale.rescale_(model, 0.01, inputs, **more),
    "calibrate_": attnscale.calibrate_,
}


@pytest.fixture
def misread(monkeypatch):
    """Heads are taken for their neighbours: what is scaled is not what makes the scores."""
    plain = head_rows.HeadRows._uses

    def uses(self, name, layer, origin, side):
        found, first = plain(self, name, layer, origin, side), self.number_of[name, 0]
        head = first + (found.head - first + 1) % layer.heads
        return head_rows.Uses(found.row, head, found.feature + (head - found.head) * self._widest)

    monkeypatch.setattr(head_rows.HeadRows, "_uses", uses)


@pytest.mark.parametrize(("factor", "threshold"), [(1e3, 30.0), (1e3, 3.0), (1e9, 1.0)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_clip_without_effect_takes_no_more_than_a_thousandth_is_undone_and_says_so_once(
    way, kind, factor, threshold, misread
):
    model = made(factor=factor, **KINDS[kind])
    before, shares = before_and(model), []

    def note(step):
        shares.extend(float(each.detach().norm() / before[name].norm()) for name, each in model.named_parameters())

    with pytest.warns(NotFollowedWarning, match="stops at .*: its scores did not decrease") as warned:
        reports = list(WAYS[way](model, batch(), threshold, 40, note))
    assert min(shares) >= 0.999e-3
    assert len([each for each in warned if each.category is NotFollowedWarning]) == 1
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name], rtol=1e-4, atol=0)
    assert not reports[-1].heads
    assert {left.reason for left in reports[-1].left} == {NO_EFFECT}


@pytest.mark.parametrize("way", WAYS)
def test_a_head_a_million_times_over_is_brought_down(way):
    model = made(factor=1e9)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotFollowedWarning)
        list(WAYS[way](model, batch(), 10.0, 6))
    assert maxima(model, batch())[0] == pytest.approx(10.0, rel=1e-3)


@pytest.mark.parametrize(("growth", "noise"), [(1.3, 0.0), (1.0, 1.0), (1.15, 0.7)])
@pytest.mark.parametrize("way", WAYS)
def test_training_that_raises_scores_again_is_no_sign_of_a_clip_without_effect(way, growth, noise):
    model, (x,) = made(factor=30.0), batch()

    def train(step):
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for name in ("q_proj.weight", "k_proj.weight"):
                model.get_parameter(name)[:HEAD_DIM] *= growth
            x.copy_(torch.randn(x.shape, generator=generator) * 10 ** (noise * torch.rand(1, generator=generator)))

    with warnings.catch_warnings():
        warnings.simplefilter("error", NotFollowedWarning)
        reports = list(WAYS[way](model, (x,), 2.0, 60, train))
    assert sum(report is not None and bool(report.heads) for report in reports) > 5


class WithMasters(torch.optim.SGD):
    """Keeps copies of the parameters, moves those, and writes them back, as mixed precision does."""

    def __init__(self, model, rate):
        self.own = list(model.parameters())
        super().__init__([each.detach().float().clone() for each in self.own], rate)

    def step(self):
        copies = self.param_groups[0]["params"]
        for parameter, copied in zip(self.own, copies, strict=True):
            copied.grad = None if parameter.grad is None else parameter.grad.float()
        super().step()
        for parameter, copied in zip(self.own, copies, strict=True):
            parameter.data.copy_(copied)


class WithOutput(nn.Module):
    """An attention, and something else that learns."""

    def __init__(self):
        super().__init__()
        self.attention, self.output = Attention(D_MODEL, HEADS), nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x):
        return self.output(self.attention(x).transpose(1, 2).flatten(2))


def trained(model, optimizer, threshold, steps=6):
    (x,), reports = batch(next(model.parameters()).dtype), []
    with attnscale.QKClip(model, threshold) as clip:
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            reports.append(clip.step())
    return reports


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("factor", [2.0, 50.0])
def test_a_clip_that_the_next_step_undoes_stops_and_says_so(dtype, factor):
    torch.manual_seed(1)
    model = sharpened(WithOutput(), "attention.q_proj.weight", slice(HEAD_DIM), factor).to(dtype)
    with pytest.warns(NotFollowedWarning, match="overwrites the clipped weights") as warned:
        reports = trained(model, WithMasters(model, 1e-2), float(maxima(model, batch(dtype))[0]) / 1.5)
    assert len([each for each in warned if each.category is NotFollowedWarning]) == 1
    assert [bool(report and report.heads) for report in reports][2:] == 4 * [False]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimiser_of_the_models_own_parameters_raises_no_warning(kind):
    torch.manual_seed(1)
    model = sharpened(WithOutput(), "attention.q_proj.weight", slice(HEAD_DIM), 50.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotFollowedWarning)
        reports = trained(model, kind(model.parameters(), 1e-2), 2.0, 20)
    assert reports[0].heads


def test_an_optimiser_of_copies_is_refused():
    model = WithOutput()
    with pytest.raises(SettingError, match="WithMasters, which holds none of them"):
        attnscale.QKClip(model).attach(WithMasters(model, 0.1))


@pytest.mark.parametrize("frozen", [("q_proj",), ("k_proj",), ("q_proj", "k_proj")])
def test_frozen_parameters_are_not_written(frozen):
    model = made(factor=1e3)
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    seen, before = watched(model, batch()), before_and(model)
    report = attnscale.clip_qk_(model, seen, 3.0)
    assert_changed_as_told(before, model, touched(report))
    for name in frozen:
        assert torch.equal(model.get_submodule(name).weight, before[f"{name}.weight"])
    if len(frozen) == 2:
        assert not report.heads
        assert "q_proj.weight is frozen; pass frozen='write'" in report.left[0].reason
        assert attnscale.clip_qk_(model, seen, 3.0, frozen="write").heads
    assert maxima(model, batch()).max() <= 3.0


@pytest.mark.parametrize("act", ["rescale_", "calibrate_"])
def test_no_scale_is_folded_into_frozen_parameters(act):
    model = made(factor=1e3)
    model.requires_grad_(False)
    before = before_and(model)
    report = ACTIONS[act](model, batch())
    assert not report.heads
    assert len(report.left) == HEADS
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    assert len(ACTIONS[act](model, batch(), frozen="write").heads) == HEADS


@pytest.mark.parametrize("frozen", [True, "yes", None])
def test_a_setting_of_frozen_that_is_none_is_refused(frozen):
    model = made()
    for act in (attnscale.QKClip, lambda model, frozen: attnscale.calibrate_(model, batch(), frozen=frozen)):
        with pytest.raises(SettingError, match="'keep' or 'write'"):
            act(model, frozen=frozen)


@pytest.mark.parametrize("attribute", ["ds_id", "_hp_mapping"])
def test_parameters_that_deepspeed_keeps_elsewhere_are_refused(attribute):
    model = made()
    setattr(model.k_proj.weight, attribute, object())
    for act in (lambda: attnscale.QKClip(model), lambda: attnscale.calibrate_(model, batch())):
        with pytest.raises(SettingError, match=r"k_proj\.weight is a copy that DeepSpeed rebuilds"):
            act()


def adapted(model):
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, settings)


@pytest.mark.parametrize("way", WAYS)
def test_a_frozen_base_is_not_written_under_an_adapter(way):
    model = adapted(made(factor=1e3))
    before = before_and(model)
    reports = list(WAYS[way](model, batch(), 3.0, 3))
    assert not any(report.heads for report in reports)
    assert all("base_layer" in left.reason and "is frozen" in left.reason for left in reports[-1].left)
    assert_changed_as_told(before, model, [])


def test_base_and_adapter_are_scaled_together_where_the_base_may_be_written():
    model = adapted(made(factor=1e3))
    was, seen = maxima(model, batch()), watched(model, batch())
    report = attnscale.clip_qk_(model, seen, 3.0, frozen="write")
    assert {each.split("_proj.")[1] for each in parameters(report)} == {
        "base_layer.weight", "base_layer.bias", "lora_B.default.weight",
    }  # fmt: skip
    torch.testing.assert_close(maxima(model, batch()), was.clamp(max=3.0), rtol=1e-4, atol=1e-5)


class Memory(Attention):
    """Learned keys beside those of the tokens, of each head or of all."""

    def __init__(self, *given, heads_of_memory=HEADS, is_first=True):
        super().__init__(*given)
        self.memory, self.is_first = nn.Parameter(torch.randn(heads_of_memory, 3, self.head_dim)), is_first

    def forward(self, x):
        query, key = self.make(x)
        parts = [self.memory.expand(len(x), HEADS, -1, -1), key]
        key = torch.cat(parts if self.is_first else parts[::-1], 2)
        return (query @ key.mT * self.head_dim**-0.5).softmax(-1) @ key


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("heads_of_memory", [1, HEADS])
def test_learned_keys_beside_others_stay_and_queries_take_the_factor(heads_of_memory, is_first):
    model = made(Memory, 1e3, heads_of_memory=heads_of_memory, is_first=is_first)
    was, before = maxima(model, batch()), before_and(model)
    report = attnscale.clip_qk_(model, watched(model, batch()), 3.0)
    assert parameters(report) == {"q_proj.weight", "q_proj.bias"}
    assert_changed_as_told(before, model, touched(report))
    torch.testing.assert_close(maxima(model, batch()), was.clamp(max=3.0), rtol=1e-4, atol=1e-5)


def test_a_reason_is_logged_once_a_layer(caplog):
    model = made()
    model.requires_grad_(False)
    model.v_proj.requires_grad_(True)
    with caplog.at_level(logging.WARNING, "attnscale"):
        reports = list(with_qk_clip(model, batch(), 1e-3, 5))
    assert all(len(report.left) == HEADS for report in reports)
    assert len(caplog.messages) == 1
    assert "heads 0, 1, 2, 3, 4: not changed: q_proj.weight is frozen" in caplog.messages[0]


WRAPS = {
    "spectral norm": parametrizations.spectral_norm,
    "older spectral norm": older_spectral_norm,
    "weight norm": parametrizations.weight_norm,
}


def parametrised(wrap, sides):
    model = made()
    for side in sides:
        wrap(getattr(model, f"{side}_proj"))
    return model.eval()


@pytest.mark.filterwarnings("ignore:.*spectral_norm.* is deprecated")
@pytest.mark.parametrize("act", ACTIONS)
@pytest.mark.parametrize("kind", WRAPS)
def test_queries_and_keys_of_parametrised_weights_are_left_and_not_changed(kind, act):
    model = parametrised(WRAPS[kind], "qk")
    before = before_and(model)
    report = ACTIONS[act](model, batch())
    assert not report.heads
    assert {left.head for left in report.left} == set(range(HEADS))
    assert all("is parametrised" in left.reason for left in report.left)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


@pytest.mark.filterwarnings("ignore:.*spectral_norm.* is deprecated")
@pytest.mark.parametrize(("side", "other"), ["qk", "kq"])
@pytest.mark.parametrize("kind", WRAPS)
def test_where_one_side_is_parametrised_the_other_takes_the_whole_factor(kind, side, other):
    model = parametrised(WRAPS[kind], side + "v")
    threshold = 0.3 * float(maxima(model, batch()).max())
    report = attnscale.clip_qk_(model, watched(model, batch()), threshold)
    assert parameters(report) == {f"{other}_proj.weight", f"{other}_proj.bias"}
    assert float(maxima(model, batch()).max()) == pytest.approx(threshold, rel=1e-4)
