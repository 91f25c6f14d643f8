"""Calls of known kernels on new tensors: measured at once, or when there is time for it."""

from dataclasses import replace

import numpy as np
import torch

from attnscale.numerics import without_autocast
from attnscale.torch_internals import version_of
from attnscale.watching.call import Factors, SeenCall
from attnscale.watching.kernels import KernelCall
from attnscale.watching.kernels.kernel_call import Found
from attnscale.watching.kernels.norms import projected_norms


class WaitingCall:
    """A call that is known and was not measured yet, of tensors without their graph.

    That can wait until its gradient passes, since autograd holds query and key until then, and a GPU has work to do.
    """

    def __init__(self, call: SeenCall, kernel: KernelCall, rows: int | None) -> None:
        self.call, self._rows = call, rows
        self.failure: str | None = None
        self._kernel: KernelCall | None = kernel
        self._versions = _versions(kernel)
        self.held = sum(kernel.memory.values())  # bytes that wait with it

    def measure(self) -> None:
        """Measure it, once; what was written to since is told as a failure."""
        kernel, self._kernel, self.held = self._kernel, None, 0
        if kernel is None:
            return
        if self._versions != _versions(kernel):
            self.failure = "a query or key was written to after its attention, and is left out"
            return
        try:
            with torch.no_grad(), without_autocast(kernel.query):
                measured_again(self.call, kernel, self._rows)
        except Exception as error:  # inside a backward pass, which must go on
            self.failure = f"{type(error).__name__}: {error}"


def _versions(kernel: KernelCall) -> list[int]:
    return [version_of(tensor) for tensor in (kernel.query, kernel.key, kernel.visibility.mask) if tensor is not None]


def _plain(kernel: KernelCall, call: SeenCall, rows: int | None) -> Found:
    """What its arguments say; whether a mask is causal, and that it is no bias, is known: a GPU would be waited for."""
    causal = kernel.is_causal if kernel.visibility.mask is None else call.causal
    bias, hidden = call.highest_bias if kernel.query.is_cuda else kernel.highest_bias(), kernel.hidden_keys
    return Found(kernel.stats(rows), kernel.scale, kernel.softcap, bias, causal, hidden, kernel.padding)


def _of_heads(factors: Factors, heads: int) -> Factors:
    """Those of so many key heads, where each stands for several others or several for one."""
    shared = max(1, len(factors) // max(heads, 1))
    return np.repeat(factors, max(1, heads // max(len(factors), 1)))[::shared]


def measured_again(call: SeenCall, kernel: KernelCall, rows: int | None) -> SeenCall:
    """A call that was seen before, with the numbers of this time."""
    assert call.factors is not None
    group = kernel.query.shape[1] // max(kernel.key.shape[1], 1)
    query, key = call.factors[0], np.repeat(_of_heads(call.factors[1], kernel.key.shape[1]), group)
    if kernel.attends_itself != call.attends_itself:
        kernel = replace(kernel, attends_itself=call.attends_itself)
    found = _plain(kernel, call, rows) if kernel.score_mod is None else kernel.modified(kernel.score_mod, rows)
    call.causal, call.softcap, call.highest_bias = found.causal, found.softcap, max(0.0, found.bias or 0.0)
    call.batch, call.query_len, call.key_len = len(kernel.query), kernel.query.shape[-2], kernel.key.shape[-2]
    call.stats, call.padding, call.dtype = found.stats, found.padding, kernel.query.dtype
    call.scales = torch.from_numpy(found.multiplier * abs(query) * abs(key))
    left_out = found.padding, found.hidden_keys
    call.query_norm, call.key_norm = projected_norms(kernel.query, kernel.key, (query, key), left_out, rows is None)
    return call
