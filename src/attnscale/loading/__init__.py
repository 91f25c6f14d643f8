"""MODEL, as a person names it -> a model with inputs, ready to run; nothing it brings is trusted."""

from importlib import import_module
from typing import TYPE_CHECKING

from attnscale.loading.offline import offline

if TYPE_CHECKING:
    from attnscale.loading.load import load_model
    from attnscale.loading.loaded import Loaded, Request

__all__ = ["Loaded", "Request", "load_model", "offline"]

# Loaded when first used, so that nonsense that was given to run a model on is refused without importing torch.
_HOME = {"Loaded": "loaded", "Request": "loaded", "load_model": "load"}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'attnscale.loading' has no attribute {name!r}")
    return getattr(import_module(f"attnscale.loading.{_HOME[name]}"), name)
