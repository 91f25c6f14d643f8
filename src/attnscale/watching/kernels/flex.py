"""FlexAttention: scores changed by a function of the user's, and shown by another."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from attnscale.tracing.lineage import Ledger
from attnscale.watching.kernels.kernel_call import KernelCall, ScoreMod

ARGUMENTS = (
    "query", "key", "value", "score_mod", "block_mask", "scale", "kernel_options", "score_buffers", "mask_buffers",
)  # fmt: skip


def flex(ledger: Ledger, given: dict[str, Any]) -> Iterator[KernelCall]:
    """Read FlexAttention: its two functions are called to find out what they do to scores."""
    query, key, value = (given[name] for name in ("query", "key", "value"))
    modify = modification(given["score_mod"], given["block_mask"][-1], given["score_buffers"], given["mask_buffers"])
    yield KernelCall(
        "flex", query, key, float(given["scale"]), ledger.node(query), ledger.node(key), score_mod=modify,
        value_node=ledger.node(value), value=value,
    )  # fmt: skip


def modification(
    score_mod: Any, mask_mod: Any, score_buffers: Sequence[Any], mask_buffers: Sequence[Any], is_traced: bool = False
) -> ScoreMod:
    """Return a function that changes scores as the two functions do, and says which are visible.

    They are of one score; as graphs that were traced they take tensors of all of them, which broadcast.
    """
    over_all = _at_once if is_traced else _one_by_one

    def modify(scores: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        batch, heads, _, keys = scores.shape
        at = [torch.arange(size, device=scores.device) for size in (batch, heads, 0, keys)]
        at[2] = positions.to(scores.device)
        score = over_all(lambda s, b, h, i, j: score_mod(s, b, h, i, j, *score_buffers), scored=True)
        shown = over_all(lambda b, h, i, j: mask_mod(b, h, i, j, *mask_buffers), scored=False)
        visible = shown(*at).expand(batch, heads, -1, -1)
        changed = score(scores, *at)
        return changed, visible & (changed != -math.inf)

    return modify


def _at_once(function: Callable[..., Tensor], scored: bool) -> Callable[..., Tensor]:
    """A function of tensors that broadcast -> of scores and the four indices along their axes."""

    def of_all(*given: Tensor) -> Tensor:
        scores, indices = given[: int(scored)], given[int(scored) :]
        sizes = [len(index) for index in indices]
        spread = [index.view(*(-1 if at == axis else 1 for at in range(4))) for axis, index in enumerate(indices)]
        return function(*scores, *spread).expand(sizes)

    return of_all


def _one_by_one(function: Callable[..., Tensor], scored: bool) -> Callable[..., Tensor]:
    """A function of one score and four indices -> the same for all of them."""
    lead = (0,) if scored else ()
    for axis in range(3, -1, -1):
        indices = tuple(0 if at == axis else None for at in range(4))
        function = torch.vmap(function, in_dims=(*lead, *indices), out_dims=0)
    return function
