"""QKClip: QK-Clip after every step of the optimiser, by probes inside the model's own run."""

import warnings
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakMethod

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from attnscale.acting.clip import ClipReport, check_threshold, clip_layers
from attnscale.acting.clip_state import WriteCheck, clip_state
from attnscale.acting.parameters import Frozen, check_frozen, inner_optimizer, refuse_copies, refuse_foreign_parameters
from attnscale.acting.replicas import Replicas, replicas_of
from attnscale.errors import InputError, NotInsideWarning
from attnscale.plain import printable
from attnscale.probes.placement import Placement
from attnscale.torch_internals import never_compiled
from attnscale.train.probed_clip import ProbedClip, why_not_probed
from attnscale.watching.layer import Layer
from attnscale.watching.seen import Seen
from attnscale.watching.watch import watched
from attnscale.watching.watcher import Settings

MOST_INCOMPLETE = 6  # consecutive plans that soon missed an attention; after these every step is traced
LASTING = 32  # steps; a plan that is complete for this many resets the count of incomplete plans


class _InterruptedError(Exception):
    """Ends a traced step without using its measurements."""


class QKClip:
    """Keep the scores of a model in training below a threshold, after every step of its optimiser.

    Call step() after each, or attach() it to the optimiser. The first step is traced, uncompiled, to find the
    parameters that produce each head. From then on probes take the maxima inside the model's own run, compiled or not:
    exact, over every row of every micro-batch; recomputation is not counted again. The host does not wait for a GPU:
    factors are computed and applied there, and a later step returns the report of the clips. When a module attends for
    the first time at a later step, the model is traced again. If a module takes no probe, the whole model runs
    uncompiled under the tracer at every step, with one warning.

    With torch.distributed, create one on every rank and call step() on all ranks equally often; one collective at each
    step joins the ranks that compute the same heads. Pass ranks that are not detected, such as copies without DDP, as
    `group`. The guarantees of clip_qk_ hold, also for `frozen` parameters.

    The optimiser must update the clipped parameters themselves. FSDP1, DeepSpeed, and in attach() an optimiser that
    updates copies, are refused. If an optimiser step undoes a clip, clipping stops with one warning.

    >>> import torch
    >>> from attnscale.models import CausalTransformer
    >>> model = CausalTransformer(vocabulary=17, d_model=32, layers=1, heads=2)
    >>> optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    >>> clip = QKClip(model, threshold=0.1)
    >>> for _ in range(2):
    ...     model(torch.arange(10)[None]).square().mean().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     report = clip.step()
    >>> clip.last.threshold
    0.1
    >>> clip.close()
    """

    def __init__(
        self,
        model: nn.Module,
        threshold: float = 100.0,
        *,
        frozen: Frozen = "keep",
        group: "dist.ProcessGroup | None" = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(f"Expected a torch.nn.Module to clip, got {type(model).__name__}.")
        check_threshold(threshold)
        check_frozen(frozen)
        refuse_foreign_parameters(model)
        self.model, self._threshold, self._frozen, self._group = model, float(threshold), frozen, group
        self._check = WriteCheck(model)
        self.steps = 0
        self._last: ClipReport | None = None
        self._trace: tuple[AbstractContextManager[Seen], Seen] | None = None  # of the present step
        self._probed: ProbedClip | None = None  # instead of a trace
        self._may_probe, self._is_closed = True, False
        self._incomplete, self._planned_at = 0, 0
        self._warned: set[str] = set()
        clip_state(model).fetch = WeakMethod(self.flush)
        self._begin_trace()

    @property
    def threshold(self) -> float:
        """Largest score that is not clipped. To change it, create another QKClip or call load_state_dict()."""
        return self._threshold

    @property
    def is_inside(self) -> bool:
        """True if probes take the maxima inside the model's own run; False while the model is traced."""
        return self._probed is not None

    @property
    def last(self) -> ClipReport | None:
        """Report of the last step that clipped a head; waits for a GPU."""
        self.flush()
        return self._last

    @never_compiled  # a compiled step of the optimiser may call it
    def step(self) -> ClipReport | None:
        """Clip the heads above the threshold; return a report if one has arrived."""
        if self._is_closed:
            raise InputError("Expected a QKClip that is open, got one that was closed.")
        self.steps += 1
        probed = self._probed
        if probed is None:
            return self._clip_traced()
        if not probed.is_current:  # a part was replaced, moved or converted
            self._restart()
            return None
        if probed.misses_calls():
            self._stay_traced("some attentions did not run where they ran in the trace")
            self._begin_trace()
            return None
        report = self._newest(probed.clip())
        unplanned = probed.unplanned()
        if unplanned:
            self._plan_again(probed, unplanned)
        return report

    def attach(self, optimizer: Optimizer) -> RemovableHandle:
        """Call step() after every step of this optimiser, until remove() of the returned handle is called."""
        refuse_foreign_parameters(self.model)
        refuse_copies(self.model, optimizer)

        def after(*_: Any) -> None:
            self.step()

        return inner_optimizer(optimizer).register_step_post_hook(after)

    def flush(self) -> ClipReport | None:
        """Wait for reports from a GPU, and return the last one."""
        return None if self._probed is None else self._newest(self._probed.reports(waits=True))

    def close(self) -> None:
        """Stop, and remove everything from the model."""
        self.flush()
        self._remove()
        self._is_closed = True

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a run to resume, as plain values for any checkpoint."""
        return {"steps": self.steps, "threshold": self.threshold}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from state_dict(), with its threshold; measurements since the last step are discarded."""
        threshold = float(state["threshold"])
        check_threshold(threshold)
        self.steps, self._threshold = int(state["steps"]), threshold
        self._restart()

    def __enter__(self) -> "QKClip":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin_trace(self) -> None:
        """Trace the next step."""
        self.flush()
        self._remove()
        trace = watched(self.model, Settings(None, training=True, may_be_empty=True))
        self._trace = trace, trace.__enter__()

    def _restart(self) -> None:
        """Begin as for a new model."""
        self._check.forget()
        self._incomplete = 0
        self._begin_trace()

    def _remove(self) -> None:
        """Remove trace and probes from the model."""
        (trace, probed), self._trace, self._probed = (self._trace, self._probed), None, None
        if trace is not None:
            trace[0].__exit__(_InterruptedError, _InterruptedError(), None)
        if probed is not None:
            probed.close()

    def _plan_again(self, probed: ProbedClip, unplanned: list[str]) -> None:
        """Trace the model again, because modules attended that did not in the trace, or more often than there."""
        if probed.replicas.has_other_ranks:  # they would not join the trace
            self._warn_once(
                "QK-Clip does not clip some attentions of this model: they did not run when it was traced, and "
                f"one rank cannot trace it again by itself: {', '.join(map(printable, unplanned))}."
            )
            return
        self._incomplete = 1 if self.steps - self._planned_at > LASTING else self._incomplete + 1
        if self._incomplete == MOST_INCOMPLETE:
            self._stay_traced("some of its attentions run, or run more often, at some steps only")
        self._begin_trace()

    def _clip_traced(self) -> ClipReport | None:
        assert self._trace is not None  # or probed
        (trace, seen), self._trace = self._trace, None
        try:
            trace.__exit__(None, None, None)
            layers: dict[str, Layer] = dict(seen.layers)
        except InputError:  # no forward ran, as on a rank without data
            layers = {}
        refuse_foreign_parameters(self.model)  # it may have been wrapped since
        replicas = replicas_of(self.model, self._group, layers)
        report = clip_layers(self.model, layers, self.threshold, replicas, self._frozen, check=self._check)
        self._probed = self._with_probes(seen, layers, replicas) if self._may_probe else None
        if self._probed is None:
            self._begin_trace()
        return self._newest([report] if report.heads or report.left else [])

    def _with_probes(self, seen: Seen, layers: dict[str, Layer], replicas: Replicas) -> ProbedClip | None:
        """Install probes if all ranks can; return None if the next step must be traced too."""
        placement = Placement(self.model, seen.plan) if seen.plan is not None and layers else None
        why = seen.obstacle if placement is None else why_not_probed(placement, layers)
        heads = {name: layer.heads for name, layer in layers.items()}
        answers = replicas.gathered((why, heads))
        why = next((theirs for theirs, _ in answers if theirs), "")
        if not all(theirs for _, theirs in answers) or (not why and any(theirs != heads for _, theirs in answers)):
            return None  # some rank ran no attention, or not all of them; try again at the next step
        if why or placement is None:
            self._stay_traced(why)
            return None
        self._planned_at = self.steps
        return ProbedClip(placement, layers, self.threshold, replicas, self._frozen, self._check)

    def _stay_traced(self, why: str) -> None:
        self._may_probe = False
        self._warn_once(
            "QK-Clip runs this model uncompiled at every step and traces it, because no probes can be placed in it: "
            f"{why}."
        )

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, NotInsideWarning, stacklevel=5)

    def _newest(self, reports: list[ClipReport]) -> ClipReport | None:
        if not reports:
            return None
        self._last = reports[-1]
        return self._last
