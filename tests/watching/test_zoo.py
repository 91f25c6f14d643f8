"""Watching the zoo: nothing changes, and what is found is what each attention really computes."""

from contextlib import nullcontext
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _len_torch_dispatch_stack

import attnscale
from attnscale.tracing.parameters import UntraceableError
from tests.measure.oracle import NAMES, expected_stats
from tests.others import OTHERS_MAY_WARN
from tests.watching.layers import found_layers
from tests.zoo import BUGS, CORRECT, ENTRIES, FAMILIES, recording

pytestmark = OTHERS_MAY_WARN  # torch's own: nested tensors, TorchScript, FlexAttention

SHIFTED = {"mean", "variance", "std", "max"}  # what a constant added to a row changes
CONSEQUENCES = {"sharp", "diluted", "exploding"}  # what a wrong scale may do on top of being wrong


@cache
def watched(name, rows=64):
    model, inputs = ENTRIES[name].build()
    with attnscale.watch(model, rows=rows) as seen, torch.no_grad():
        model(*inputs)
    return seen


def test_the_zoo_is_large():
    assert len(CORRECT) >= 40
    assert len(BUGS) >= 20
    assert {name.split(".")[0] for name in ENTRIES} == set(FAMILIES)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", ENTRIES)
def test_outputs_and_gradients_are_bit_identical(name, gradients):
    entry = ENTRIES[name]
    if gradients and not entry.gradients:
        pytest.skip("it has no backward pass")

    def run(watch):
        torch._dynamo.reset()
        model, inputs = entry.build()
        torch.manual_seed(3)
        with torch.set_grad_enabled(gradients), attnscale.watch(model) if watch else nullcontext():
            output = model(*inputs)
            drawn = torch.rand(3)
            if gradients:
                output.square().sum().backward()
        return [output, drawn, *(p.grad for p in model.parameters() if p.grad is not None)]

    for plain, seen in zip(run(False), run(True), strict=True):
        torch.testing.assert_close(seen, plain, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", [name for name in ENTRIES if not name.startswith("compiled.")])
def test_operations_that_arrive_whole_in_inference_mode_tell_the_same(name):
    entry = ENTRIES[name]
    plain, (model, inputs) = found_layers(watched(name), entry), entry.build()
    with torch.inference_mode(), attnscale.watch(model) as seen:
        model(*inputs)
    for path, layer in found_layers(seen, entry).items():
        assert layer.scale_applied == pytest.approx(plain[path].scale_applied, rel=entry.tolerance, nan_ok=True)
        for field in ("heads", "kv_heads", "head_dim", "causal", "calls", "softcap", "model_dims", "wiring"):
            assert getattr(layer, field) == getattr(plain[path], field), field
        assert parameters_of(layer) == parameters_of(plain[path])


def parameters_of(layer):
    """Which rows of which parameters make queries and keys, call by call; why not, where they cannot be followed."""
    found = []
    for origin in [origin for call in layer.origins for origin in (call.query, call.key) if origin is not None]:
        try:
            found.append([(each.parameter, each.across, each.rows.tolist()) for each in origin.sources()])
        except UntraceableError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("name", ENTRIES)
def test_scale_and_shape_are_those_in_the_code(name):
    entry = ENTRIES[name]
    for path, layer in found_layers(watched(name), entry).items():
        expected = entry.layers[path].scale
        assert expected is None or layer.scale_applied == pytest.approx(expected, rel=entry.tolerance), path
        if entry.code == "softmax_wrong_axis":
            continue  # its heads and positions change places
        for field in ("heads", "kv_heads", "head_dim", "causal", "calls"):
            expected = getattr(entry.layers[path], field)
            assert expected is None or getattr(layer, field) == expected, field
        if entry.layers[path].softcap is None:
            assert layer.softcap is None
        else:
            assert layer.softcap == pytest.approx(entry.layers[path].softcap, rel=1e-2)


@pytest.mark.parametrize("name", [name for name, entry in CORRECT.items() if entry.statistics != "none"])
def test_statistics_are_those_of_the_real_scores(name):
    entry = CORRECT[name]
    model, inputs = entry.build()
    with recording(model) as scores, torch.no_grad():
        model.train()(*inputs)  # in train: no fast path, which shows no scores
    seen = watched(name, rows=None)
    coarse = entry.tolerance > 1e-3
    for path, layer in found_layers(seen, entry).items():
        real = scores[path].clone()
        if layer.padding:
            real.masked_fill_(torch.isinf(real).all((1, 2))[:, None, :, None], -torch.inf)
        if layer.heads != real.shape[1]:
            real = real.reshape(-1, layer.heads, *real.shape[2:])
        expected = expected_stats(real.numpy())
        assert layer.stats.exact
        np.testing.assert_array_equal(layer.stats.rows.numpy(), expected["rows"], "rows")
        np.testing.assert_array_equal(layer.stats.count.numpy(), expected["count"], "count")
        for statistic in NAMES:
            if entry.statistics == "shape" and statistic in SHIFTED:
                continue
            found = getattr(layer.stats, statistic).numpy()
            tolerance = 2e-2 if coarse else 1e-4
            np.testing.assert_allclose(found, expected[statistic], tolerance, tolerance / 10, err_msg=statistic)


@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_attention_gets_no_finding(name):
    model, inputs = CORRECT[name].build()
    findings = attnscale.audit(model, *inputs).findings
    worth_knowing = {"note"} if name.startswith("designs_of_") else set()
    assert [str(finding) for finding in findings if finding.severity not in worth_knowing] == []


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_gets_its_code(name):
    model, inputs = BUGS[name].build()
    findings = attnscale.audit(model, *inputs).findings
    codes = {finding.code for finding in findings}
    assert BUGS[name].code in codes
    assert codes - {BUGS[name].code} <= CONSEQUENCES


def patched_things(model):
    """Everything a watcher could leave behind."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [
        F.scaled_dot_product_attention,
        F.softmax,
        F.multi_head_attention_forward,
        torch.softmax,
        torch.matmul,
        torch.Tensor.softmax,
        torch.Tensor.__matmul__,
        torch._transformer_encoder_layer_fwd,
        torch._native_multi_head_attention,
        torch.nn.attention.flex_attention.flex_attention,
        torch.backends.mha.get_fastpath_enabled(),
        _len_torch_dispatch_stack(),
        torch.overrides._len_torch_function_stack(),
        torch.nn.modules.module._global_forward_hooks.copy(),
        torch.nn.modules.module._global_forward_pre_hooks.copy(),
        [{name: dict(getattr(module, name)) for name in hooks} for module in model.modules()],
        [dict(module.__dict__).keys() for module in model.modules()],
        [type(module).forward for module in model.modules()],
    ]


@pytest.mark.parametrize("name", ["fused.Plain", "fused.FlexSoftcap", "products.AsPrinted", "torch_modules.Encoder"])
@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_restored_also_after_an_exception(name, fails):
    model, inputs = ENTRIES[name].build()
    with torch.no_grad():
        model(*inputs)  # whatever modules keep from a call, they keep from this one
        before = patched_things(model)
        try:
            with attnscale.watch(model):
                model(*inputs)
                if fails:
                    model(torch.zeros(1, 2, 3))
        except RuntimeError:
            assert fails
    assert patched_things(model) == before


def test_autocast_is_watched_too():
    model, inputs = ENTRIES["products.AsPrinted"].build()
    with torch.autocast("cpu", torch.bfloat16), attnscale.watch(model) as seen:
        model(*inputs)
    assert seen.layers["attention"].scale_applied == pytest.approx(11**-0.5, rel=4e-3)
