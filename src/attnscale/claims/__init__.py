"""Claims of four articles on attention scaling, recomputed and judged."""

from attnscale.claims.judging import VERDICTS, Claim
from attnscale.claims.ledger import INDEX, SOURCES, Worked, changed, ledger, record

__all__ = ["INDEX", "SOURCES", "VERDICTS", "Claim", "Worked", "changed", "ledger", "record"]
