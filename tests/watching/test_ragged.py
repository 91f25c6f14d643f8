"""Models on ragged batches: scale, statistics and findings are those of the same sequences one by one."""

import warnings
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

import attnscale
from attnscale.attending.ragged import as_one_row, as_tokens
from attnscale.errors import NotFollowedWarning, NotInsideWarning
from attnscale.tracing.lineage import Lineage
from attnscale.watching.kernels import kernel_calls
from tests.measure.oracle import NAMES
from tests.others import OTHERS_MAY_WARN

pytestmark = OTHERS_MAY_WARN
LENGTHS = [5, 3, 7]
STARTS = torch.tensor([0, *LENGTHS]).cumsum(0)
HEADS, HEAD_DIM = 3, 4


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """Replace these kernels, which CPUs lack, by hand-written attention."""
    library = torch.library.Library("aten", "IMPL")

    def flash(query, key, value, starts, key_starts, max_q, max_k, dropout_p, is_causal, return_debug_mask, **options):
        output = _attended(query, key, value, starts, is_causal, options.get("scale"))
        nothing = query.new_zeros(0)
        return output, query.new_zeros(query.shape[1], len(query)), nothing, nothing, nothing

    def efficient(
        query, key, value, bias, starts, key_starts, max_q, max_k, dropout_p, mask_type, lse=False, **options
    ):
        output = _attended(query[0], key[0], value[0], starts, mask_type > 0, options.get("scale"))[None]
        return output, query.new_zeros(0), torch.tensor(0), torch.tensor(0), max_q, max_k

    library.impl("_flash_attention_forward", flash, "CPU")
    library.impl("_efficient_attention_forward", efficient, "CPU")
    yield
    library._destroy()


def _attended(query, key, value, starts, is_causal, scale):
    lengths = starts.diff().tolist()
    parts = zip(*(as_one_row(tokens).split(lengths, -2) for tokens in (query, key, value)), strict=True)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    outputs = []
    for own, theirs, values in parts:
        scores = own @ theirs.mT * scale
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1) & is_causal
        outputs.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values)
    return as_tokens(torch.cat(outputs, -2))


class Model(nn.Module):
    """Self-attention over packed tokens by a function of query, key and value (total, heads, head_dim)."""

    def __init__(self, attend):
        super().__init__()
        width = HEADS * HEAD_DIM
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))
        self.attend = attend

    def forward(self, tokens):
        heads = (proj(tokens).unflatten(-1, (HEADS, HEAD_DIM)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(self.attend(*heads).flatten(-2))


def alone(scale):
    """Each sequence as a plain attention of its own."""

    def attend(*tokens):
        parts = zip(*(as_one_row(each).split(LENGTHS, -2) for each in tokens), strict=True)
        return as_tokens(
            torch.cat([F.scaled_dot_product_attention(*p, is_causal=True, scale=scale) for p in parts], -2)
        )

    return attend


def jagged(attend):
    """An attention function of jagged tensors, on packed tokens."""

    def on_tokens(*tokens):
        nested = (torch.nested.nested_tensor_from_jagged(each, STARTS).transpose(1, 2) for each in tokens)
        return attend(*nested).transpose(1, 2).values()

    return on_tokens


def nested(scale):
    return jagged(partial(attnscale.attention, is_causal=True, scale=scale))


def nested_with_stats(scale):
    return jagged(lambda *tensors: attnscale.attention_with_stats(*tensors, is_causal=True, scale=scale)[0])


def plain_jagged(scale):
    return jagged(partial(F.scaled_dot_product_attention, scale=scale))


def plain_strided(scale):
    def attend(*tokens):
        q, k, v = (
            torch.nested.as_nested_tensor(list(each.split(LENGTHS))).transpose(1, 2).contiguous() for each in tokens
        )
        output = F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).contiguous()
        return torch.cat(output.unbind())

    return attend


def packed(scale):
    return lambda q, k, v: attnscale.attention_varlen(q, k, v, STARTS, is_causal=True, scale=scale)


def packed_with_stats(scale):
    return lambda *tokens: attnscale.attention_varlen_with_stats(*tokens, STARTS, is_causal=True, scale=scale)[0]


def torch_varlen(scale):
    return lambda *tokens: varlen_attn(*tokens, STARTS.int(), STARTS.int(), 7, 7, scale=scale, window_size=(-1, 0))


def torch_flash(scale):
    kernel, starts = torch.ops.aten._flash_attention_forward, STARTS.int()
    return lambda *tokens: kernel(*tokens, starts, starts, 7, 7, 0.0, True, False, scale=scale)[0]


def torch_efficient(scale):
    kernel, starts = torch.ops.aten._efficient_attention_forward, STARTS.int()
    return lambda q, k, v: kernel(q[None], k[None], v[None], None, starts, starts, 7, 7, 0.0, 1, False, scale=scale)[0][
        0
    ]


OWN = (nested, nested_with_stats, packed, packed_with_stats)
TORCHS = (torch_varlen, torch_flash, torch_efficient)  # stand-ins without a gradient


MODES = (torch.no_grad, torch.enable_grad, torch.inference_mode)


@pytest.mark.parametrize("scale", [None, 8.0])
@pytest.mark.parametrize(
    ("attend", "mode"), [*product(OWN, MODES), *product(TORCHS, [torch.no_grad])], ids=lambda each: each.__name__
)
def test_ragged_kernels_are_seen_as_their_sequences_one_by_one(attend, mode, scale):
    model, plain = Model(attend(scale)).eval(), Model(alone(scale)).eval()
    plain.load_state_dict(model.state_dict())
    tokens = torch.randn(sum(LENGTHS), HEADS * HEAD_DIM)
    with mode():
        expected = model(tokens)
        with attnscale.watch(model, rows=None) as seen, attnscale.watch(plain, rows=None) as wanted:
            output = model(tokens)
            plain(tokens)
        assert torch.equal(output, expected)
        (ours,), (theirs,) = seen.layers.values(), wanted.layers.values()
        torch.testing.assert_close(ours.scale_applied, theirs.scale_applied)
        assert (ours.causal, ours.heads, ours.head_dim) == (theirs.causal, theirs.heads, theirs.head_dim)
        for name in (*NAMES, "rows", "count", "keys"):
            found = getattr(ours.stats, name), getattr(theirs.stats, name)
            torch.testing.assert_close(*found, msg=name, equal_nan=True, rtol=1e-4, atol=1e-5)
        found = [sorted({each.code for each in attnscale.audit(each, tokens).findings}) for each in (model, plain)]
    assert found[0] == found[1]


def test_a_batch_of_one_length_in_those_kernels_is_one_call():
    query = torch.randn(2, 5, HEADS, HEAD_DIM)
    given = {"query": query, "key": query, "value": query, "custom_mask_type": 2, "is_causal": True}
    for name in ("aten::_efficient_attention_forward", "aten::_flash_attention_forward"):
        (call,) = kernel_calls(Lineage(lambda tensor: None), name, given)
        assert (call.query.shape, call.visibility.last, call.scale) == ((2, HEADS, 5, HEAD_DIM), 0, 0.5)
    shorter = given | {"key": query[:, :3], "value": query[:, :3], "custom_mask_type": 1}
    assert not list(kernel_calls(Lineage(lambda tensor: None), "aten::_efficient_attention_forward", shorter))


def test_a_model_on_jagged_tensors_is_not_accused_of_what_they_do_inside():
    layer = attnscale.MultiheadAttention(HEADS * HEAD_DIM, HEADS, batch_first=True)

    class Jagged(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.before = layer, nn.Linear(HEADS * HEAD_DIM, HEADS * HEAD_DIM)

        def forward(self, x):
            x = self.before(x)
            return self.attention(x, x, x, need_weights=False, is_causal=True)[0].values()

    tokens = torch.nested.nested_tensor_from_jagged(torch.randn(sum(LENGTHS), HEADS * HEAD_DIM), STARTS)
    audit = attnscale.audit(Jagged(), tokens)
    assert [each.code for each in audit.findings] == []
    (seen,) = audit.layers.values()
    assert seen.stats.rows.tolist() == [sum(LENGTHS)] * HEADS


def test_a_monitor_records_nested_tensors_as_their_sequences_one_by_one():
    model, plain = Model(nested(None)), Model(alone(None))
    plain.load_state_dict(model.state_dict())
    monitors = [attnscale.Monitor(each, every=1, rows=None) for each in (model, plain)]
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, plain)]
    for _ in range(3):
        tokens = torch.randn(sum(LENGTHS), HEADS * HEAD_DIM)
        for each, optimizer, monitor in zip((model, plain), optimizers, monitors, strict=True):
            each(tokens).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NotInsideWarning)  # no probe takes nested tensors
                monitor.step()
        (ours,), (theirs,) = (monitor.last.layers.values() for monitor in monitors)
        assert ours.rows == theirs.rows == sum(LENGTHS) * HEADS
        for name in theirs.numbers:
            found = [torch.tensor(layer.numbers[name], dtype=torch.float64) for layer in (ours, theirs)]
            torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5, msg=name)
    for monitor in monitors:
        monitor.close()


SHOWN = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS).unsqueeze(-1)


def _scatter(empty, tokens):
    return empty.masked_scatter(SHOWN[..., None, None], tokens)


def _put(empty, tokens):
    return empty.index_put(SHOWN.nonzero(as_tuple=True), tokens)  # as x[mask] = tokens does


def padded(scale, pad):
    def attend(*tokens):
        q, k, v = (pad(each.new_zeros(*SHOWN.shape, HEADS, HEAD_DIM), each).transpose(1, 2) for each in tokens)
        return F.scaled_dot_product_attention(q, k, v, SHOWN[:, None, None], scale=scale).transpose(1, 2)[SHOWN]

    return attend


def _thrice(attend, query, key, value):
    return attend(query * 3, key, value)


def test_gradients_of_packed_tokens_are_those_of_the_padded_batch():
    """As SDPA was given queries and keys, whatever multiplied them before."""
    found = []
    for pad in (_put, _scatter):
        torch.manual_seed(0)
        model = Model(partial(_thrice, padded(0.7, pad)))
        tokens = torch.randn(sum(LENGTHS), HEADS * HEAD_DIM)
        with attnscale.watch(model, rows=None) as seen:
            model(tokens).square().sum().backward()
        (layer,) = seen.layers.values()
        assert layer.kv_heads == HEADS
        found.append((layer.query_gradient.float(), layer.key_gradient.float()))  # they are as exact as the model is
    torch.testing.assert_close(*found)


AT = torch.arange(sum(LENGTHS))
DOCUMENT = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
AHEAD = AT.unsqueeze(-1) - AT
BLOCK_MASKS = {
    "documents": (
        lambda b, h, row, key: (DOCUMENT[row] == DOCUMENT[key]) & (row >= key),
        DOCUMENT[:, None] == DOCUMENT,
    ),
    "a window": (lambda b, h, row, key: (row >= key) & (row - key < 4), AHEAD < 4),
    "a prefix": (lambda b, h, row, key: (key < 4) | (row >= key), None),
}


@pytest.mark.parametrize("name", BLOCK_MASKS)
def test_block_masks_are_the_masks_they_mean(name):
    mask_mod, within = BLOCK_MASKS[name]
    written = (AT < 4) | (AHEAD >= 0) if within is None else within & (AHEAD >= 0)
    blocks = create_block_mask(mask_mod, None, None, len(AT), len(AT), device="cpu")

    def flex(*tokens):
        return as_tokens(flex_attention(*(as_one_row(each) for each in tokens), block_mask=blocks))

    def masked(*tokens):
        return as_tokens(attnscale.attention(*(as_one_row(each) for each in tokens), written))

    model, plain = Model(flex).eval(), Model(masked).eval()
    plain.load_state_dict(model.state_dict())
    tokens = torch.randn(len(AT), HEADS * HEAD_DIM)
    with torch.no_grad(), attnscale.watch(model, rows=None) as seen, attnscale.watch(plain, rows=None) as wanted:
        model(tokens)
        plain(tokens)
    (ours,), (theirs,) = seen.layers.values(), wanted.layers.values()
    for statistic in (*NAMES, "rows", "count"):
        torch.testing.assert_close(getattr(ours.stats, statistic), getattr(theirs.stats, statistic), equal_nan=True)


@pytest.mark.parametrize("attend", [plain_jagged, plain_strided])
@pytest.mark.parametrize("mode", MODES)
def test_sdpa_on_nested_tensors_without_a_fused_kernel_says_what_to_do(attend, mode):
    model, tokens = Model(attend(None)).eval(), torch.randn(sum(LENGTHS), HEADS * HEAD_DIM)
    both = nn.Sequential(Model(nested(None)), model)
    with mode():
        expected = model(tokens)
        with pytest.raises(attnscale.AttnscaleError, match=r"use attnscale\.attention"), attnscale.watch(model):
            output = model(tokens)
        assert torch.equal(output, expected)
        with (
            pytest.warns(NotFollowedWarning, match=r"left out.*use attnscale\.attention"),
            attnscale.watch(both) as seen,
        ):
            both(tokens)
    assert [name.partition(".")[0] for name in seen.layers] == ["0"]
