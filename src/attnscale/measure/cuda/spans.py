"""How the keys of sampled rows are cut, so that few rows still fill a GPU."""

from torch import Tensor

LEAST_SPAN = 128  # keys, of the spans a sampled row is cut into
PARTS = 264  # spans of all heads, two a multiprocessor of an H200: fewer leave it idle, more end before they are fast


def key_span(query: Tensor, key: Tensor) -> int:
    """How many keys one program of the sampling kernel takes: as many as fill the GPU; on a CPU, all."""
    if query.device.type == "cpu":
        return key.shape[2]
    parts = max(1, PARTS // (query.shape[0] * query.shape[1]))
    return -(-key.shape[2] // (parts * LEAST_SPAN)) * LEAST_SPAN
