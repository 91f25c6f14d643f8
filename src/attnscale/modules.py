"""MultiheadAttention: nn.MultiheadAttention with any scale rule and an optional soft-cap."""

from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnscale.attending.nested import aligned, any_nested, in_graph, nested_like, sequences_see
from attnscale.attending.ragged import Sequences, as_one_row, as_tokens, ragged_call
from attnscale.attending.row_blocks import weights_of
from attnscale.attending.running import run_sequences
from attnscale.errors import InputError, ShapeError
from attnscale.numerics import uncompiled
from attnscale.operator import attention, attention_weights
from attnscale.rules import get_rule
from attnscale.rules.apply import Scale
from attnscale.torch_internals import keep_off_the_fast_path
from attnscale.visibility import Mask, Visibility, is_plain_mask


class MultiheadAttention(nn.MultiheadAttention):
    """nn.MultiheadAttention plus `scale` (a number, a tensor, a rule or its name) and `softcap`.

    Its state dict is that of nn.MultiheadAttention, plus `rule.…` entries if the rule has parameters. A state dict
    without these entries also loads, and leaves the rule unchanged.

    >>> layer = MultiheadAttention(64, 4, batch_first=True, scale="QKNorm")
    >>> x = torch.randn(2, 5, 64)
    >>> layer(x, x, x, need_weights=False)[0].shape
    torch.Size([2, 5, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        scale: Scale = None,
        softcap: float | None = None,
    ) -> None:
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        if isinstance(scale, str | type):
            scale = get_rule(scale, head_dim=self.head_dim, heads=num_heads)
            if isinstance(scale, nn.Module):
                scale = scale.to(device=device, dtype=dtype)
        if isinstance(scale, Tensor) and not isinstance(scale, nn.Parameter):
            self.register_buffer("rule", scale, persistent=False)
        else:
            self.rule = scale
        self.softcap = softcap
        if scale is not None or softcap is not None:
            keep_off_the_fast_path(self)
        self.register_load_state_dict_pre_hook(_keep_rule_if_absent)  # type: ignore[no-untyped-call]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Mask = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output, and the weights if `need_weights`. In a boolean mask, True hides a key.

        `is_causal` declares that attn_mask is causal; without an attn_mask it applies a causal mask. Nested tensors
        (batch, length, embed_dim) give a nested output and one matrix of weights per sequence.
        """
        if any_nested(query, key, value):
            if key_padding_mask is not None or not self.batch_first:
                raise InputError("Expected nested tensors with batch_first=True and without key_padding_mask.")
            if self.bias_k is not None or self.add_zero_attn:
                raise InputError("Expected no add_bias_kv and no add_zero_attn with nested tensors; pad them instead.")
            visibility = sequences_see(attn_mask, is_causal and attn_mask is None)
            run = self._forward_nested
            run = uncompiled(run) if need_weights else in_graph(run, self.rule, query, key, value)
            return run(query, key, value, visibility, need_weights, average_attn_weights)
        if not (query.dim() == key.dim() == value.dim() and query.dim() in (2, 3)):
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (query, key, value))
            raise ShapeError(f"Expected query, key and value of 2 or 3 dimensions each, got {shapes}.")
        batched = query.dim() == 3
        heads = self._project(*(self._batch_first(tensor) for tensor in (query, key, value)))
        mask, is_causal = self._sdpa_mask(heads[0], heads[1], key_padding_mask, attn_mask, is_causal)
        output, weights = self._attend(*self._append_keys(*heads, mask), is_causal, need_weights)
        output = self.out_proj(output.transpose(1, 2).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if not batched:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return output if self.batch_first else output.transpose(0, 1), weights

    def _forward_nested(
        self, query: Tensor, key: Tensor, value: Tensor, visibility: Visibility, need_weights: bool, average: bool
    ) -> tuple[Tensor, Tensor | None]:
        sequences = aligned({"query": query, "key": key, "value": value})
        heads = self._project(*(each.tokens.squeeze(1) for each in sequences))
        own, theirs, values = (Sequences(head, each.layout) for head, each in zip(heads, sequences, strict=True))
        dropout_p = self.dropout if self.training else 0.0
        ragged = ragged_call(own, theirs, values, visibility, self.rule, False, self.softcap, dropout_p)
        weights: list[Tensor] = []
        if need_weights:
            calls = list(ragged.calls())
            weights = [F.dropout(weights_of(call), dropout_p, dropout_p > 0.0) for call in calls]
            row = ragged.joined([each @ call.value for each, call in zip(weights, calls, strict=True)])
        else:
            row = run_sequences(ragged)
        output = self.out_proj(as_tokens(row).flatten(1)).unsqueeze(1)
        like = next(tensor for tensor in (query, key, value) if tensor.is_nested)
        nested = nested_like(like, ragged.rows, as_one_row(output))
        if not need_weights:
            return nested, None
        matrices = [each.squeeze(0).mean(0) if average else each.squeeze(0) for each in weights]
        return nested, torch.nested.as_nested_tensor(matrices)

    def _batch_first(self, tensor: Tensor) -> Tensor:
        if tensor.dim() == 2:
            return tensor.unsqueeze(0)
        return tensor if self.batch_first else tensor.transpose(0, 1)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value of each head: (batch, heads, length, head_dim)."""
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return tuple(
            F.linear(tensor, weight, bias).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for tensor, weight, bias in zip((query, key, value), weights, biases, strict=True)
        )

    def _sdpa_mask(
        self,
        query: Tensor,
        key: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Mask,
        is_causal: bool,
    ) -> tuple[Mask, bool]:
        """Merge both masks into one for attention(); return None and True if masking is only causal."""
        batch, _, q_len, _ = query.shape
        kv_len, appends = key.shape[-2], self.bias_k is not None or self.add_zero_attn
        if attn_mask is not None and not is_plain_mask(attn_mask):
            if key_padding_mask is not None or appends:
                raise InputError(
                    f"Expected attn_mask as a tensor with key_padding_mask, add_bias_kv or add_zero_attn, got a "
                    f"{type(attn_mask).__name__}; convert it to a tensor."
                )
            return attn_mask, False
        if is_causal and key_padding_mask is None and not appends:
            return None, True
        masks: list[Tensor] = []
        if is_plain_mask(attn_mask) and attn_mask.dim() == 3:
            _expect_shape("attn_mask", attn_mask, (batch * self.num_heads, q_len, kv_len))
            masks.append(attn_mask.unflatten(0, (batch, self.num_heads)))
        elif is_plain_mask(attn_mask):
            _expect_shape("attn_mask", attn_mask, (q_len, kv_len))
            masks.append(attn_mask)
        elif is_causal:
            masks.append(torch.ones(q_len, kv_len, dtype=torch.bool, device=query.device).triu(1))
        if key_padding_mask is not None:
            padding = key_padding_mask if key_padding_mask.dim() == 2 else key_padding_mask.unsqueeze(0)
            _expect_shape("key_padding_mask", padding, (batch, kv_len))
            masks.append(padding[:, None, None, :])
        return _merged(masks, query.dtype), False

    def _append_keys(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Mask
    ) -> tuple[Tensor, Tensor, Tensor, Mask]:
        """Append the learned key and value of add_bias_kv and the zeros of add_zero_attn, visible to every row."""
        if self.bias_k is not None and self.bias_v is not None:
            key, value = (
                torch.cat(
                    [rows, bias.unflatten(-1, (self.num_heads, -1)).transpose(1, 2).expand(len(rows), -1, -1, -1)], -2
                )
                for rows, bias in ((key, self.bias_k), (value, self.bias_v))
            )
        if self.add_zero_attn:
            key, value = (F.pad(rows, (0, 0, 0, 1)) for rows in (key, value))
        if is_plain_mask(attn_mask):
            visible = True if attn_mask.dtype == torch.bool else 0.0
            attn_mask = F.pad(attn_mask, (0, key.shape[-2] - attn_mask.shape[-1]), value=visible)
        return query, key, value, attn_mask

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, is_causal: bool, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        dropout_p = self.dropout if self.training else 0.0
        if not need_weights:
            output = attention(query, key, value, mask, dropout_p, is_causal, scale=self.rule, softcap=self.softcap)
            return output, None
        weights = attention_weights(query, key, mask, is_causal, scale=self.rule, softcap=self.softcap)
        weights = F.dropout(weights, dropout_p) if dropout_p > 0.0 else weights
        return weights @ value, weights


def _merged(masks: list[Tensor], dtype: torch.dtype) -> Tensor | None:
    """Merge masks where True hides a key into one where True shows it, or into a float mask if any is float."""
    if not masks:
        return None
    if all(mask.dtype == torch.bool for mask in masks):
        return ~reduce(torch.logical_or, masks)
    zero = torch.zeros((), dtype=dtype, device=masks[0].device)
    floats = (zero.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else mask.to(dtype) for mask in masks)
    return reduce(torch.add, floats)


def _expect_shape(name: str, mask: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(mask.shape) != shape:
        raise ShapeError(f"Expected {name} of shape {shape}, got {tuple(mask.shape)}.")


def _keep_rule_if_absent(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Let a state dict of nn.MultiheadAttention load into a module that has a rule with parameters."""
    own = {prefix + name: value for name, value in module.state_dict().items() if name.startswith("rule")}
    if not own.keys() & state_dict.keys():
        state_dict.update(own)
