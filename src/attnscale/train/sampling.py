"""How a model is watched from one sampled step to the next: followed, known by its kernels, or inside its own run."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace

from torch import nn

from attnscale.errors import AttnscaleWarning, NotInsideWarning, NotRecordedWarning
from attnscale.inside.places import Places
from attnscale.inside.structure import Structure
from attnscale.inside.watching import watched_inside
from attnscale.watching import Seen
from attnscale.watching.known.known_model import KnownModel
from attnscale.watching.settings import Settings
from attnscale.watching.watch import watched

# Every so many sampled steps all operations are followed anew; between them a model is known by its kernels, which
# costs much less. A constant that the training loop changes meanwhile, a temperature say, is noticed then. To follow a
# compiled model is to run it uncompiled, so one that is measured inside is followed again only where it was replaced.
FOLLOWED = 10
MOST_LEFT_OUT = 2  # steps of which attention was left out, that a model may have and be known again


class Sampling:
    """What is remembered of a model between the steps that are sampled of it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.known: KnownModel | None = None
        self.goes_inside = True  # until something was missed there
        self._sampled = 0  # steps
        self._structure: Structure | None = None  # of the model, when it was last watched
        self._left_out = 0  # steps of which some attention was, since nobody looked where it ran
        self._left_graphs = False  # the step sampled last ran a compiled model uncompiled

    def watched(self, settings: Settings) -> AbstractContextManager[Seen]:
        """From outside, or inside the run of a model that is known and compiled."""
        if self._structure is None or not self._structure.is_that_of(self._model):
            self.known, self.goes_inside = None, True  # some modules were replaced, and are to be followed
            self._structure, self._left_graphs, self._left_out = Structure(self._model), False, 0
        if self.known is not None and self.known.is_compiled and self.goes_inside:
            places = Places(self._model, self.known)
            if places.are_complete:
                return watched_inside(places, settings)
        known = None if self.known is None else self.known.from_outside
        return watched(self._model, replace(settings, known=known))

    def begins_to_leave(self) -> None:
        """What was known is believed again when the step has been seen to its end."""
        self.known = None

    def saw_nothing(self, seen: Seen) -> None:
        """A step was over and nothing was seen of it."""
        self.goes_inside &= not seen.is_inside

    def saw(self, seen: Seen) -> None:
        """A step was seen to its end."""
        self._sampled += 1
        self.goes_inside &= not seen.is_inside or seen.known_model is not None
        self._left_out += seen.was_left_out
        is_kept = seen.is_inside or (self._sampled % FOLLOWED and self._left_out < MOST_LEFT_OUT)
        self.known = seen.known_model if is_kept else None

    def notices(self, seen: Seen) -> Iterator[AttnscaleWarning]:
        """What is to be told of how a step was watched, before saw()."""
        if seen.without_gradients:
            yield NotRecordedWarning(
                "Attention ran with gradients off, as reentrant activation checkpointing runs it, so the gradients "
                "that reach its queries and keys are not seen; checkpoint(…, use_reentrant=False) shows them."
            )
        if seen.apart:
            yield NotInsideWarning(
                "Some attentions cannot be measured inside the model's run. At sampled steps their modules run "
                f"uncompiled, and are followed from outside: {', '.join(seen.apart)}."
            )
        if seen.was_left_out and self._left_out + 1 == MOST_LEFT_OUT:
            yield NotInsideWarning(
                "Some modules attend at some steps alone. At sampled steps all operations are followed from now on."
            )
        left_graphs, self._left_graphs = self._left_graphs, seen.is_compiled and not seen.is_inside
        if left_graphs and self._left_graphs:  # and not to get to know the model
            yield NotInsideWarning(
                "The model's attentions cannot all be measured inside its run, nor can the modules of those that "
                "cannot run apart. At sampled steps the whole model runs uncompiled, and is followed from outside."
            )
