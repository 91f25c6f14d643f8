from collections import OrderedDict
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from attnscale import Monitor, audit, watch
from attnscale.diagnose import cause
from attnscale.errors import NotInsideWarning
from tests.zoo.entry import SelfAttention

from .layers import layer_of, random_layer


def pointing_at_keys():
    direction = torch.randn(64)
    direction *= 8 / direction.norm()
    query = direction + 0.1 * torch.randn(2, 3, 17, 64)
    return layer_of(query, query)


@pytest.mark.parametrize(
    ("layer", "factor", "ratio", "sentence"),
    [
        (lambda: random_layer(head_dim=64, scale=1.0), "multiplier", 8.0, "The scale is 1, not 0.125"),
        (lambda: random_layer(head_dim=64, query_std=20.0), "norms", 20.0, "The norms are large"),
        (lambda: random_layer(head_dim=64, query_std=0.05), "norms", 0.05, "The norms are small"),
        (pointing_at_keys, "alignment", 8.0, "Queries and keys are aligned: their cosine is"),
    ],
)
def test_the_factor_that_is_off_is_the_cause(layer, factor, ratio, sentence):
    found = cause(layer())
    assert (found.factor, found.sentence.startswith(sentence)) == (factor, True)
    assert getattr(found, factor) == pytest.approx(ratio, rel=0.1)


def test_unit_components_are_where_they_should_be_and_a_head_has_factors_of_its_own():
    found = cause(random_layer(heads=5, head_dim=64, length=101))
    assert (found.multiplier, found.norms, found.alignment) == pytest.approx((1.0, 1.0, 1.0), rel=0.05)
    layer = random_layer(heads=3, head_dim=32, query_std=torch.tensor([1.0, 9.0, 1.0]).view(3, 1, 1))
    assert [cause(layer, head).norms for head in (0, 1)] == pytest.approx([1.0, 9.0], rel=0.1)


class Biased(SelfAttention):
    """Attention with a position bias as large as ALiBi's, by a kernel or written out."""

    bias, is_written = None, False

    def forward(self, x):
        query, key, value = self.project(x)
        if not self.is_written:
            return self.merge(F.scaled_dot_product_attention(query, key, value, attn_mask=self.bias))
        scores = query @ key.mT * 11**-0.5
        return self.merge((scores if self.bias is None else scores + self.bias).softmax(-1) @ value)


def model_of(attention):
    return nn.Sequential(OrderedDict(attention=attention))


@pytest.mark.parametrize("is_written", [False, True])
def test_alignment_is_of_queries_and_keys_without_the_bias(is_written):
    positions, records = torch.arange(40.0), []
    model, x = model_of(Biased(33, 3)), torch.randn(2, 40, 33)
    model.attention.is_written = is_written
    plain = audit(model, x).layers["attention"].alignment.tolist()
    model.attention.bias = (positions - positions[:, None]).expand(1, 3, -1, -1)
    found = audit(model, x).layers["attention"]
    assert found.wiring.biased
    assert found.alignment.tolist() == pytest.approx(plain, rel=0.02)
    monitor = Monitor(model, every=1, rows=None, sinks=[records.append])
    for warns in (pytest.warns(NotInsideWarning), nullcontext()):
        model(x).sum().backward()
        with warns:
            monitor.step()
    monitor.close()
    for record in records:
        assert record.layers["attention"].numbers["alignment"] == pytest.approx(plain, rel=0.02)


def test_a_cosine_is_never_above_one():
    query, key = torch.ones(1, 1, 5, 4), torch.ones(1, 1, 5, 4)
    key[..., 0, :] *= 1e3  # the first key, which all rows of a causal attention see
    assert float(layer_of(query, key, causal=True).alignment) == 1.0


class AcrossBatch(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x.mT).mT


@pytest.mark.parametrize("training", [False, True])
def test_a_batch_norm_in_evaluation_is_no_qk_norm(training):
    model = model_of(Biased(33, 3))
    for name in ("q_proj", "k_proj"):
        setattr(model.attention, name, nn.Sequential(nn.Linear(33, 33), AcrossBatch(33)))
    with watch(model.train(training)) as seen:
        model(torch.randn(2, 7, 33))
    assert seen.layers["attention"].wiring.normalised is training
    assert seen.layers["attention"].scale_applied == pytest.approx(11**-0.5)
