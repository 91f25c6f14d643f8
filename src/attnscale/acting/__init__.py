"""Acting: what a watched model showed -> its parameters, changed so that the scores come out as they should."""

from attnscale.acting.clip import ClipReport, clip_qk_
from attnscale.acting.rescale import calibrate_, rescale_

__all__ = ["ClipReport", "calibrate_", "clip_qk_", "rescale_"]
