"""MODEL, as a person names it -> a model with inputs, ready to run; nothing it brings is trusted."""

from attnscale.loading.load import load_model
from attnscale.loading.loaded import Loaded, Request
from attnscale.loading.offline import offline

__all__ = ["Loaded", "Request", "load_model", "offline"]
