"""What a model says of its own scale: configuration, attributes, source code, published exceptions."""

from attnscale.declared.declaration import Authority, Declared, declared

__all__ = ["Authority", "Declared", "declared"]
