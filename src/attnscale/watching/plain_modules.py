"""Modules of torch's own in which nothing attends: most of those that run, and each of them is two calls of a hook."""

from collections.abc import Container, Iterator, Mapping

from torch import nn

PLAIN = frozenset(
    (
        *(nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity),
        *(nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid),
    )
)


def plain_modules(modules: Mapping[str, nn.Module], followed: Container[str]) -> Iterator[nn.Module]:
    """Those of a model whose paths are not `followed`; none that was made into something else.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.Softmax(-1), nn.LayerNorm(3))
    >>> list(plain_modules(dict(net.named_modules()), followed=("2",)))
    [Linear(in_features=2, out_features=3, bias=True)]
    """
    return (module for path, module in modules.items() if type(module) in PLAIN and path not in followed)
