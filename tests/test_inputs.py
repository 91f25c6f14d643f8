"""Bad input gets an error that finishes the sentence."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnscale import attention, attention_weights, attention_with_stats
from attnscale.errors import AttnscaleError, DeviceError, DtypeError, InputError, SettingError, ShapeError

batch, heads, q_len, kv_len, head_dim = 2, 3, 5, 7, 11


r = torch.randn
BAD = [
    (dict(query=r(head_dim)), ShapeError, r"Expected query as \(…, heads, length, head_dim\), got shape \(11,\)"),
    (dict(key=r(batch, heads, kv_len, 5)), ShapeError, "same head dimension of at least 1, got 11 and 5"),
    (dict(query=r(batch, heads, q_len, 0), key=r(batch, heads, kv_len, 0)), ShapeError, "at least 1, got 0 and 0"),
    (dict(value=r(batch, heads, 4, head_dim)), ShapeError, "one value per key, got 7 keys and 4 values"),
    (dict(query=r(batch, 4, q_len, head_dim)), ShapeError, "query's 4 heads in key, got 3 .* pass enable_gqa=True"),
    (dict(query=r(batch, 4, q_len, head_dim), enable_gqa=True), ShapeError, "heads that divide the query's 4, got 3"),
    (
        dict(key=r(batch, 0, kv_len, head_dim), value=r(batch, 0, kv_len, head_dim), enable_gqa=True),
        ShapeError,
        "at least one head in key, got none",
    ),
    (
        dict(key=r(5, heads, kv_len, head_dim)),
        ShapeError,
        r"batch dimensions that broadcast, got query \(2, 3, 5, 11\)",
    ),
    (
        dict(query=r(batch, 1, q_len, head_dim), value=r(batch, 2, kv_len, head_dim)),
        ShapeError,
        r"heads and batch dimensions that broadcast, got .* key \(2, 3, 7, 11\), value \(2, 2, 7, 11\)",
    ),
    (dict(query=r(batch, heads, q_len, head_dim).half()), DtypeError, "one dtype, got query of torch.float16 and key"),
    (dict(query=torch.ones(batch, heads, q_len, head_dim, dtype=torch.int)), DtypeError, "floating-point .* query of"),
    (
        {name: torch.ones(batch, heads, 5, head_dim) * 1j for name in ("query", "key", "value")},
        DtypeError,
        "floating-point tensors, got query of torch.complex64",
    ),
    (dict(query=[1.0]), DtypeError, "Expected query as a tensor, got list"),
    (dict(attn_mask=r(q_len, kv_len).double()), DtypeError, "bool, float32 or the query's"),
    (dict(attn_mask=r(1, 1, 1, q_len, kv_len)), ShapeError, "attn_mask to broadcast"),
    (dict(key=torch.empty(batch, heads, kv_len, head_dim, device="meta")), DeviceError, "query on cpu and key on meta"),
    (dict(attn_mask=r(4, kv_len)), ShapeError, r"attn_mask to broadcast to \(2, 3, 5, 7\), .* got shape \(4, 7\)"),
    (dict(attn_mask=r(4)), ShapeError, "attn_mask to broadcast"),
    (dict(attn_mask=r(batch, 2, q_len, kv_len)), ShapeError, "attn_mask to broadcast"),
    (dict(attn_mask=torch.ones(q_len, kv_len, dtype=torch.long)), DtypeError, "attn_mask as booleans .* or floats"),
    (dict(attn_mask=r(q_len, kv_len), is_causal=True), InputError, "attn_mask or is_causal, got both"),
    (dict(attn_mask=torch.empty(q_len, kv_len, device="meta")), DeviceError, "attn_mask on the query's device"),
    (dict(dropout_p=1.5), SettingError, "dropout_p between 0 and 1, got 1.5"),
    (dict(softcap=0.0), SettingError, "positive, finite softcap, got 0.0; pass None"),
    (dict(softcap=-30.0), SettingError, "positive, finite softcap"),
    (dict(softcap=math.nan), SettingError, "positive, finite softcap"),
    (dict(scale=math.nan), SettingError, "finite scale, got nan"),
    (dict(scale=-math.inf), SettingError, "finite scale, got -inf"),
    (dict(scale=True), SettingError, "a number, a tensor, a rule or a rule's name, got True"),
    (dict(scale=[0.1]), SettingError, r"a rule or a rule's name, got \[0.1\] of type list"),
    (dict(scale="sqrt"), SettingError, "Unknown rule 'sqrt'"),
    (dict(scale=nn.Parameter(torch.tensor(0.1))), SettingError, "zero-dimensional parameter, which FSDP cannot shard"),
    (dict(scale=torch.tensor([math.nan])), SettingError, "tensor with inf or NaN"),
    (dict(scale=torch.full((heads, 1, 1), math.inf)), SettingError, "tensor with inf or NaN"),
    (
        dict(scale=torch.rand(heads)),
        ShapeError,
        r"one number a row, \(2, 3, 5, 1\), got shape \(3,\); .*view\(-1, 1, 1\)",
    ),
    (dict(scale=torch.rand(head_dim)), ShapeError, "one number a row"),
    (dict(scale=torch.rand(1, 1, batch, heads, q_len, 1)), ShapeError, "one number a row"),
    (dict(scale=torch.empty(heads, 1, 1, device="meta")), DeviceError, "scale on the query's device"),
    (dict(sinks=[0.0, 0.0, 0.0]), ShapeError, r"one logit for each of the 3 query heads, \(3,\), got list"),
]


@pytest.mark.parametrize(("arguments", "error", "sentence"), BAD, ids=[sentence[:50] for *_, sentence in BAD])
def test_bad_input_gets_a_sentence_and_the_error_that_sdpa_raises(arguments, error, sentence):
    tensors = {
        "query": r(batch, heads, q_len, head_dim),
        "key": r(batch, heads, kv_len, head_dim),
        "value": r(batch, heads, kv_len, head_dim),
    }
    for run in (attention, attention_with_stats):
        with pytest.raises(error, match=sentence):
            run(**tensors | arguments)
    if arguments.keys() <= {*tensors, "attn_mask", "is_causal", "dropout_p", "enable_gqa"}:
        assert issubclass(error, error_of_sdpa(tensors | arguments))


def error_of_sdpa(arguments):
    try:
        with sdpa_kernel(SDPBackend.MATH):
            F.scaled_dot_product_attention(**arguments)
    except (RuntimeError, TypeError) as error:
        return TypeError if isinstance(error, TypeError) else RuntimeError
    return RuntimeError


def test_the_weights_check_their_input_too():
    with pytest.raises(ShapeError, match="same head dimension"):
        attention_weights(r(2, 3), r(2, 4))


def test_errors_are_what_callers_of_sdpa_already_catch():
    assert issubclass(InputError, RuntimeError)
    assert issubclass(AttnscaleError, ValueError)
    assert issubclass(DtypeError, TypeError)


def test_a_zero_dimensional_tensor_that_is_no_parameter_is_a_scale():
    query, key, value = r(batch, heads, q_len, head_dim), r(batch, heads, kv_len, head_dim), r(batch, heads, kv_len, 3)
    torch.testing.assert_close(
        attention(query, key, value, scale=torch.tensor(0.2)), attention(query, key, value, scale=0.2)
    )
