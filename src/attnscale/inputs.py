"""Check inputs of attention, with clearer errors than those of torch's kernels."""

import math
from typing import Any

import torch
from torch import Tensor

from attnscale.errors import DeviceError, DtypeError, InputError, SettingError, ShapeError
from attnscale.shapes import broadcast, broadcasts_to, scores_shape
from attnscale.torch_internals import is_mapped
from attnscale.visibility import Mask, Visibility, is_plain_mask


def check_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    attn_mask: Mask,
    is_causal: bool,
    enable_gqa: bool,
    softcap: float | None,
    dropout_p: float = 0.0,
) -> None:
    """Raise an error if the inputs do not fit together."""
    tensors = {"query": query, "key": key} | ({} if value is None else {"value": value})
    _check_kind(tensors)
    _check_shapes(tensors, enable_gqa)
    if attn_mask is not None:
        check_one_mask(attn_mask, is_causal)
        _check_mask(query, attn_mask, scores_shape(query, key, enable_gqa))
    check_settings(dropout_p, softcap)


def check_settings(dropout_p: float, softcap: float | None) -> None:
    """Raise an error for an invalid dropout_p or softcap."""
    if not 0.0 <= dropout_p <= 1.0:
        raise SettingError(f"Expected dropout_p between 0 and 1, got {dropout_p}.")
    if softcap is not None and not 0.0 < softcap < math.inf:
        raise SettingError(f"Expected a positive, finite softcap, got {softcap}; pass None for no soft-cap.")


def check_sinks(sinks: Tensor | None, query: Tensor) -> None:
    """Raise an error if sinks are not one logit per head of the query (…, heads, q_len, head_dim)."""
    if sinks is None:
        return
    heads, is_tensor = query.shape[-3] if query.dim() > 2 else 1, isinstance(sinks, Tensor)
    if not is_tensor or sinks.shape != (heads,) or not sinks.is_floating_point():
        found = f"{sinks.dtype} of shape {tuple(sinks.shape)}" if is_tensor else type(sinks).__name__
        raise ShapeError(f"Expected sinks as one logit for each of the {heads} query heads, ({heads},), got {found}.")


def refuse_vmap(*tensors: Tensor) -> None:
    """Raise an error under torch.vmap, where statistics would cover single entries."""
    if any(map(is_mapped, tensors)):
        raise InputError(
            "Expected statistics outside torch.vmap, got tensors that it maps over; measure each entry by itself, "
            "or make the mapped dimension part of the batch."
        )


def check_one_mask(attn_mask: Mask, is_causal: bool) -> None:
    """Raise an error for a mask with is_causal; the error contains SDPA's message, because callers match it."""
    if attn_mask is not None and is_causal:
        if isinstance(attn_mask, Tensor) and not is_plain_mask(attn_mask):
            raise InputError(
                "Expected attn_mask or is_causal, got both: CausalBias should not be used with causal=True; "
                "it is causal already."
            )
        raise InputError(
            "Expected attn_mask or is_causal, got both: Explicit attn_mask should not be set when is_causal=True; "
            "put the causal triangle into the mask, or pass Visibility(last=0, mask=attn_mask)."
        )


def _check_kind(tensors: dict[str, Tensor]) -> None:
    query = tensors["query"]
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise DtypeError(f"Expected {name} as a tensor, got {type(tensor).__name__}; make it with torch.tensor().")
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise DtypeError(f"Expected floating-point tensors, got {name} of {tensor.dtype}; convert it first.")
        if tensor.device != query.device:
            raise DeviceError(
                f"Expected every tensor on one device, got query on {query.device} and {name} on {tensor.device}; "
                f"move {name} with {name}.to(query.device)."
            )
        if tensor.dtype != query.dtype and not torch.is_autocast_enabled(query.device.type):
            raise DtypeError(
                f"Expected one dtype, got query of {query.dtype} and {name} of {tensor.dtype}; "
                f"convert one, or run under torch.autocast({query.device.type!r})."
            )


def _check_shapes(tensors: dict[str, Tensor], enable_gqa: bool) -> None:
    for name, tensor in tensors.items():
        if tensor.dim() < 2:
            raise ShapeError(f"Expected {name} as (…, heads, length, head_dim), got shape {tuple(tensor.shape)}.")
    query, key, value = tensors["query"], tensors["key"], tensors.get("value")
    if query.shape[-1] != key.shape[-1] or query.shape[-1] == 0:
        raise ShapeError(
            "Expected query and key with the same head dimension of at least 1, "
            f"got {query.shape[-1]} and {key.shape[-1]} from shapes {tuple(query.shape)} and {tuple(key.shape)}."
        )
    if value is not None and key.shape[-2] != value.shape[-2]:
        raise ShapeError(
            f"Expected one value per key, got {key.shape[-2]} keys and {value.shape[-2]} values from shapes "
            f"{tuple(key.shape)} and {tuple(value.shape)}."
        )
    _check_leading(tensors, enable_gqa)


def _check_leading(tensors: dict[str, Tensor], enable_gqa: bool) -> None:
    query = tensors["query"]
    heads = query.shape[-3] if query.dim() > 2 else 1
    for name, tensor in tensors.items():
        found = tensor.shape[-3] if tensor.dim() > 2 else 1
        if found == 0 and heads > 0:
            raise ShapeError(f"Expected at least one head in {name}, got none in shape {tuple(tensor.shape)}.")
        if enable_gqa and heads % max(found, 1):
            raise ShapeError(
                f"Expected {name} heads that divide the query's {heads}, got {found} in shape {tuple(tensor.shape)}."
            )
        if not enable_gqa and found not in (1, heads) and heads != 1:
            raise ShapeError(
                f"Expected the query's {heads} heads in {name}, got {found} in shape {tuple(tensor.shape)}; "
                "pass enable_gqa=True if queries share key heads."
            )
    try:  # heads are included: several key heads for one query head need as many value heads
        broadcast(*(tensor.shape[: -3 if enable_gqa else -2] for tensor in tensors.values()))
    except RuntimeError:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise ShapeError(f"Expected heads and batch dimensions that broadcast, got {shapes}.") from None


def _check_mask(query: Tensor, attn_mask: Mask, scores: tuple[int, ...]) -> None:
    if isinstance(attn_mask, Visibility):
        _check_documents(query, attn_mask, scores)
        attn_mask = attn_mask.mask
    if attn_mask is None:
        return
    if not isinstance(attn_mask, Tensor):
        raise DtypeError(f"Expected attn_mask as a tensor or a Visibility, got {type(attn_mask).__name__}.")
    if not is_plain_mask(attn_mask):
        _check_causal_bias(attn_mask, scores)
        return
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise DtypeError(
            f"Expected attn_mask as booleans (True: visible) or floats (added to the scores), got {attn_mask.dtype}."
        )
    accepted = (torch.bool, torch.float32, query.dtype)
    if attn_mask.dtype not in accepted and not torch.is_autocast_enabled(query.device.type):
        raise DtypeError(
            f"Expected attn_mask dtype to be bool, float32 or the query's, {query.dtype}, got {attn_mask.dtype}; "
            "convert it with attn_mask.to(query.dtype)."
        )
    if attn_mask.device != query.device:
        raise DeviceError(f"Expected attn_mask on the query's device, {query.device}, got {attn_mask.device}.")
    if attn_mask.is_nested or not broadcasts_to(attn_mask.shape, scores):
        raise ShapeError(
            f"Expected attn_mask to broadcast to {scores}, one entry per query and key, "
            f"got {'a nested tensor' if attn_mask.is_nested else f'shape {tuple(attn_mask.shape)}'}."
        )


def _check_causal_bias(bias: Any, scores: tuple[int, ...]) -> None:
    """Check the size of a bias aligned to the last key; a bias aligned to the first key fits any size."""
    size = (bias.seq_len_q, bias.seq_len_kv)
    if bias.variant.name == "LOWER_RIGHT" and size != scores[-2:]:
        raise ShapeError(
            f"Expected causal_lower_right{scores[-2:]} for this number of rows and keys, got causal_lower_right{size}."
        )


def _check_documents(query: Tensor, visibility: Visibility, scores: tuple[int, ...]) -> None:
    lead = scores[:-3]
    for side, ids, length in zip(("row", "key"), visibility.documents or (), scores[-2:], strict=False):
        if not broadcasts_to(ids.shape, (*lead, length)) or ids.shape[-1:] != (length,):
            raise ShapeError(
                f"Expected the document of each {side}, broadcasting to {(*lead, length)}, got {tuple(ids.shape)}."
            )
        if ids.device != query.device:
            raise DeviceError(f"Expected documents on the query's device, {query.device}, got {ids.device}.")
