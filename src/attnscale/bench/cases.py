"""The attentions that are timed: what each is, and the names that variants begin with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.nn.attention import SDPBackend

PLAIN, OURS = "plain SDPA", "attnscale"
SAMPLED_ROWS = 64  # what watching and monitoring sample by default
BACKENDS = {
    "cpu": (SDPBackend.FLASH_ATTENTION,),
    "cuda": (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION),
}


@dataclass(frozen=True)
class Case:
    """One attention to time; key and value have kv_heads, which query heads share."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    is_causal: bool
    backward: bool
    dtype: str
    kind: str = "dense"
    lengths: tuple[int, ...] = ()  # of the sequences of a ragged batch, whose longest is q_len


class Variant(NamedTuple):
    """A way to compute a case, and the query, key and value that it is given."""

    forward: Callable[..., Tensor]
    given: list[Tensor]


def backend_name(backend: SDPBackend) -> str:
    """As people call it."""
    return backend.name.lower().removesuffix("_attention")
