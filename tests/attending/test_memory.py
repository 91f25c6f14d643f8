"""attention() never allocates the full matrix: every tensor that torch makes on the way is watched."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnscale import attention, attention_weights, rules

rows, keys, heads, head_dim = 1031, 1019, 2, 8


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements of any tensor made while it is on; views count as what they point to."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        given = {
            leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in given:
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.element_size())
        return made


def qkv(*lead, kv_heads=heads, value_dim=head_dim):
    return (
        torch.randn(*lead, heads, rows, head_dim, requires_grad=True),
        torch.randn(*lead, kv_heads, keys, head_dim, requires_grad=True),
        torch.randn(*lead, kv_heads, keys, value_dim, requires_grad=True),
    )


visible = torch.rand(rows, keys) < 0.5
CASES = {
    "plain": (qkv(1), {}),
    "three dimensions": (qkv(), {}),
    "five dimensions": (qkv(1, 1), {}),
    "two dimensions": (tuple(x[0].detach().requires_grad_() for x in qkv()), {}),
    "a wider value": (qkv(1, value_dim=13), {"is_causal": True}),
    "groups": (qkv(1, kv_heads=1), {"enable_gqa": True}),
    "dropout": (qkv(1), {"dropout_p": 0.1}),
    "softcap": (qkv(1), {"softcap": 5.0}),
    "softcap, causal, groups": (qkv(1, kv_heads=1), {"softcap": 5.0, "is_causal": True, "enable_gqa": True}),
    "softcap, dropout": (qkv(1), {"softcap": 5.0, "dropout_p": 0.1}),
    "boolean mask": (qkv(1), {"attn_mask": visible}),
    "boolean mask, softcap": (qkv(1), {"attn_mask": visible, "softcap": 5.0}),
    "mask of keys": (qkv(1), {"attn_mask": visible[:1]}),
    "float mask": (qkv(1), {"attn_mask": torch.randn(rows, keys)}),
    "learned bias of keys": (qkv(1), {"attn_mask": torch.randn(1, keys, requires_grad=True)}),
    "calibrated": (qkv(1), {"scale": "calibrated"}),
    "log_length, causal": (qkv(1), {"scale": "log_length", "is_causal": True}),
    "log_length, boolean mask": (qkv(1), {"scale": "log_length", "attn_mask": visible}),
    "log_length, float mask": (qkv(1), {"scale": "log_length", "attn_mask": torch.randn(rows, keys)}),
    "learned": (qkv(1), {"scale": rules.QKNorm(head_dim, heads)}),
}


@pytest.mark.parametrize("case", CASES)
def test_no_tensor_of_rows_by_keys_is_made_forward_or_backward(case):
    tensors, options = CASES[case]
    with LargestTensor() as largest:
        attention(*tensors, **options).sum().backward()
    assert largest.elements <= heads * rows * keys * 0.55, "more than a block of rows was formed"
    assert all(tensor.grad is not None for tensor in tensors)


def test_the_watcher_sees_a_full_matrix_where_there_is_one():
    query, key, _ = qkv(1)
    with LargestTensor() as largest:
        attention_weights(query, key)
    assert largest.elements == heads * rows * keys
