"""Changes to a model's parameters that correct the scale of its scores."""

from attnscale.acting.clip import ClipReport, clip_qk_
from attnscale.acting.rescale import calibrate_, rescale_

__all__ = ["ClipReport", "calibrate_", "clip_qk_", "rescale_"]
