"""How much gradient reached the queries and keys of each head, beside what reached the others of the model.

1 − Σp² is what the softmax of a row lets through. What arrives also depends on what came down to it and on the values,
so a sharp head may get more gradient than any other. Where a backward pass was seen, that is known. Of what reached the
queries and the keys the geometric mean is taken: it is the same however a factor is shared between the two.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from attnscale.watching.layer import Layer


def reached(layers: Mapping[str, Layer]) -> dict[str, Tensor]:
    """By layer, a value a head: the gradient's length over that of the model's median head; empty without a backward.

    A layer is left out whose queries or keys no gradient was followed to.
    """
    lengths = {name: found for name, layer in layers.items() if (found := _length(layer)) is not None}
    if not lengths:
        return {}
    median = torch.cat(list(lengths.values())).median()
    return {name: found / median for name, found in lengths.items()} if median > 0 else {}


def _length(layer: Layer) -> Tensor | None:
    query, key = layer.query_gradient, layer.key_gradient
    return None if query is None or key is None else (query.double() * key.double()).sqrt().cpu()
