"""Watching Hugging Face's models: the scale each is configured to apply, and the statistics of its eager weights."""

import numpy as np
import pytest
import torch

import attnscale
from tests.watching.layers import found_layers

pytest.importorskip("transformers")

from tests.others import OTHERS_MAY_WARN

from .architectures import ARCHITECTURES

pytestmark = OTHERS_MAY_WARN  # transformers' and torch's own

EVERY = [(name, how) for name, architecture in ARCHITECTURES.items() for how in architecture.implementations]


def watched(model, inputs, rows=64):
    with torch.no_grad(), attnscale.watch(model, rows=rows) as seen:
        outputs = model(**inputs)
    return seen, outputs


@pytest.mark.parametrize(("name", "how"), EVERY)
def test_scale_applied_is_the_configured_one(name, how):
    architecture = ARCHITECTURES[name]
    seen, _ = watched(*architecture.build(how))
    for path, layer in found_layers(seen, architecture).items():
        assert layer.scale_applied == pytest.approx(architecture.layers[path], rel=1e-3), path
        if architecture.declares:
            assert layer.scale_expected == pytest.approx(architecture.layers[path], rel=1e-6), path
        assert (layer.heads, layer.head_dim) == (architecture.heads, architecture.head_dim)
        assert layer.kv_heads == (architecture.kv_heads or architecture.heads)
        if architecture.softcap is not None:
            assert layer.softcap == pytest.approx(architecture.softcap, rel=1e-2)


@pytest.mark.parametrize(("name", "how"), EVERY)
def test_outputs_are_bit_identical(name, how):
    model, inputs = ARCHITECTURES[name].build(how)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # transformers compiles flex_attention
        plain = model(**inputs)
    _, outputs = watched(model, inputs)
    for field in plain:
        if isinstance(plain[field], torch.Tensor):
            torch.testing.assert_close(outputs[field], plain[field], rtol=0.0, atol=0.0)


def statistics_of(weights, is_padded=False):
    """Entropy, top-1 and gradient gain of weights (batch, heads, q_len, kv_len), one value a head.

    What is missing to one went to a sink, which takes part in the softmax. Where the queries are padded, those are left
    out that stand at keys of no weight.
    """
    weights = weights.double()
    counted = (weights.sum((1, 2)) > 0)[:, None] if is_padded else torch.ones(weights.shape[:3], dtype=torch.bool)
    counted = counted.expand(weights.shape[:3])
    weights = torch.cat([weights, (1 - weights.sum(-1, keepdim=True)).clamp(min=0)], -1)
    by_row = {
        "entropy": -torch.special.xlogy(weights, weights).sum(-1),
        "top1": weights.amax(-1),
        "jacobian_trace": 1 - weights.square().sum(-1),
    }
    return {name: (values * counted).sum((0, 2)) / counted.sum((0, 2)) for name, values in by_row.items()}


@pytest.mark.parametrize(("name", "how"), [(name, how) for name, how in EVERY if ARCHITECTURES[name].weights])
def test_statistics_are_those_of_the_eager_weights(name, how):
    architecture = ARCHITECTURES[name]
    model, inputs = architecture.build("eager")
    with torch.no_grad():
        weights = architecture.eager_weights(model(**inputs, output_attentions=True))
    seen, _ = watched(*architecture.build(how), rows=None)
    found = found_layers(seen, architecture)
    assert weights
    for path, expected in weights.items():
        if found[path].calls > 1:  # a shared layer comes out once a call
            continue
        for statistic, values in statistics_of(expected, found[path].padding > 0).items():
            got = getattr(found[path].stats, statistic).numpy()
            np.testing.assert_allclose(got, values.numpy(), rtol=1e-4, atol=1e-6, err_msg=f"{path} {statistic}")


@pytest.mark.parametrize(("name", "how"), EVERY)
def test_a_healthy_architecture_gets_no_finding(name, how):
    model, inputs = ARCHITECTURES[name].build(how)
    assert [str(finding) for finding in attnscale.audit(model, **inputs).findings] == []


@pytest.mark.parametrize("name", ["BERT", "GPT-2", "Llama"])
def test_the_usual_initialisation_of_a_narrow_model_is_no_error(name):
    """0.02 at a width of 33 gives scores of almost nothing: worth a word, not a failure."""
    model, inputs = ARCHITECTURES[name].build("sdpa", initializer_range=0.02)
    assert [finding for finding in attnscale.audit(model, **inputs).findings if finding.severity == "error"] == []
