"""How the keys of sampled rows are cut, so that few rows still fill a GPU."""

from torch import Tensor

LEAST_SPAN = 128  # keys, of the spans a sampled row is cut into
PARTS = 264  # spans of all heads, two a multiprocessor of an H200: fewer leave it idle, more end before they are fast


def key_span(query: Tensor, key: Tensor) -> int:
    """How many keys one program of the sampling kernel takes: as many as fill the GPU; on a CPU, all."""
    return key.shape[2] if query.device.type == "cpu" else span_of(query.shape[0], query.shape[1], key.shape[2])


def span_of(batch: int, heads: int, kv_len: int) -> int:
    """How many keys of a head one program takes on a GPU."""
    parts = max(1, PARTS // (batch * heads))
    return -(-kv_len // (parts * LEAST_SPAN)) * LEAST_SPAN
