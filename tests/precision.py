"""How exact is exact enough: the rule flash-attention holds its kernels to."""

import numpy as np
import torch


def worst(tensor, expected):
    return float(np.abs(tensor.detach().double().cpu().numpy() - expected).max(initial=0.0))


def assert_as_exact_as_sdpa(ours, sdpa, expected):
    """At most twice SDPA's error at the same dtype, plus the rounding of the expected values to that dtype."""
    rounding = 2 * torch.finfo(ours.dtype).eps * float(np.abs(expected).max(initial=1.0))
    limit = 2 * worst(sdpa, expected) + rounding
    assert worst(ours, expected) <= limit, f"error {worst(ours, expected):.3g}, SDPA's {worst(sdpa, expected):.3g}"


def assert_same(ours, expected, inputs, retain_graph=False):
    """Compare two outputs, and the gradients that reach the inputs from each."""
    torch.testing.assert_close(ours, expected)
    grads = [
        torch.autograd.grad(each.sin().sum(), inputs, retain_graph=retain_graph, allow_unused=True)
        for each in (ours, expected)
    ]
    torch.testing.assert_close(*grads)
