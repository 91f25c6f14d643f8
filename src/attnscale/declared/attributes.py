"""The attributes of an attention module, and of those around it -> the scale, soft-cap and QK-norm they can mean."""

import math
from dataclasses import dataclass
from types import FunctionType

import torch
from torch import Tensor, nn

from attnscale.declared.fields import number, qk_norm_flag
from attnscale.declared.parents import Parents, layer_index
from attnscale.declared.source_code import scales_scores
from attnscale.rules import about_rule
from attnscale.rules.apply import Scale, apply_scale

# In the order of how surely they mean the scale of the scores.
SCALE_NAMES = (
    "softmax_scale", "sm_scale", "qk_scale", "scaling", "scale", "attn_scale", "attention_scale", "score_scale",
    "inv_norm_factor", "norm_factor", "scale_attn", "scale_factor", "scaling_factor", "rescale_factor", "norm_fact",
    "temperature", "tau", "inv_sqrt_dim", "inv_sqrt_d", "sqrt_dim", "sqrt_d", "sqrt_dk", "sqrt_d_k", "sqrt_head_dim",
)  # fmt: skip
UNMISTAKABLE = ("softmax_scale", "sm_scale", "qk_scale")
SOFTCAP_NAMES = (
    "attn_logit_softcapping", "attn_logit_softcap", "attn_softcap", "attention_softcap", "logit_softcap",
    "logits_soft_cap", "attention_logits_soft_cap", "softcap", "soft_cap", "attn_logit_cap", "logit_cap",
)  # fmt: skip
BY_LAYER = "scale_attn_by_inverse_layer_idx"
SAME = 1e-3  # relative: √d rounded to float32, or written with a few digits


@dataclass(frozen=True)
class AttributeScale:
    """A number that may be the scale of the scores, and the multipliers that it can mean."""

    scale: float
    source: str
    readings: tuple[float, ...]
    can_only_be_the_scale: bool


def attribute_scale(around: Parents, head_dim: int) -> AttributeScale | None:
    """The first attribute that can mean a scale: as a multiplier, a divisor, or a root given to query and key each.

    A second one may multiply it, as a learned temperature does. A one is passed over: it is what a module keeps where
    the query was scaled before.
    """
    for path, module in around:
        numbers = {name: value for name in SCALE_NAMES if (value := number(module, name)) and value > 0 and value != 1}
        if not numbers:
            continue
        name, *others = numbers
        scale, readings = _readings(numbers[name], head_dim)
        products = tuple(scale * factor for other in others for factor in (numbers[other], 1 / numbers[other]))
        outright = (numbers[name],) if name in UNMISTAKABLE else ()  # also where its square restates 1/√d_k
        sure = bool(outright) or scales_scores(module, name)
        return AttributeScale(scale, _source(path, name), readings + outright + products, sure)
    return None


def _readings(value: float, head_dim: int) -> tuple[float, tuple[float, ...]]:
    """What a number most likely multiplies q·k by, and all that it can mean; 1/√d_k alone where it restates that."""
    readings = (min(value, 1 / value), max(value, 1 / value), value**2, value**-2)
    usual = head_dim**-0.5
    is_restated = any(math.isclose(reading, usual, rel_tol=SAME) for reading in readings)
    return (usual, (usual,)) if is_restated else (readings[0], readings)


def attribute_softcap(around: Parents) -> tuple[float, str] | None:
    """The first attribute that sets a soft-cap."""
    for path, module in around:
        for name in SOFTCAP_NAMES:
            value = number(module, name)
            if value is not None and value > 0:
                return value, _source(path, name)
    return None


def attribute_qk_norm(around: Parents) -> str | None:
    """The first flag that turns a QK-norm on."""
    for path, module in around:
        flag = qk_norm_flag(module)
        if flag is not None:
            return _source(path, flag)
    return None


def attribute_rule(around: Parents, head_dim: int) -> tuple[float | None, str] | None:
    """A rule of attnscale that a module was given; None for its value where that depends on tensors or is learned."""
    for path, module in around:
        for name in ("rule", "scale"):
            rule = getattr(module, name, None)
            if _is_rule(rule) or (name == "rule" and rule is not None and _is_ours(type(module))):
                return _constant_value(rule, head_dim), _source(path, name)
    return None


def attribute_by_layer(around: Parents, parents: Parents, head_dim: int) -> tuple[float, str] | None:
    """1/√d_k over the number of the layer, where a module says so as GPT-2's does."""
    index = layer_index(parents)
    for path, module in around:
        if index is not None and getattr(module, BY_LAYER, None) is True:
            return head_dim**-0.5 / (index + 1), _source(path, BY_LAYER)
    return None


def _source(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_rule(value: object) -> bool:
    kind = value if isinstance(value, FunctionType) else type(value)
    return callable(value) and _is_ours(kind)


def _is_ours(kind: type | FunctionType) -> bool:
    return kind.__module__.startswith("attnscale.")


def _constant_value(rule: Scale, head_dim: int) -> float | None:
    known = about_rule(rule)
    if isinstance(rule, nn.Module | Tensor) or (known is not None and known.needs_visible):
        return None
    ones = torch.ones(1, 1, 2, head_dim)
    query, key, scale = apply_scale(rule, ones, ones, lambda: None)
    return scale if query is ones and key is ones else None
