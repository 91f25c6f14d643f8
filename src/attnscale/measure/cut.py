"""How rows are cut into blocks that stay in a core's cache, or that fill a GPU."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from attnscale.attending.call import Call

CORE_SCORES = 2**17  # scores of several heads at a time on a core: two buffers of 512 KB, which its cache holds
JOINED_SCORES = 2**18  # for each of torch's own threads: to begin an operation on them takes longer than a nearby cache
ROW_SCORES = 2**19  # and of one head, where keys are many
DEVICE_SCORES = 2**26  # scores at a time on a GPU: two of 256 MB
LEAST_ROWS, MOST_ROWS = 32, 128  # of one product on a CPU: fewer make it slow, more hide much of a causal block
WORTH_A_THREAD = 2**20  # scores; for fewer, the cores that torch's own threads hold while they wait for work are missed


class Strip(NamedTuple):
    """Some rows of some heads of one batch entry: what a thread takes at a time, and passes over block by block."""

    entry: int
    heads: slice
    rows: slice  # of the query, or of the positions given


class Cut(NamedTuple):
    """All rows in strips, how many rows of one are passed over at once, and by how many threads."""

    strips: tuple[Strip, ...]
    block: int
    threads: int  # that they are worth, on a CPU


def cut_of(call: Call, entries: Sequence[tuple[int, int]]) -> Cut:
    """The rows of each batch entry, from one to another."""
    heads, keys, is_here = call.query.shape[1], call.key.shape[-2], call.query.device.type == "cpu"
    threads = torch.get_num_threads() if is_here else 0
    return _cut_for(heads, keys, tuple(entries), threads, call.visibility.is_causal)


@lru_cache(maxsize=64)
def _cut_for(heads: int, keys: int, entries: tuple[tuple[int, int], ...], threads: int, is_causal: bool) -> Cut:
    """Blocks that stay in a core's cache, or that fill a GPU, and strips of them that are worth a thread.

    `threads` are torch's own on a CPU, and none on a GPU.
    """
    rows = max((stop - start for start, stop in entries), default=0)
    if not min(heads, rows, keys):
        return Cut((), 1, 0)
    worth = heads * keys * sum(stop - start for start, stop in entries) // WORTH_A_THREAD if threads else 0
    if threads:
        scores = CORE_SCORES if worth else JOINED_SCORES * threads
        block = max(LEAST_ROWS, min(MOST_ROWS, ROW_SCORES // keys))
        block = min(block, -(-rows // 2)) if is_causal else block  # the first half sees much less
    else:
        scores, block = DEVICE_SCORES, max(MOST_ROWS, DEVICE_SCORES // (heads * keys))
    block = min(block, rows)
    together = -(-heads // -(-heads * block * keys // scores))  # of one size
    strip = block * max(1, WORTH_A_THREAD // (together * block * keys))
    strips = (
        Strip(entry, slice(head, min(head + together, heads)), slice(row, min(row + strip, stop)))
        for entry, (start, stop) in enumerate(entries)
        for head in range(0, heads, together)
        # the longest of a causal head first: the threads end together
        for row in reversed(range(start, stop, strip))
    )
    return Cut(tuple(strips), block, worth)
