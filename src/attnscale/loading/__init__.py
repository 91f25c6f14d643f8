"""Load models by name or path, with inputs to run them on; code that comes with a model is never executed."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnscale.loading.hub import offline
    from attnscale.loading.inputs import Loaded
    from attnscale.loading.load import load_model
    from attnscale.loading.request import Request

__all__ = ["Loaded", "Request", "load_model", "offline"]

# Imported on first use: a request with bad input is refused before torch is imported.
_HOME = {"Loaded": "inputs", "Request": "request", "load_model": "load", "offline": "hub"}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'attnscale.loading' has no attribute {name!r}")
    return getattr(import_module(f"attnscale.loading.{_HOME[name]}"), name)
