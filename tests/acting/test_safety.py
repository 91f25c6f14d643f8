"""A clip that has no effect, or that is not there at the next step, is stopped, and nothing is destroyed by it."""

import logging
import warnings

import pytest
import torch
from torch import nn

import attnscale
from attnscale.acting import head_rows
from attnscale.errors import AttnscaleWarning, NotFollowedWarning, SettingError

from ..train.clip_runs import LatentKeys
from ..zoo import CORRECT
from .models import Attention, assert_changed_as_told, before_and, sharpened, watched

D_MODEL, HEADS, HEAD_DIM, LENGTH = 55, 5, 11, 13


def made(factor=1e3, kind=Attention, **settings):
    torch.manual_seed(5)
    model = sharpened(kind(D_MODEL, HEADS, **settings), "q_proj.weight", slice(HEAD_DIM), factor)
    return model, torch.randn(2, LENGTH, D_MODEL)


@pytest.fixture
def misread(monkeypatch):
    """Heads are taken for their neighbours: what is scaled is not what makes the scores."""
    plain = head_rows.HeadRows._uses

    def uses(self, name, layer, origin, side):
        found, first = plain(self, name, layer, origin, side), self.number_of[name, 0]
        head = first + (found.head - first + 1) % layer.heads
        return head_rows.Uses(found.row, head, found.feature + (head - found.head) * self._widest)

    monkeypatch.setattr(head_rows.HeadRows, "_uses", uses)


def with_clip_qk(model, x, threshold, steps, after=lambda step: None):
    for step in range(steps):
        yield attnscale.clip_qk_(model, watched(model, (x,)), threshold)
        after(step)


def with_qk_clip(model, x, threshold, steps, after=lambda step: None):
    with attnscale.QKClip(model, threshold) as clip:
        for step in range(steps):
            model(x).square().mean().backward()
            yield clip.step()
            after(step)


WAYS = {"clip_qk_": with_clip_qk, "QKClip": with_qk_clip}


KINDS = {"plain": {}, "one key": {"kv_heads": 1}, "latent keys": {"kind": LatentKeys}}


@pytest.mark.parametrize("threshold", [3.0, 30.0], ids=["far over", "less far over"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_clip_without_effect_is_undone_and_stops_and_says_so_once(way, kind, threshold, misread):
    model, x = made(**KINDS[kind])
    before = before_and(model)
    with pytest.warns(NotFollowedWarning, match="stops at .*: its scores did not decrease") as warned:
        reports = list(WAYS[way](model, x, threshold, 40))
    assert len([each for each in warned if each.category is NotFollowedWarning]) == 1
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name], rtol=1e-4, atol=0)
    assert not reports[-1].heads
    assert {left.reason for left in reports[-1].left} == {"its scores did not decrease when its weights were scaled down"}


@pytest.mark.parametrize("way", WAYS)
def test_no_weight_falls_below_a_thousandth_before_the_effect_is_known(way, misread):
    model, x = made(1e9)
    before = before_and(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotFollowedWarning)
        for _ in WAYS[way](model, x, 1.0, 12):
            for name, parameter in model.named_parameters():
                norms = [each.norm() for each in (parameter, before[name])]
                assert norms[0] >= 0.999e-3 * norms[1], name


@pytest.mark.parametrize("way", WAYS)
def test_a_head_a_million_times_over_is_brought_down(way):
    model, x = made(1e9)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotFollowedWarning)
        list(WAYS[way](model, x, 10.0, 6))
    maxima = watched(model, (x,)).layers["Attention"].stats.max
    assert maxima[0] == pytest.approx(10.0, rel=1e-3)


@pytest.mark.parametrize(("growth", "noise"), [(1.3, 0.0), (1.0, 1.0), (1.15, 0.7)])
@pytest.mark.parametrize("way", WAYS)
def test_training_that_raises_scores_again_is_no_sign_of_a_clip_without_effect(way, growth, noise):
    model, x = made(30.0)

    def train(step):
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for name in ("q_proj.weight", "k_proj.weight"):
                model.get_parameter(name)[:HEAD_DIM] *= growth
            x.copy_(torch.randn(x.shape, generator=generator) * 10 ** (noise * torch.rand(1, generator=generator)))

    with warnings.catch_warnings():
        warnings.simplefilter("error", NotFollowedWarning)
        reports = list(WAYS[way](model, x, 2.0, 60, train))
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


class Normed(nn.Module):
    """An attention, and something else that learns."""

    def __init__(self, kind=Attention):
        super().__init__()
        self.attention, self.output = kind(D_MODEL, HEADS), nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x):
        return self.output(self.attention(x).transpose(1, 2).flatten(2))


def trained(model, optimizer, threshold, steps=6):
    x, reports = torch.randn(2, LENGTH, D_MODEL).to(next(model.parameters())), []
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
    model = sharpened(Normed(), "attention.q_proj.weight", slice(HEAD_DIM), factor).to(dtype)
    maximum = float(watched(model, (torch.randn(2, LENGTH, D_MODEL).to(dtype),)).layers["attention"].stats.max[0])
    with pytest.warns(NotFollowedWarning, match="overwrites the clipped weights") as warned:
        reports = trained(model, WithMasters(model, 1e-2), maximum / 1.5)
    assert len([each for each in warned if each.category is NotFollowedWarning]) == 1
    assert [bool(report and report.heads) for report in reports][2:] == 4 * [False]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimiser_of_the_models_own_parameters_raises_no_warning(kind):
    torch.manual_seed(1)
    model = sharpened(Normed(), "attention.q_proj.weight", slice(HEAD_DIM), 50.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotFollowedWarning)
        reports = trained(model, kind(model.parameters(), 1e-2), 2.0, 20)
    assert reports[0].heads


def test_an_optimiser_of_copies_is_refused():
    model = Normed()
    with pytest.raises(SettingError, match="WithMasters, which holds none of them"):
        attnscale.QKClip(model).attach(WithMasters(model, 0.1))


@pytest.mark.parametrize("frozen", [("q_proj",), ("k_proj",), ("q_proj", "k_proj")])
def test_frozen_parameters_are_not_written(frozen):
    model, x = made()
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    seen, before = watched(model, (x,)), before_and(model)
    report = attnscale.clip_qk_(model, seen, 3.0)
    assert_changed_as_told(before, model, [each for head in report.heads for each in head.touched])
    for name in frozen:
        assert torch.equal(model.get_submodule(name).weight, before[f"{name}.weight"])
    if len(frozen) == 2:
        assert not report.heads
        assert "q_proj.weight is frozen; pass frozen='write'" in report.left[0].reason
        assert attnscale.clip_qk_(model, seen, 3.0, frozen="write").heads
    assert watched(model, (x,)).layers["Attention"].stats.max.max() <= 3.0


@pytest.mark.parametrize(
    "act", [attnscale.calibrate_, lambda *given, **more: attnscale.rescale_(given[0], 0.7, given[1], **more)]
)
def test_no_scale_is_folded_into_frozen_parameters(act):
    model, x = made()
    model.requires_grad_(False)
    before = before_and(model)
    report = act(model, (x,))
    assert not report.heads
    assert len(report.left) == HEADS
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    assert len(act(model, (x,), frozen="write").heads) == HEADS


@pytest.mark.parametrize("frozen", [True, "yes", None])
def test_a_setting_of_frozen_that_is_none_is_refused(frozen):
    model, x = made()
    for act in (lambda: attnscale.QKClip(model, frozen=frozen), lambda: attnscale.calibrate_(model, x, frozen=frozen)):
        with pytest.raises(SettingError, match="'keep' or 'write'"):
            act()


@pytest.mark.parametrize("attribute", ["ds_id", "_hp_mapping"])
def test_parameters_that_deepspeed_keeps_elsewhere_are_refused(attribute):
    model, x = made()
    setattr(model.k_proj.weight, attribute, object())
    for act in (lambda: attnscale.QKClip(model), lambda: attnscale.calibrate_(model, (x,))):
        with pytest.raises(SettingError, match=r"k_proj\.weight is a copy that DeepSpeed rebuilds"):
            act()


def adapted(model):
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, settings)


@pytest.mark.parametrize("way", WAYS)
def test_a_frozen_base_is_not_written_under_an_adapter(way):
    model, x = made()
    model = adapted(model)
    before = before_and(model)
    reports = list(WAYS[way](model, x, 3.0, 3))
    assert not any(report.heads for report in reports)
    assert all("base_layer" in left.reason and "is frozen" in left.reason for left in reports[-1].left)
    assert_changed_as_told(before, model, [])


def test_base_and_adapter_are_scaled_together_where_the_base_may_be_written():
    model, x = made()
    model = adapted(model)
    seen = watched(model, (x,))
    report = attnscale.clip_qk_(model, seen, 3.0, frozen="write")
    assert {each.parameter.split("_proj.")[1] for head in report.heads for each in head.touched} == {
        "base_layer.weight", "base_layer.bias", "lora_B.default.weight",
    }  # fmt: skip
    (was,), (now,) = ([layer.stats.max for layer in each.layers.values()] for each in (seen, watched(model, (x,))))
    torch.testing.assert_close(now, torch.where(was > 3.0, 3.0, was), rtol=1e-4, atol=1e-5)


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
    model, x = made(kind=Memory, heads_of_memory=heads_of_memory, is_first=is_first)
    seen, before = watched(model, (x,)), before_and(model)
    report = attnscale.clip_qk_(model, seen, 3.0)
    assert {each.parameter for head in report.heads for each in head.touched} == {"q_proj.weight", "q_proj.bias"}
    assert_changed_as_told(before, model, [each for head in report.heads for each in head.touched])
    was, now = (each.layers["Memory"].stats.max for each in (seen, watched(model, (x,))))
    torch.testing.assert_close(now, torch.where(was > 3.0, 3.0, was), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_heads_whose_scores_are_mixed_are_left(way):
    model, (x,) = CORRECT["structures.TalkingHeads"].build()
    before = before_and(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AttnscaleWarning)
        reports = list(WAYS[way](model, x, 1e-3, 4))
    assert all(report.left and not report.heads for report in reports)
    assert_changed_as_told(before, model, [])


def test_what_is_left_is_said_once_a_layer_and_reason(caplog):
    model, x = made()
    model.requires_grad_(False)
    model.v_proj.requires_grad_(True)
    with caplog.at_level(logging.WARNING, "attnscale"):
        reports = list(with_qk_clip(model, x, 1e-3, 5))
    assert all(len(report.left) == HEADS for report in reports)
    assert len(caplog.messages) == 1
    assert "heads 0, 1, 2, 3, 4: not changed: q_proj.weight is frozen" in caplog.messages[0]
