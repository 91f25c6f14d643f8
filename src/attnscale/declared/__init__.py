"""Declarations of a model about its scale: configuration, attributes, source code, published exceptions."""

from attnscale.declared.declaration import Authority, Declared, declared

__all__ = ["Authority", "Declared", "declared"]
