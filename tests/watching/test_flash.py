"""flash-attn's operators, stood in for by SDPA under their names: what `watch` reads is their arguments."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

import attnscale
from attnscale.tracing.lineage import Lineage
from attnscale.watching.kernels import kernel_calls
from tests.attending.test_memory import LargestTensor
from tests.zoo.entry import SelfAttention, above_diagonal


def attend(q, k, v, softmax_scale, causal):
    query, key, value = (tensor.transpose(1, 2) for tensor in (q, k, v))
    mask = ~above_diagonal(query.shape[-2], key.shape[-2]) if causal else None
    return F.scaled_dot_product_attention(query, key, value, mask, scale=softmax_scale, enable_gqa=True).transpose(1, 2)


@pytest.fixture(scope="module", autouse=True)
def operators():
    library = torch.library.Library("flash_attn", "FRAGMENT")
    library.define(
        "_flash_attn_forward(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, bool causal, "
        "int window_size_left, int window_size_right, float softcap, Tensor? alibi_slopes, bool return_softmax) "
        "-> Tensor"
    )
    library.define(
        "_flash_attn_varlen_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
        "int max_seqlen_q, int max_seqlen_k, float dropout_p, float softmax_scale, bool causal) -> Tensor"
    )

    def whole(q, k, v, dropout_p, softmax_scale, causal, left, right, softcap, alibi_slopes, return_softmax):
        return attend(q, k, v, softmax_scale, causal).clone()

    def ragged(q, k, v, starts, key_starts, max_q, max_k, dropout_p, softmax_scale, causal):
        pieces = [slice(start, stop) for start, stop in pairwise(starts.tolist())]
        return torch.cat([attend(q[None, at], k[None, at], v[None, at], softmax_scale, causal)[0] for at in pieces])

    library.impl("_flash_attn_forward", whole, "CompositeExplicitAutograd")
    library.impl("_flash_attn_varlen_forward", ragged, "CompositeExplicitAutograd")
    yield
    library._destroy()


class Whole(SelfAttention):
    """A scaled query; each row sees the keys in its window."""

    causal, window = True, (-1, -1)

    def forward(self, x):
        q, k, v = (tensor.transpose(1, 2) for tensor in self.project(x))
        attend = torch.ops.flash_attn._flash_attn_forward
        out = attend(q * 2.0, k, v, 0.0, self.head_dim**-0.5, self.causal, *self.window, 0.0, None, False)
        return self.out_proj(out.flatten(2))


class Ragged(SelfAttention):
    def forward(self, x):
        q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in self.project(x))
        starts = torch.tensor([0, 5, len(q)])
        attend = torch.ops.flash_attn._flash_attn_varlen_forward
        out = attend(q * 0.5, k, v, starts, starts, 21, 21, 0.0, self.head_dim**-0.5, False)
        return self.out_proj(out.flatten(1))


@pytest.mark.parametrize(
    ("causal", "window", "behind", "ahead"), [(True, (-1, -1), 13, 0), (False, (3, 2), 3, 2), (True, (3, 2), 3, 0)]
)
def test_a_scaled_query_shared_keys_and_a_window(causal, window, behind, ahead):
    torch.manual_seed(0)
    model, x = Whole(44, 4, kv_heads=2), torch.randn(2, 13, 44)
    model.causal, model.window = causal, window
    with attnscale.watch(model, rows=None) as seen, torch.no_grad():
        model(x)
        query, key, _ = model.project(x)
    layer = seen.layers["Whole"]
    assert (layer.kind, layer.heads, layer.kv_heads, layer.head_dim, layer.causal) == ("flash", 4, 2, 11, causal)
    assert layer.scale_applied == pytest.approx(2 * 11**-0.5)
    apart = torch.arange(13) - torch.arange(13)[:, None]
    visible = (apart >= -behind) & (apart <= ahead)
    expected = attnscale.score_stats(query, key, scale=2 * 11**-0.5, attn_mask=visible, enable_gqa=True)
    assert layer.stats.count.tolist() == expected.count.tolist()
    torch.testing.assert_close(layer.stats.entropy, expected.entropy)
    torch.testing.assert_close(layer.stats.variance, expected.variance)


def test_sequences_laid_end_to_end():
    torch.manual_seed(0)
    model, x = Ragged(33, 3), torch.randn(2, 13, 33)
    with attnscale.watch(model, rows=None) as seen, torch.no_grad():
        model(x)
    layer = seen.layers["Ragged"]
    assert (layer.heads, layer.head_dim, layer.calls) == (3, 11, 2)
    assert layer.scale_applied == pytest.approx(0.5 * 11**-0.5)
    assert layer.stats.rows.tolist() == [26] * 3
    assert layer.stats.count.tolist() == [5 * 5 + 21 * 21] * 3


@pytest.mark.parametrize("causal", [False, True])
def test_no_matrix_of_rows_by_keys_is_made_for_a_causal_call(causal):
    length = 4099
    given = {name: torch.randn(1, length, 1, 8) for name in ("q", "k", "v")}
    given |= {"softmax_scale": 8**-0.5, "causal": causal, "window_size_left": 100, "window_size_right": -1}
    with LargestTensor() as largest:
        for call in kernel_calls(Lineage(), "flash_attn::_flash_attn_forward", given):
            call.measure(rows=4, keep=False)
    assert largest.elements < length * length / 100
