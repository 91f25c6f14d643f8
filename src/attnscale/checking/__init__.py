"""The work of `attnscale check`: load a model, watch one forward pass, diagnose."""

from attnscale.checking.checked import Checked, Line, check_model
from attnscale.diagnose.grouped import Group

__all__ = ["Checked", "Group", "Line", "check_model"]
