"""Diagnose watched layers: verdicts, causes, findings, and the effect of a fix."""

from attnscale.diagnose.alarm import LayerSnapshot, Thresholds, layer_alarm, next_threshold
from attnscale.diagnose.auditing import Audit, audit, audited, diagnose
from attnscale.diagnose.cause import Cause, Change, cause
from attnscale.diagnose.finding import CODES, SEVERITIES, Finding
from attnscale.diagnose.forecast import Crossing, Growth, Trend, growth
from attnscale.diagnose.trained import is_trained
from attnscale.diagnose.verdict import Verdict, head_verdicts
from attnscale.diagnose.what_if import Candidate, Outcome, WhatIf, what_if

__all__ = [
    "CODES",
    "SEVERITIES",
    "Audit",
    "Candidate",
    "Cause",
    "Change",
    "Crossing",
    "Finding",
    "Growth",
    "LayerSnapshot",
    "Outcome",
    "Thresholds",
    "Trend",
    "Verdict",
    "WhatIf",
    "audit",
    "audited",
    "cause",
    "diagnose",
    "growth",
    "head_verdicts",
    "is_trained",
    "layer_alarm",
    "next_threshold",
    "what_if",
]
