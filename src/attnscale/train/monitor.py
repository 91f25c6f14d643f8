"""Monitor: records and alarms of the attention scores of a model while it trains, every so many steps."""

import atexit
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from attnscale.diagnose import Finding, Growth, Thresholds, diagnose
from attnscale.diagnose.alarm import ScaleError
from attnscale.diagnose.scale import WRONG_SCALE, correction, scale_error
from attnscale.errors import AttnscaleWarning, InputError, NotRecordedWarning, SettingError
from attnscale.measure.stats import ScoreStats
from attnscale.results import PlottedResult
from attnscale.train.clipped import Clipped, Clips
from attnscale.train.delivery import Delivery
from attnscale.train.history import History
from attnscale.train.learning import Given, Learning
from attnscale.train.merging import Merged, Merging
from attnscale.train.numbers import records
from attnscale.train.ranks import Moment
from attnscale.train.record import Record, new_name
from attnscale.train.sampling import Sampling
from attnscale.train.sinks import Sink, sink_from
from attnscale.train.tally import Arriving, whole_layers
from attnscale.watching import Layer, Seen
from attnscale.watching.seen import LayerFacts
from attnscale.watching.watcher import Settings

OPEN: "weakref.WeakSet[Monitor]" = weakref.WeakSet()
Audit = tuple[list[Finding], dict[str, ScaleError]]  # alarms of the first sampled step, and layers with a wrong scale
NO_AUDIT: Audit = ([], {})


class _CancelledError(Exception):
    """A step that is not watched to its end."""


@atexit.register
def _close_all() -> None:
    """Stop watching, and close connections to other ranks, while the interpreter still runs."""
    for monitor in list(OPEN):
        monitor.cancel()
        monitor._merging.close()


class Monitor(PlottedResult):
    """Watch every `every`-th training step of a model, and raise alarms when its scores run away.

    Call step() once after each training step, or put each step inside `with monitor:`. The first step is sampled, so
    the log begins with the model as it was initialised. On a sampled step all forwards in training mode are measured,
    every micro-batch of it, and recomputation is not counted again; between sampled steps nothing is left in place. The
    first is traced, uncompiled, and audited: warnings and errors that `audit` would find are alarms of its record. From
    then on probes measure inside the model's own run, compiled or not. A failure here never stops training: a warning
    says what is not recorded.

    A record is written when the next step ends, since nothing waits for a GPU; or at once where `last`, `growth()`,
    `state_dict()` or `close()` asks for it, or the process ends.

    Where torch.distributed runs, make a monitor on every rank: rows of all ranks are merged, and rank 0 writes. Ranks
    that share out the heads of a layer (tensor parallel) have a `head_group`. Ranks that share out the *keys* of a row
    (context parallel) have a `key_group`: rows of the same queries, bit for bit, are then put together over the keys of
    all its ranks and over the turns of a ring, whichever way attention is called on each shard. Gradients that reach
    queries and keys are left out there.

    >>> import torch
    >>> from attnscale.models import CausalTransformer
    >>> model = CausalTransformer(vocabulary=17, d_model=32, layers=1, heads=2)
    >>> records = []
    >>> monitor = Monitor(model, every=2, sinks=[records.append])
    >>> for _ in range(3):
    ...     _ = model(torch.zeros(1, 5, dtype=torch.int64)).sum().backward()
    ...     monitor.step()
    >>> [record.step for record in records]
    [0, 2]
    >>> monitor.close()
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 50,
        rows: int | None = 64,
        sinks: Iterable[str | Path | Sink] = (),
        *,
        limits: Thresholds | None = None,
        on_alarm: Callable[[Finding], None] | None = None,
        group: dist.ProcessGroup | None = None,
        head_group: dist.ProcessGroup | None = None,
        key_group: dist.ProcessGroup | None = None,
        merge_ranks: bool = True,
        timeout: float = 60.0,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(f"Expected a torch.nn.Module to monitor, got {type(model).__name__}.")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise SettingError(f"Expected every as a whole number of steps of at least 1, got {every!r}.")
        if isinstance(sinks, (str, Path)):
            raise SettingError(f"Expected a list of sinks, got {sinks!r} alone; write sinks=[{str(sinks)!r}].")
        self.model, self.every = model, every
        self._settings = Settings(rows, training=True)
        self.sinks = [sink_from(sink) for sink in sinks]
        self._delivery = Delivery(self.sinks, on_alarm, self._tell)
        limits = limits or Thresholds()
        self._history = History.of(model, limits)
        self.steps = 0  # training steps that are over
        self.run, self._part = new_name(), new_name()  # which tell its records from another run's in a log
        self._last: Record | None = None
        self._unwritten: Callable[[], None] | None = None  # the record of a step that a GPU may not have finished
        self._layers: Callable[[], Mapping[str, Layer]] = dict  # of the last sampled step
        self._merging = Merging(group, head_group, key_group, merge_ranks, timeout, vars(limits), self._tell)
        self._watch: AbstractContextManager[Seen] | None = None
        self._seen: Seen | None = None
        self._learning = Learning()  # loss and learning rate of the present step
        self._sampling = Sampling(model)
        self._clips = Clips(model)
        self._resumed = 0  # how often a state was loaded
        self._warned: set[tuple[type[AttnscaleWarning], str]] = set()
        OPEN.add(self)
        self.begin()

    @property
    def is_due(self) -> bool:
        """True if the present step is sampled."""
        return self.steps % self.every == 0

    @property
    def last(self) -> Record | None:
        """The record of the last sampled step."""
        self.flush()
        return self._last

    @property
    def layers(self) -> Mapping[str, Layer]:
        """The layers of the last sampled step, with the statistics of all ranks."""
        return self._layers()

    @property
    def history(self) -> History:
        """Numbers of all sampled steps, by which alarms are raised."""
        self.flush()
        return self._history

    def step(self, loss: Given = None, lr: Given = None) -> None:
        """End a training step: record it if it was sampled, with what note() takes, and watch the next if it is."""
        self.note(loss, lr)
        self.end()
        self.begin()

    def note(self, loss: Given = None, lr: Given = None) -> None:
        """Note the loss and the learning rate of the present step, numbers or tensors, for its record if it is sampled.

        Later values replace earlier ones; a record has the mean loss of all ranks, and rank 0's learning rate. Nothing
        waits for a GPU. A loss that diverges while all scores are in range is an alarm of its own.
        """
        if self.is_due:
            self._try(lambda: setattr(self, "_learning", self._learning.given(loss, lr)))

    def begin(self) -> None:
        """Begin a training step."""
        if self.is_due and self._watch is None:
            self._try(self._begin_watching)

    def _begin_watching(self) -> None:
        self._clips.begin()
        watch = self._sampling.watched(replace(self._settings, seed=self._seed))
        self._seen = watch.__enter__()
        self._watch = watch

    @property
    def _moment(self) -> Moment:
        """Identifies the step to other ranks."""
        return Moment(self._resumed, self.steps)

    @property
    def _seed(self) -> int | None:
        """Seed by which ranks that share out keys measure the same rows."""
        return None if self._merging.key_group is None else self.steps

    def end(self) -> None:
        """End a training step."""
        self.flush()
        if self._watch is not None or (self.is_due and self._merging.is_needed):
            steps: list[Seen | None] = []
            self._try(lambda: steps.append(self._leave()))
            self._try(lambda: self._record(steps[0] if steps else None))  # other ranks wait for this one
        self.steps += 1

    def flush(self) -> None:
        """Write the record of the last sampled step, if it is not written yet."""
        writing, self._unwritten = self._unwritten, None
        if writing is not None:
            atexit.unregister(self.flush)
            self._try(writing)

    def _try(self, recording: Callable[[], None]) -> None:
        try:
            recording()
        except Exception as error:  # the run is worth more than its log
            self._tell(NotRecordedWarning(f"A sampled step could not be recorded: {type(error).__name__}: {error}"))

    def __enter__(self) -> "Monitor":
        self.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.end()
            return
        self.cancel()
        if self.is_due and self._merging.is_needed:
            self._merging.break_off(self._moment)

    def cancel(self) -> None:
        """Stop watching the present step, and record nothing of it."""
        self.flush()
        leaving, self._watch, self._seen, self._learning = self._watch, None, None, Learning()
        if leaving is not None:
            leaving.__exit__(_CancelledError, _CancelledError(), None)  # nothing is concluded from half a step

    def close(self) -> None:
        """Stop, and close the sinks."""
        self.cancel()
        self._merging.close()
        self._delivery.close()

    def growth(self, layer: str) -> Growth | None:
        """Return how fast the largest score of a layer grows, by the latest samples."""
        return self.history.growth(layer)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: plain values, for any checkpoint."""
        return {"run": self.run, "steps": self.steps, "history": self.history.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where state_dict() was taken."""
        self.cancel()
        self.run, self._part = str(state.get("run", self.run)), new_name()
        self.steps = int(state["steps"])
        self._resumed += 1
        self.history.load_state_dict(state["history"])
        self.begin()

    def _leave(self) -> Seen | None:
        self._sampling.begin_conclusion()
        leaving, seen, self._watch, self._seen = self._watch, self._seen, None, None
        if leaving is None or seen is None:  # the step could not begin, or was cancelled
            return None
        try:
            leaving.__exit__(None, None, None)
        except InputError as error:  # raised where nothing was seen
            self._sampling.note_nothing_seen(seen)
            self._tell(NotRecordedWarning(f"Nothing was recorded of a sampled step. {error}"))
            return None
        if not self._merging.is_needed or dist.get_rank(self._merging.group) == 0:  # the same on all ranks
            for notice in self._sampling.notices(seen):
                self._tell(notice)
        self._sampling.note(seen)
        return seen

    def _record(self, seen: Seen | None) -> None:
        at, part, clipped = (self.steps, time.time()), self._merging.part, self._clips.since()
        learning, self._learning, audits = self._learning, Learning(), [NO_AUDIT]
        self._try(lambda: audits.append(self._audit(seen)))  # the record is written without it too
        audit = audits[-1]
        if not self._merging.is_needed:
            if seen is None:
                return
            self._layers = partial(getattr, seen, "layers")
            arriving = Arriving.of(seen, part)
            self._unwritten = lambda: self._conclude(
                at,
                seen.facts(),
                Merged(arriving.tallies(), learning=learning.values()),
                clipped,
                arriving.stats(),
                audit,
            )
            if arriving.is_here and learning.is_here:
                self.flush()
            else:
                atexit.register(self.flush)
            return
        layers = {} if seen is None else dict(seen.layers)
        merged = self._merging.merged(self._moment, layers, learning.values())  # at once: ranks wait for each other
        own = {
            name: replace(layer, stats=merged.tallies[key].stats, measured=())
            for name, layer in layers.items()
            if (key := (name, part, layer.heads)) in merged.tallies
        }
        self._layers = lambda: own
        facts = {} if seen is None else {name: fact for name, fact in seen.facts().items() if name in own}
        self._conclude(at, facts, merged, clipped, None, audit)

    def _conclude(
        self,
        at: tuple[int, float],
        facts: Mapping[str, LayerFacts],
        merged: Merged,
        clipped: Clipped,
        stats: Mapping[str, ScoreStats] | None,
        audit: Audit,
    ) -> None:
        """Make the record of a step, `at` its number and time, raise alarms and write it to the sinks.

        `stats` are those of this rank; None where ranks were merged.
        """
        if not merged.tallies:
            return
        whole, part = whole_layers(merged.tallies), self._merging.part
        found = {name: clipped.told_in(own, name, facts.get(name), part) for name, own in records(whole).items()}
        stats = {name: each.stats for name, each in whole.items()} if stats is None else stats
        whose, (loss, lr) = (merged.ranks, merged.rank), merged.learning
        alarms = self._history.add(
            at[0],
            found,
            stats,
            loss=loss,
            audit=audit[0],
            scale_errors=audit[1],
            rescaled={name: fact.rescaled for name, fact in facts.items()},
        )
        self._last = record = Record(*at, found, alarms, *whose, self.run, self._part, loss, lr)
        if merged.is_written_here:
            self._delivery.write(record)
        self._delivery.alarm(record, is_logged=merged.is_logged_here, is_over=self._history.is_calm)

    def _audit(self, seen: Seen | None) -> Audit:
        """Diagnose the first sampled step, without what is noted only or frozen on purpose."""
        if seen is None or seen.is_probed or not self._history.is_empty:
            return NO_AUDIT
        found = diagnose(seen.layers, trained=self._history.trained).findings
        is_frozen = any(not parameter.requires_grad for parameter in self.model.parameters())
        is_whole = self._merging.key_group is None  # else scores are those of this rank's keys alone
        serious = [
            each
            for each in found
            if each.severity != "note"
            and (is_whole or each.code in WRONG_SCALE)
            and not (is_frozen and each.code == "no_gradient")
        ]
        errors = {
            name: ScaleError(error.code, correction(layer))
            for name, layer in seen.layers.items()
            if (error := scale_error(each for each in found if each.layer == name)) is not None
        }
        return serious, errors

    def _tell(self, warning: AttnscaleWarning) -> None:
        """Warn of each thing once."""
        key = (type(warning), str(warning))
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(warning, stacklevel=4)
