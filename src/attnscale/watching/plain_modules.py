"""Modules of torch's own in which nothing attends: most of those that run, and each of them is two calls of a hook."""

from collections.abc import Container, Iterator

from torch import nn

PLAIN = frozenset(
    (
        *(nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity),
        *(nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid),
    )
)


def plain_modules(model: nn.Module, followed: Container[str]) -> Iterator[nn.Module]:
    """Those of a model whose paths are not `followed`; none that was made into something else.

    >>> list(plain_modules(nn.Sequential(nn.Linear(2, 3), nn.Softmax(-1), nn.LayerNorm(3)), followed=("2",)))
    [Linear(in_features=2, out_features=3, bias=True)]
    """
    return (module for path, module in model.named_modules() if type(module) in PLAIN and path not in followed)
