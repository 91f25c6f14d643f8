"""Closed forms and exact expectations for the spread of scores and for softmax."""

from attnscale.theory.gaussian import RowExpectation, SoftmaxExpectation, expected_row, expected_softmax
from attnscale.theory.limits import critical_spread, entropy_floor, regime, saturation_point
from attnscale.theory.prediction import Candidate, Prediction, predict
from attnscale.theory.variance import Initialisation, row_variance, score_mean, score_variance, unit_variance_scale

__all__ = [
    "Candidate",
    "Initialisation",
    "Prediction",
    "RowExpectation",
    "SoftmaxExpectation",
    "critical_spread",
    "entropy_floor",
    "expected_row",
    "expected_softmax",
    "predict",
    "regime",
    "row_variance",
    "saturation_point",
    "score_mean",
    "score_variance",
    "unit_variance_scale",
]
