"""Statistics of attention scores, from query and key: exact in one pass, or sampled with standard errors."""

from attnscale.measure.engine import attention_with_stats, score_moments, score_stats
from attnscale.measure.moments import ScoreMoments
from attnscale.measure.ragged import attention_varlen_with_stats
from attnscale.measure.stats import ScoreStats

__all__ = [
    "ScoreMoments",
    "ScoreStats",
    "attention_varlen_with_stats",
    "attention_with_stats",
    "score_moments",
    "score_stats",
]
