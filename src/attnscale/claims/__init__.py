"""What four public texts on attention scaling claim, recomputed and judged."""

from attnscale.claims.index import INDEX, Worked
from attnscale.claims.judging import VERDICTS, Claim
from attnscale.claims.ledger import SOURCES, changed, ledger, record

__all__ = ["INDEX", "SOURCES", "VERDICTS", "Claim", "Worked", "changed", "ledger", "record"]
