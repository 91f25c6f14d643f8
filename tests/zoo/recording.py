"""What the softmax of each attention in the zoo is really given, told by the zoo's own code: the oracle.

An attention calls `note(self, scores)` just before its softmax. Nothing happens unless a test is recording.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

HIDDEN = -50.0  # no score of a correct attention in the zoo is as low; every mask is lower

_notes: dict[nn.Module, list[Tensor]] | None = None


def note(module: nn.Module, scores: Tensor | Callable[[], Tensor], layout: str = "bhqk", hidden: Tensor | None = None):
    """Keep the scores as (batch, heads, q_len, kv_len) in float64, −∞ where hidden.

    `layout` names the axes as they come: w are windows (more batch), g are groups of heads, "nqk" is batch · heads.
    """
    if _notes is None:
        return
    found = (scores() if callable(scores) else scores).detach().double()
    if hidden is not None:
        found = found.masked_fill(hidden, -torch.inf)
    if layout[0] == "n":
        found, layout = found.unflatten(0, (-1, module.heads)), "bh" + layout[1:]
    for axis in "wbghqk":
        if axis not in layout:
            found, layout = found.unsqueeze(0), axis + layout
    found = torch.einsum(f"{layout}->wbghqk", found).flatten(2, 3).flatten(0, 1)
    _notes.setdefault(module, []).append(found.masked_fill(found < HIDDEN, -torch.inf))


@contextmanager
def recording(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Fill the dictionary, on leaving, with the scores of every attention by its path; calls are more batch."""
    global _notes
    _notes = {}
    hooks = [
        module.register_forward_pre_hook(_note_torch_module, with_kwargs=True)
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention)
    ]
    by_name: dict[str, Tensor] = {}
    try:
        yield by_name
        names = {module: name for name, module in model.named_modules()}
        by_name.update({names[module]: _together(calls) for module, calls in _notes.items()})
    finally:
        _notes = None
        for hook in hooks:
            hook.remove()


def _together(calls: list[Tensor]) -> Tensor:
    """Calls of different lengths in one batch: the longer ones' rows and keys are hidden in the shorter."""
    q_len, kv_len = (max(call.shape[axis] for call in calls) for axis in (-2, -1))
    padded = [
        nn.functional.pad(call, (0, kv_len - call.shape[-1], 0, q_len - call.shape[-2]), value=-torch.inf)
        for call in calls
    ]
    return torch.cat(padded)


def _note_torch_module(module: nn.MultiheadAttention, args, kwargs) -> None:
    """The scores of nn.MultiheadAttention from its weights and its arguments, with no code of its own."""
    if getattr(module, "unrecorded", False):
        return
    names = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask")
    given = dict(zip(names, args, strict=False)) | kwargs
    query, key = given["query"], given["key"]
    if module._qkv_same_embed_dim:
        q_weight, k_weight, _ = module.in_proj_weight.chunk(3)
    else:
        q_weight, k_weight = module.q_proj_weight, module.k_proj_weight
    biases = (None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)[:2]
    query, key = nn.functional.linear(query, q_weight, biases[0]), nn.functional.linear(key, k_weight, biases[1])
    if not module.batch_first and query.dim() == 3:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    if query.dim() == 2:
        query, key = query[None], key[None]
    if module.bias_k is not None:
        key = torch.cat([key, module.bias_k.expand(key.shape[0], 1, -1)], 1)
    if module.add_zero_attn:
        key = torch.cat([key, key.new_zeros(key.shape[0], 1, key.shape[2])], 1)
    query, key = (x.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for x in (query, key))
    scores = query @ key.mT / module.head_dim**0.5
    extra = key.shape[2] - given["key"].shape[1 if module.batch_first else 0]
    if given.get("attn_mask") is not None:
        mask = nn.functional.pad(given["attn_mask"], (0, extra))
        if mask.dim() == 3:
            mask = mask.unflatten(0, (-1, module.num_heads))
        scores = scores.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if given.get("key_padding_mask") is not None:
        padding = nn.functional.pad(given["key_padding_mask"], (0, extra))[:, None, None, :]
        scores = scores.masked_fill(padding, -torch.inf) if padding.dtype == torch.bool else scores + padding
    note(module, scores)
