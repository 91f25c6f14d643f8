"""Every rule as NumPy writes it, beside an example of it: the float64 truth that the torch code is held to."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from attnscale import rules


@dataclass(frozen=True)
class Example:
    make: Callable[[int, int, int], object]  # heads, kv_heads, head_dim -> rule
    scores: Callable[..., np.ndarray]  # rule, q, k (key heads repeated), visible (…, q_len, 1) -> scores


def _perturbed(module: nn.Module) -> nn.Module:
    """A learned rule as it is after some training, not at its start."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module.double()


def _dots(q, k):
    return q @ np.swapaxes(k, -1, -2)


def _root(q):
    return np.sqrt(q.shape[-1])


def _array(parameter):
    return parameter.detach().double().numpy()


def _softplus(x):
    return np.logaddexp(x, 0.0)


def _query_temperature(rule, q, k, visible):
    projected = np.einsum("...hid,hd->...hi", q, _array(rule.weight)) + _array(rule.bias)[:, None]
    return _dots(q, k) * (_softplus(projected) / np.log(2))[..., None] / _root(q)


def _qk_norm(rule, q, k, visible):
    def rms(x):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + rule.eps)

    group = q.shape[-3] // rule.key_gain.shape[0]
    gains = _array(rule.query_gain)[:, None], _array(rule.key_gain).repeat(group, axis=0)[:, None]
    return _dots(rms(q) * gains[0], rms(k) * gains[1]) / _root(q)


def _cosine(rule, q, k, visible):
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    return _dots(q, k) * np.minimum(np.exp(_array(rule.log_inverse_temperature)), 100)[:, None, None]


def _calibrated(rule, q, k, visible):
    scores = _dots(q, k)
    per_head = np.moveaxis(scores, -3, 0).reshape(scores.shape[-3], -1)
    return scores / per_head.std(-1)[:, None, None]


EXAMPLES = {
    "inverse_sqrt": Example(lambda *_: rules.inverse_sqrt, lambda r, q, k, n: _dots(q, k) / _root(q)),
    "inverse_dim": Example(lambda *_: rules.inverse_dim, lambda r, q, k, n: _dots(q, k) / q.shape[-1]),
    "mup": Example(lambda *_: rules.mup(base=16), lambda r, q, k, n: _dots(q, k) * np.sqrt(16) / q.shape[-1]),
    "unscaled": Example(lambda *_: rules.unscaled, lambda r, q, k, n: _dots(q, k)),
    "constant": Example(lambda *_: rules.constant(0.37), lambda r, q, k, n: 0.37 * _dots(q, k)),
    "temperature": Example(lambda *_: rules.temperature(1.7), lambda r, q, k, n: _dots(q, k) / 1.7),
    "calibrated": Example(lambda *_: rules.calibrated, _calibrated),
    "log_length": Example(
        lambda *_: rules.log_length(s=0.6), lambda r, q, k, n: 0.6 * np.log(np.maximum(n, 1)) * _dots(q, k) / _root(q)
    ),
    "yarn": Example(
        lambda *_: rules.yarn(factor=4.0), lambda r, q, k, n: (0.1 * np.log(4) + 1) ** 2 * _dots(q, k) / _root(q)
    ),
    "LearnedTemperature": Example(
        lambda heads, kv, d: _perturbed(rules.LearnedTemperature(heads)),
        lambda r, q, k, n: _dots(q, k) / (_root(q) * np.exp(_array(r.log_temperature)))[:, None, None],
    ),
    "QueryTemperature": Example(lambda heads, kv, d: _perturbed(rules.QueryTemperature(d, heads)), _query_temperature),
    "QKNorm": Example(lambda heads, kv, d: _perturbed(rules.QKNorm(d, heads, kv)), _qk_norm),
    "Cosine": Example(lambda heads, kv, d: _perturbed(rules.Cosine(heads)), _cosine),
}
