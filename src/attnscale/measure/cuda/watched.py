"""Whether anybody looks on at operators: what is launched past them would not be seen."""

import torch
from torch import Tensor


def looked_on(*tensors: Tensor) -> bool:
    """A compiler that traces, a mode or a transform that is on, or a tensor that is no plain one."""
    return torch.compiler.is_compiling() or _modes() or any(type(tensor) not in PLAIN for tensor in tensors)


PLAIN = (Tensor, torch.nn.Parameter)


def _modes() -> bool:
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._is_torch_function_mode_enabled()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )
