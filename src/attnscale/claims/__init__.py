"""Claims of four articles on attention scaling, recomputed and judged."""

from attnscale.claims.judging import VERDICTS, Claim
from attnscale.claims.ledger import SOURCES, changed, ledger, record

__all__ = ["SOURCES", "VERDICTS", "Claim", "changed", "ledger", "record"]
