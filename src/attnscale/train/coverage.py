"""Coverage: whether what was followed of a model is all of it that attends; some modules run at some steps alone."""

from attnscale.inside.places import Places
from attnscale.inside.unseen import Unseen
from attnscale.watching.known.known_model import KnownModel

MOST_FOLLOWED = 4  # steps, none of which shows all that attends


class Coverage:
    """Remembers what attended at any step, and looks out for modules that did not run when the model was followed."""

    def __init__(self) -> None:
        self._unseen = Unseen({})
        self._awaited: set[str] = set()  # modules that ran, and were not followed since
        self._followed: set[str] = set()  # those that were
        self._attended: frozenset[str] = frozenset()
        self._lacking = 0  # steps that were followed, and did not show all
        self._exceeded = 0  # times

    def begin(self, places: Places) -> None:
        """From now on nobody looks but where the model is known to attend."""
        self.leave()
        self._lacking = 0
        self._unseen = Unseen({path: each for path, each in places.unseen.items() if path not in self._followed})

    def leave(self) -> None:
        """Look out no more."""
        self._unseen.leave()

    def noticed(self) -> set[str]:
        """Modules that ran since they were last asked for, and were not followed: they may attend."""
        found = self._unseen.ran_since()
        self._awaited |= found
        return found

    def lacks(self, known: KnownModel) -> bool:
        """Whether a step that was followed does not show all that attends at others."""
        ran, attends = self._unseen.ran_since(), known.attending | known.unknown
        self._followed |= ran
        self._awaited -= ran
        self._attended |= attends
        lacks = bool(self._awaited) or not self._attended <= attends
        self._lacking += lacks
        return lacks

    def exceeded(self) -> bool:
        """A module attended more often in a run than when it was followed; whether it did so before."""
        self._exceeded += 1
        return self.is_uneven

    @property
    def is_uneven(self) -> bool:
        """Whether modules attend more often at some steps: what was seen of one tells nothing of the next."""
        return self._exceeded > 1

    @property
    def why_not_inside(self) -> str:
        """Why what attends cannot be told from one step; empty while it perhaps can."""
        return "some of them run at some steps alone" if self._lacking >= MOST_FOLLOWED else ""
