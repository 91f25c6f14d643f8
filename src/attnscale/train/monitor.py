"""Monitor: records and alarms of the attention scores of a model in training, at every n-th step."""

import atexit
import logging
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from attnscale.diagnose import Finding, Growth, Thresholds, diagnose, is_trained
from attnscale.diagnose.alarm import ScaleError
from attnscale.diagnose.finding import grouped, severity_rank
from attnscale.diagnose.scale import WRONG_SCALE, correction
from attnscale.errors import AttnscaleWarning, InputError, NotRecordedWarning, SettingError, SinkWarning
from attnscale.measure.stats import ScoreStats
from attnscale.plain import counted
from attnscale.results import PlottedResult
from attnscale.train.history import History
from attnscale.train.ranks import Learned, Merged, Ranks
from attnscale.train.record import Record, new_name
from attnscale.train.sampling import Clipped, Clips, Sampling
from attnscale.train.sinks import Sink, sink_from
from attnscale.train.tally import MergedStats, PendingTallies, pooled_of, records, whole_layers
from attnscale.watching import Layer, Seen
from attnscale.watching.seen import LayerFacts
from attnscale.watching.watcher import Settings

OPEN: "weakref.WeakSet[Monitor]" = weakref.WeakSet()
Audit = tuple[list[Finding], dict[str, ScaleError]]  # alarms of the first sampled step, and layers with a wrong scale
NO_AUDIT: Audit = ([], {})
LOGGER = logging.getLogger("attnscale")
Scalar = float | Tensor | None
T = TypeVar("T")


class _CancelledError(Exception):
    """Ends a sampled step early, without a record."""


@atexit.register
def _close_all() -> None:
    """Stop watching, and close connections to other ranks, while the interpreter still runs."""
    for monitor in list(OPEN):
        monitor.cancel()
        monitor._ranks.close()


class Monitor(PlottedResult):
    """Measure every `every`-th training step of a model, and raise alarms when its scores grow out of range.

    Call step() once after each training step, or put each step inside `with monitor:`. The first step is sampled, so
    the log begins with the model as it was initialised. A sampled step measures all forwards in training mode, in
    every micro-batch; recomputation is not counted again. Between sampled steps, nothing is left in the model. The
    first sampled step is traced, uncompiled, and audited: warnings and errors that `audit` would find are alarms of its
    record. From then on, probes measure inside the model's own run, compiled or not. A failure of the monitor never
    stops training: a warning says which part is not recorded.

    A record is written when the next step ends, so that the host does not wait for a GPU, or earlier if `last`,
    `growth()`, `state_dict()` or `close()` needs it, or the process ends.

    With torch.distributed, create a monitor on every rank: the rows of all ranks are merged, and rank 0 writes. With
    tensor parallelism, pass the group that shares the heads of a layer as `head_group`. A rank that does not answer
    within `timeout` seconds is missing from that record, with a warning.

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
        timeout: float = 60.0,
    ) -> None:
        if key_group is not None:
            raise SettingError(
                "Ranks that share the keys of a row (context parallel) cannot be merged, because each computes only a "
                "part of every softmax. Monitor a run without context parallelism."
            )
        if not isinstance(model, nn.Module):
            raise InputError(f"Expected a torch.nn.Module to monitor, got {type(model).__name__}.")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise SettingError(f"Expected every as a whole number of steps of at least 1, got {every!r}.")
        if isinstance(sinks, (str, Path)):
            raise SettingError(f"Expected a list of sinks, got {sinks!r} alone; write sinks=[{str(sinks)!r}].")
        self.model, self.every = model, every
        self._settings = Settings(rows, training=True)
        self.sinks = [sink_from(sink) for sink in sinks]
        self._on_alarm = on_alarm
        self._logged: dict[str, int] = {}  # the worst severity in the log, by code
        self._repeated: list[tuple[int, str]] = []  # steps and layers of alarms that the log only counts
        self._history = History(limits or Thresholds(), is_trained(model))
        self.steps = 0  # training steps that are over
        self.run = new_name()  # distinguishes its records from those of another run in a log
        self._last: Record | None = None
        self._unwritten: Callable[[], None] | None = None  # the record of a step that a GPU may still compute
        self._layers: Callable[[], Mapping[str, Layer]] = dict  # of the last sampled step
        self._ranks = Ranks(group, head_group, timeout, self._warn)
        self._watch: AbstractContextManager[Seen] | None = None
        self._seen: Seen | None = None
        self._learning: dict[str, Number] = {}  # loss and learning rate of the present step
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
        """Numbers of all sampled steps, from which alarms are raised."""
        self.flush()
        return self._history

    def step(self, loss: Scalar = None, lr: Scalar = None) -> None:
        """End a training step: record it if it was sampled, and begin the next. Arguments are those of note()."""
        self.note(loss, lr)
        self.end()
        self.begin()

    def note(self, loss: Scalar = None, lr: Scalar = None) -> None:
        """Note the loss and the learning rate of the present step, numbers or tensors, for its record if it is sampled.

        Later values replace earlier ones; a record has the mean loss of all ranks, and rank 0's learning rate. Nothing
        waits for a GPU. A loss that diverges while all scores are in range is an alarm of its own.
        """
        for name, given in (("loss", loss), ("lr", lr)):
            if self.is_due and given is not None and (number := self._try(partial(Number, given))) is not None:
                self._learning[name] = number

    def begin(self) -> None:
        """Begin a training step."""
        if self.is_due and self._watch is None:
            self._try(self._begin_watching)

    def _begin_watching(self) -> None:
        self._clips.begin()
        watch = self._sampling.watched(self._settings)
        self._seen = watch.__enter__()
        self._watch = watch

    @property
    def _moment(self) -> str:
        """Text of the present step; it differs between ranks that were resumed a different number of times."""
        resumed = f" of a run resumed {self._resumed} times" if self._resumed else ""
        return f"step {self.steps}{resumed}"

    def end(self) -> None:
        """End a training step."""
        self.flush()
        if self._watch is not None or (self.is_due and self._ranks.is_needed):
            seen = self._try(self._leave)
            self._try(lambda: self._record(seen))  # also without measurements: other ranks wait for this one
        self.steps += 1

    def flush(self) -> None:
        """Write the record of the last sampled step, if it is not written yet."""
        writing, self._unwritten = self._unwritten, None
        if writing is not None:
            atexit.unregister(self.flush)
            self._try(writing)

    def _try(self, recording: Callable[[], T]) -> T | None:
        try:
            return recording()
        except Exception as error:  # a failure of the log must not stop the run
            self._warn(NotRecordedWarning(f"A sampled step could not be recorded: {type(error).__name__}: {error}"))
            return None

    def __enter__(self) -> "Monitor":
        self.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.end()
            return
        self.cancel()
        if self.is_due and self._ranks.is_needed:
            self._ranks.break_off(self._moment)

    def cancel(self) -> None:
        """Stop measuring the present step, and record nothing."""
        self.flush()
        leaving, self._watch, self._seen, self._learning = self._watch, None, None, {}
        if leaving is not None:
            leaving.__exit__(_CancelledError, _CancelledError(), None)  # half a step gives no record

    def close(self) -> None:
        """Stop, and close the sinks."""
        self.cancel()
        self._log_repeated()
        self._ranks.close()
        for sink in self.sinks:
            getattr(sink, "close", lambda: None)()

    def growth(self, layer: str) -> Growth | None:
        """Return the growth of a layer's largest score over the latest samples."""
        return self.history.growth(layer)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a run to resume, as plain values for any checkpoint."""
        return {"run": self.run, "steps": self.steps, "history": self.history.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from state_dict()."""
        self.cancel()
        self.run = str(state.get("run", self.run))
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
        except InputError as error:  # raised if no attention ran
            self._sampling.note_nothing_seen(seen)
            self._warn(NotRecordedWarning(f"Nothing was recorded of a sampled step. {error}"))
            return None
        if self._ranks.is_first:  # the same on all ranks
            for notice in self._sampling.notices(seen):
                self._warn(notice)
        self._sampling.note(seen)
        return seen

    def _record(self, seen: Seen | None) -> None:
        at, clipped = (self.steps, time.time()), self._clips.since()
        learning, self._learning = self._learning, {}
        audit = self._try(lambda: self._audit(seen)) or NO_AUDIT  # a failed audit does not prevent the record
        facts = {} if seen is None else self._try(seen.facts) or {}
        arriving = None if seen is None else self._try(partial(PendingTallies.of, seen, self._ranks.part))
        if self._ranks.is_needed:  # at once, even after a failure here: ranks wait for each other
            own = {} if arriving is None else self._try(arriving.tallies) or {}
            merged = self._ranks.merged(self._moment, own, _values(learning))
            self._layers = partial(self._merged_layers, seen, merged)
            self._conclude(at, facts, merged, clipped, {}, audit)
        elif seen is not None and arriving is not None:
            self._layers = partial(getattr, seen, "layers")
            self._unwritten = lambda: self._conclude(
                at, facts, Merged(arriving.tallies(), learning=_values(learning)), clipped, arriving.stats(), audit
            )
            if arriving.has_arrived and all(number.is_here for number in learning.values()):
                self.flush()
            else:
                atexit.register(self.flush)

    def _merged_layers(self, seen: Seen | None, merged: Merged) -> Mapping[str, Layer]:
        """Return the layers of this rank, with the statistics of the same heads on all ranks."""
        found = {}
        for name, layer in ({} if seen is None else seen.layers).items():
            tally = merged.tallies.get((name, self._ranks.part, layer.heads))
            if tally is not None:
                stats = MergedStats(layer.heads, exact=False, pool=partial(pooled_of, tally))
                found[name] = replace(layer, stats=stats, measured=())
        return found

    def _conclude(
        self,
        at: tuple[int, float],
        facts: Mapping[str, LayerFacts],
        merged: Merged,
        clipped: Clipped,
        stats: Mapping[str, ScoreStats],
        audit: Audit,
    ) -> None:
        """Create the record of a step, raise alarms and write it to the sinks; `at` is its number and time.

        `stats` have the errors of sampled numbers; merged ranks have none.
        """
        if not merged.tallies:
            return
        whole, part = records(whole_layers(merged.tallies)), self._ranks.part
        found = {name: clipped.with_factors(own, name, facts.get(name), part) for name, own in whole.items()}
        loss, lr = merged.learning
        alarms = self._history.add(
            at[0],
            found,
            stats,
            loss=loss,
            audit=audit[0],
            scale_errors=audit[1],
            rescaled={name: fact.rescaled for name, fact in facts.items()},
        )
        self._last = record = Record(*at, found, alarms, merged.ranks, merged.rank, self.run, loss, lr)
        if merged.is_written_here:
            for sink in self.sinks:
                self._call(sink, record, "A sink failed and is tried again at the next record")
        if merged.is_first:
            self._log(record)
        for alarm in alarms if self._on_alarm is not None else ():
            self._call(self._on_alarm, alarm, "on_alarm failed and is called again at the next alarm")

    def _call(self, function: Any, argument: Record | Finding, failure: str) -> None:
        try:
            function(argument)
        except Exception as error:
            self._warn(SinkWarning(f"{failure}: {type(error).__name__}: {error}"))

    def _log(self, record: Record) -> None:
        """Log each alarm that is new or more serious than before, once for all layers, and count the others."""
        for group in grouped(record.alarms):
            severity = severity_rank(group.first.severity)
            if severity > self._logged.get(group.first.code, -1):
                self._logged[group.first.code] = severity
                LOGGER.warning("step %d: %s", record.step, group)
            else:
                self._repeated += [(record.step, alarm.layer) for alarm in group.findings]
        if self._history.is_calm:
            self._logged.clear()
            self._log_repeated()

    def _log_repeated(self) -> None:
        repeated, self._repeated = self._repeated, []
        if repeated:
            layers = counted(len({layer for _, layer in repeated}), "layer")
            LOGGER.warning("%s in %s until step %d", counted(len(repeated), "more such alarm"), layers, repeated[-1][0])

    def _audit(self, seen: Seen | None) -> Audit:
        """Diagnose the first sampled step, without notes and without heads that may be sharp on purpose."""
        if seen is None or seen.is_probed or not self._history.is_empty:
            return NO_AUDIT
        found = diagnose(seen.layers, trained=self._history.trained).findings
        is_frozen = any(not parameter.requires_grad for parameter in self.model.parameters())
        serious = [each for each in found if each.severity != "note" and not (is_frozen and each.code == "no_gradient")]
        wrong = {each.layer: each.code for each in reversed(found) if each.code in WRONG_SCALE and each in serious}
        return serious, {name: ScaleError(code, correction(seen.layers[name])) for name, code in wrong.items()}

    def _warn(self, warning: AttnscaleWarning) -> None:
        """Issue each warning once."""
        key = (type(warning), str(warning))
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(warning, stacklevel=4)


class Number:
    """A number that is copied to the host, from a GPU in stream order and without waiting."""

    def __init__(self, given: float | Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if isinstance(given, Tensor):
            mean = given.detach().float().mean()  # a new tensor: the loop may write to its own
            given = mean.to("cpu", non_blocking=mean.is_cuda)
            self._event = torch.cuda.current_stream(mean.device).record_event() if mean.is_cuda else None
        self._number = given if isinstance(given, Tensor) else float(given)

    @property
    def is_here(self) -> bool:
        """True if value() would not wait."""
        return self._event is None or self._event.query()

    def value(self) -> float:
        """Wait for the number and return it."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._number)


def _values(learning: Mapping[str, Number]) -> Learned:
    loss, lr = (learning[name].value() if name in learning else None for name in ("loss", "lr"))
    return loss, lr
