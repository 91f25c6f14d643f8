"""A request -> what was found: load the model, watch one forward pass, diagnose; what `attnscale check` shows."""

from attnscale.checking.checked import Checked
from attnscale.checking.line import Line
from attnscale.checking.run import check_model
from attnscale.diagnose.finding import Group

__all__ = ["Checked", "Group", "Line", "check_model"]
