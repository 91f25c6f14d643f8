"""Read the scale, the soft-cap and attnscale's rules from the attributes of an attention module.

`self.scale` may also weight a residual branch. So the source code of the class is parsed: does it multiply or divide a
query, a key or scores by the attribute, or pass it on as a `scale`? Code that only the slow path runs counts too: a
fused path often ignores the scale silently.
"""

import ast
import inspect
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from types import FunctionType

import torch
from torch import Tensor, nn

from attnscale.declared.configuration import Parents, positive
from attnscale.rules import about_rule
from attnscale.rules.apply import Scale, apply_scale

# Sorted by decreasing certainty that the name means the scale of the scores.
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
SAME = 1e-3  # relative tolerance; covers √d written with a few digits
SCORED = re.compile(r"^(q|k|qs|ks|qk|xq|xk)$|quer|key|score|attn_w|attention_w|logit|energy|sim$|^dots?$|^attn$|^att$")
SCALE_KEYWORDS = {"scale", "scaling", "softmax_scale", "sm_scale", "qk_scale"}
PRODUCTS = {"matmul", "einsum", "bmm"}


def attribute_scale(around: Parents, head_dim: int) -> tuple[float, str, tuple[float, ...], bool] | None:
    """Return the first attribute that can mean a scale: a multiplier, a divisor, or a factor on query and key each.

    The result is the likely multiplier, its source, all multipliers that it can mean, and True if it can only mean the
    scale. A second attribute may multiply it, as a learned temperature does. A value of 1 is skipped, because modules
    that scale the query earlier set it.
    """
    for path, module in around:
        numbers = {name: value for name in SCALE_NAMES if (value := positive(module, name)) and value != 1}
        if not numbers:
            continue
        name, *others = numbers
        use = _use_in_code(module, name)
        scale, readings = _readings(numbers[name], use, head_dim)
        products = tuple(scale * factor for other in others for factor in (numbers[other], 1 / numbers[other]))
        outright = (numbers[name],) if name in UNMISTAKABLE else ()  # even if its square equals 1/√d_k
        sure = bool(outright) or use is not None
        return scale, _source(path, name), readings + outright + products, sure
    return None


def scale_of_one(around: Parents) -> str:
    """Return the name of the first scale attribute with the value 1; empty if there is none."""
    return next((source for value, source in _positives(around, SCALE_NAMES) if value == 1), "")


def _readings(value: float, use: str | None, head_dim: int) -> tuple[float, tuple[float, ...]]:
    """Return the most likely multiplier for a number, and all possible ones."""
    readings = (min(value, 1 / value), max(value, 1 / value), value**2, value**-2)
    usual = head_dim**-0.5
    is_restated = any(math.isclose(reading, usual, rel_tol=SAME) for reading in readings)
    likely = {"times": value, "over": 1 / value}.get(use or "", readings[0])
    return (usual, (usual,)) if is_restated else (likely, readings)


def attribute_softcap(around: Parents) -> tuple[float, str] | None:
    """Return the first attribute that sets a soft-cap."""
    return next(_positives(around, SOFTCAP_NAMES), None)


def _positives(around: Parents, names: Sequence[str]) -> Iterator[tuple[float, str]]:
    for path, module in around:
        for name in names:
            if (value := positive(module, name)) is not None:
                yield value, _source(path, name)


def attribute_rule(around: Parents, head_dim: int) -> tuple[float | None, str] | None:
    """Return the value and the name of a module's attnscale rule; the value is None if learned or data-dependent."""
    for path, module in around:
        for name in ("rule", "scale"):
            rule = getattr(module, name, None)
            owners = [rule if isinstance(rule, FunctionType) else type(rule)] if callable(rule) else []
            owners += [type(module)] if name == "rule" and rule is not None else []
            if any(owner.__module__.startswith("attnscale.") for owner in owners):
                return _constant_value(rule, head_dim), _source(path, name)
    return None


def _source(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _constant_value(rule: Scale, head_dim: int) -> float | None:
    about = about_rule(rule)
    if isinstance(rule, nn.Module | Tensor) or (about is not None and about.needs_visible):
        return None
    ones = torch.ones(1, 1, 2, head_dim)
    query, key, scale = apply_scale(rule, ones, ones, lambda: None)
    return scale if query is ones and key is ones else None


def _use_in_code(module: nn.Module, attribute: str) -> str | None:
    """Return how the module's code uses `self.<attribute>` on q, k or scores: "times", "over", or None if it does not.

    An attribute that is passed on as a scale counts as "times".
    """
    kinds = [kind for kind in type(module).__mro__ if kind is not object and not kind.__module__.startswith("torch.")]
    return next((use for kind in kinds if (use := _scaling_attributes(kind).get(attribute))), None)


@cache
def _scaling_attributes(kind: type) -> dict[str, str]:
    """Return the attributes of self that scale scores in the source of a class; empty if there is no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return {}
    found: dict[str | None, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                found |= {_attribute_of_self(right): "times"} if _is_scored(left) else {}
                found |= {_attribute_of_self(left): "times"} if _is_scored(right) else {}
            case ast.BinOp(left=left, op=ast.Div(), right=right) if _is_scored(left):
                found[_attribute_of_self(right)] = "over"
            case ast.AugAssign(target=target, op=ast.Mult() | ast.Div() as op, value=value) if _is_scored(target):
                found[_attribute_of_self(value)] = "times" if isinstance(op, ast.Mult) else "over"
            case ast.keyword(arg=name, value=value) if name in SCALE_KEYWORDS:
                found |= dict.fromkeys(map(_attribute_of_self, ast.walk(value)), "times")
    return {name: use for name, use in found.items() if name}


def _attribute_of_self(node: ast.AST) -> str | None:
    match node:
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return name
    return None


def _is_scored(node: ast.expr) -> bool:
    """Return True if an expression is a query, a key or a product of two."""
    match node:
        case ast.BinOp(op=ast.MatMult()):
            return True
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return bool(SCORED.search(name.lower()))
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)) if name in PRODUCTS:
            return True
        case ast.Call(func=ast.Attribute(value=inner)):  # q.view(…), self.to_q(x).transpose(…)
            return _is_scored(inner)
        case ast.Call(func=ast.Name(id=name)):
            return bool(SCORED.search(name.lower()))
    return False
