"""What the Triton kernels are written for."""

from functools import cache
from importlib.util import find_spec

from torch import Tensor

from attnscale.attending.call import Call
from attnscale.measure.cuda.watched import looked_on
from attnscale.numerics import KERNEL_DTYPES

WIDEST_HEAD = 256  # they hold a tile of whole heads


def kernels_take(call: Call) -> bool:
    """Whether query and key are what the kernels are written for."""
    return call.query.dtype == call.key.dtype and _are_taken(call.query) and _are_taken(call.key)


def kernels_take_vectors(*vectors: Tensor) -> bool:
    """Whether a kernel may read these, (batch, heads, length, features) each, past torch's operators."""
    return all(map(_are_taken, vectors)) and not looked_on(*vectors)


def _are_taken(vectors: Tensor) -> bool:
    fits = vectors.is_cuda and vectors.dtype in KERNEL_DTYPES and vectors.shape[-1] <= WIDEST_HEAD
    return fits and vectors.numel() > 0 and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
