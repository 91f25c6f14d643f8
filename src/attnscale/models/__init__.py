"""A plain causal transformer, and a small trained model that ships with the package."""

from attnscale.models.bundled import load_bundled
from attnscale.models.text import decode, default_text, encode
from attnscale.models.transformer import CausalTransformer

__all__ = ["CausalTransformer", "decode", "default_text", "encode", "load_bundled"]
