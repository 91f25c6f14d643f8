"""`attnscale check`: load a model, watch a forward pass, and diagnose it."""

from attnscale.checking.checked import Checked, Line, check_model
from attnscale.diagnose.finding import Group

__all__ = ["Checked", "Group", "Line", "check_model"]
