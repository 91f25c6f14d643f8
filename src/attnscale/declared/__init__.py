"""Read the scale that a model declares: in its configuration, attributes and source code, or by its architecture."""

from attnscale.declared.declaration import Authority, Declared, declared

__all__ = ["Authority", "Declared", "declared"]
