"""Whether the code of a module means an attribute as the scale of its scores.

`self.scale` may as well weigh a residual branch. So the class is read: does it multiply or divide a query, a key or
scores by the attribute, or pass it on as a `scale`? Code that a fused path leaves unused counts: that is how a scale
comes to be ignored without a word.
"""

import ast
import inspect
import re
import textwrap
from functools import cache

from torch import nn

SCORED = re.compile(r"^(q|k|qs|ks|qk|xq|xk)$|quer|key|score|attn_w|attention_w|logit|energy|sim$|^dots?$|^attn$|^att$")
SCALE_KEYWORDS = {"scale", "scaling", "softmax_scale", "sm_scale", "qk_scale"}


def scales_scores(module: nn.Module, attribute: str) -> bool:
    """Whether a class of the module multiplies q, k or their product by `self.<attribute>`, or passes it as a scale."""
    return any(attribute in _scaling_attributes(kind) for kind in type(module).__mro__ if _is_written_by_hand(kind))


def _is_written_by_hand(kind: type) -> bool:
    return kind not in (object, nn.Module) and not kind.__module__.startswith("torch.")


@cache
def _scaling_attributes(kind: type) -> frozenset[str]:
    """Attributes of self that scale scores somewhere in the code of a class; none where there is no code to read."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return frozenset()
    found: set[str | None] = set()
    for node in ast.walk(tree):
        match node:
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                found.update({_own(right)} if _is_scored(left) else set())
                found.update({_own(left)} if _is_scored(right) else set())
            case ast.BinOp(left=left, op=ast.Div(), right=right) if _is_scored(left):
                found.add(_own(right))
            case ast.AugAssign(target=target, op=ast.Mult() | ast.Div(), value=value) if _is_scored(target):
                found.add(_own(value))
            case ast.keyword(arg=name, value=value) if name in SCALE_KEYWORDS:
                found.add(_own(value))
    return frozenset(name for name in found if name)


def _own(node: ast.expr) -> str | None:
    """The name in `self.name`."""
    match node:
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return name
    return None


def _is_scored(node: ast.expr) -> bool:
    """Whether an expression is a query, a key or a product of two."""
    match node:
        case ast.BinOp(op=ast.MatMult()):
            return True
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return bool(SCORED.search(name.lower()))
        case ast.Call(func=ast.Attribute(attr="matmul" | "einsum" | "bmm") | ast.Name(id="matmul" | "einsum" | "bmm")):
            return True
        case ast.Call(func=ast.Attribute(value=inner)):  # q.view(…), self.to_q(x).transpose(…)
            return _is_scored(inner)
        case ast.Call(func=ast.Name(id=name)):
            return bool(SCORED.search(name.lower()))
    return False
