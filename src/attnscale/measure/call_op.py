"""An attention as the arguments of an operator, and back: for graphs, which take an operator whole."""

from typing import Any

from torch import Tensor

from attnscale.attending.call import Call
from attnscale.visibility import Visibility

SEEN = "Tensor? mask, Tensor? documents_q, Tensor? documents_k, SymInt? last, SymInt? first"
SCORES = f"{SEEN}, float scale, float? softcap"


def arguments_of(call: Call) -> tuple[Any, ...]:
    """All but the tensors that are multiplied, and dropout."""
    seen = call.visibility
    mask = None if seen.mask is None else seen.mask.detach()
    own, theirs = (None, None) if seen.documents is None else seen.documents
    return mask, own, theirs, seen.last, seen.first, call.scale, call.softcap


def call_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    documents_q: Tensor | None,
    documents_k: Tensor | None,
    last: int | None,
    first: int | None,
    scale: float,
    softcap: float | None,
) -> Call:
    """The attention again."""
    documents = None if documents_q is None or documents_k is None else (documents_q, documents_k)
    return Call(query, key, value, Visibility(last, first, mask, documents), 0.0, scale, softcap)
