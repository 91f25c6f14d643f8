"""Define ops by their schema, with one Python function each: torch.library.custom_op costs the host twice the time."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

LIBRARY = torch.library.Library("attnscale", "FRAGMENT")


def define_op(
    schema: str, function: Callable[..., Any], fake: Callable[..., Any], tags: Sequence[torch.Tag] = ()
) -> Any:
    """Define `attnscale::<schema>`; return what calls it."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=tuple(tags))
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"attnscale::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.attnscale, name).default


def no_result(*_: Any) -> None:
    """The fake of an op that returns nothing."""
