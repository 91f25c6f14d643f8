"""Whether anybody looks on at operators: what is launched past them would not be seen."""

import torch
from torch import Tensor

from attnscale.torch_internals import looks_on


def looked_on(*tensors: Tensor) -> bool:
    """A compiler that traces, a mode or a transform that is on, or a tensor that is no plain one."""
    return torch.compiler.is_compiling() or looks_on() or any(type(tensor) not in PLAIN for tensor in tensors)


PLAIN = (Tensor, torch.nn.Parameter)
