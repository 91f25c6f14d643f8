"""Recompute and judge the claims of four articles on attention scaling."""

from attnscale.claims.judging import VERDICTS, Claim
from attnscale.claims.ledger import INDEX, SOURCES, Worked, changed, ledger, record

__all__ = ["INDEX", "SOURCES", "VERDICTS", "Claim", "Worked", "changed", "ledger", "record"]
