"""audit: run a model in training and evaluation mode, and diagnose its attention."""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from attnscale.diagnose.checks import SYMPTOMS, all_findings, evaluation_findings, mode_findings
from attnscale.diagnose.finding import Finding, severity_rank, worst
from attnscale.diagnose.trained import is_trained
from attnscale.diagnose.verdict import head_verdicts, verdict_text, verdict_word
from attnscale.diagnose.what_if import WhatIf, what_if_calls
from attnscale.errors import InputError, SettingError
from attnscale.plain import counted, printable
from attnscale.results import PlottedResult
from attnscale.watching.layer import Layer
from attnscale.watching.missed import MissedAttention
from attnscale.watching.seen import table
from attnscale.watching.watch import watched
from attnscale.watching.watcher import Settings

NOTHING_READ = "No attention could be read, so nothing was judged."
Loss: TypeAlias = Callable[[Any], Tensor]  # (model output) -> loss
ROWS_IN_OTHER_MODE = 1  # one row per head shows how the scores are computed


@dataclass(frozen=True, repr=False)
class Audit(PlottedResult):
    """The attention layers of a model, and the findings about them."""

    layers: Mapping[str, Layer]
    trained: bool
    findings: list[Finding]  # sorted by severity (worst first), then by layer
    unchecked: tuple[str, ...] = ()  # sentences that list what was not checked, and why
    unjudged: str = ""  # reason why the scores were not judged; empty if they were
    forward_passes: int = 1  # forward passes that were watched; the second runs in the other mode

    @property
    def worst(self) -> str | None:
        """Worst severity among the findings; None if there are none."""
        return worst(self.findings)

    @property
    def words(self) -> dict[str, str]:
        """One-word verdict of each layer, as in JSON, tables and reports."""
        return {name: verdict_word(layer, self.findings) for name, layer in self.layers.items()}

    @property
    def past_critical_spread(self) -> int:
        """Number of heads with a spread above the critical spread."""
        return sum(head.is_past_critical_spread for layer in self.layers.values() for head in head_verdicts(layer))

    def what_if(self, layer: str, candidates: Mapping[str, Any] | None = None, rows: int | None = None) -> WhatIf:
        """Compute the effect of every rule on the layer, over all of its calls and sequences.

        Soft-cap, bias, masks and values are those of the layer; the row `current` has the measured numbers. The change
        of the output is NaN if the values could not be read.
        """
        target = self.layers.get(layer)
        if target is None:
            raise SettingError(f"No layer {layer!r} was seen. Expected one of: {', '.join(self.layers)}.")
        if not target.kept or len(target.kept) < target.calls:
            raise SettingError(f"The queries and keys of {layer!r} were not kept; watch with keep=True to try others.")
        return what_if_calls(target.kept, candidates, rows, target.stats)

    def to_dict(self) -> dict[str, Any]:
        """Return the audit as plain values for JSON."""
        words = self.words
        return {
            "trained": self.trained,
            "worst": self.worst,
            "findings": [finding.to_dict() for finding in self.findings],
            "unchecked": list(self.unchecked),
            "unjudged": self.unjudged,
            "forward_passes": self.forward_passes,
            "layers": {name: _layer_dict(layer) | {"verdict": words[name]} for name, layer in self.layers.items()},
        }

    def __str__(self) -> str:
        lines, where = list(map(str, self.findings)), counted(len(self.layers), "attention layer")
        if not self.layers:
            lines = lines or [NOTHING_READ]
        elif self.unchecked:
            lines = lines or [f"No findings in {where}, but not everything could be checked."]
        else:
            lines = lines or [f"Nothing found in {where}."]
        if self.layers:
            words = {name: verdict_text(layer, self.findings, self.trained) for name, layer in self.layers.items()}
            lines = [table(self.layers.values(), words), "", *lines]
        return "\n".join([*lines, *filter(None, [self.unjudged]), *map(printable, self.unchecked)])


def diagnose(layers: Mapping[str, Layer], *, trained: bool) -> Audit:
    """Diagnose layers that were already watched; pass `trained=is_trained(model)`."""
    return Audit(layers, trained, in_order(all_findings(layers, trained), layers))


def in_order(findings: Iterable[Finding], layers: Mapping[str, Layer]) -> list[Finding]:
    """Sort findings by severity (worst first), then by layer."""
    order = {name: position for position, name in enumerate(layers)}
    return sorted(findings, key=lambda found: (-severity_rank(found.severity), order.get(found.layer, len(order))))


def unchecked(layers: Mapping[str, Layer], missed: MissedAttention) -> tuple[str, ...]:
    """Return a sentence for each thing that was not judged: attention outside layers, scales, biases and weights."""
    reasons: dict[str, list[str]] = {}
    for name, layer in layers.items():
        for sentence in _not_judged(layer):
            reasons.setdefault(sentence, []).append(name)
    return (*missed.sentences, *(why.format(", ".join(names)) for why, names in reasons.items()))


def _not_judged(layer: Layer) -> Iterator[str]:
    """Yield sentences with a placeholder for the names of layers."""
    if layer.reading.unread:
        yield f"The scale of {{}} could not be read: {layer.reading.unread}."
    elif layer.declared.folded is not None:
        yield f"The scale of {{}} was not judged: {layer.declared.folded:.4g} of it was folded into its weights."
    elif layer.reading.learned_factor:
        yield "The scale of {} is learned, so its value was not judged."
    if layer.wiring.biased:
        yield "A bias is added to the scores of {}, and was not judged."
    if any(each.is_obscure for each in layer.softmaxes):
        yield "It was not checked that the weights of {} sum to one: they are mixed with others."


def _layer_dict(layer: Layer) -> dict[str, Any]:
    names = (
        "kind", "heads", "kv_heads", "head_dim", "causal", "softcap", "calls", "queries", "padding", "scale_applied",
        "scale_expected", "scale_source",
    )  # fmt: skip
    return {name: getattr(layer, name) for name in names} | {"stats": layer.stats.to_dict()}


def audit(model: nn.Module, *args: Any, loss: Loss | None = None, **kwargs: Any) -> Audit:
    """Run the model, as model(*args, **kwargs), and diagnose every attention in it.

    The model runs twice: in its current mode, and in the other one (training or evaluation) to find errors that occur
    only there. With a `loss` of the model's output, a backward pass shows which sharp heads still learn; the gradients
    of the parameters are not changed.
    """
    return audited(model, args, kwargs, loss=loss)


def audited(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    rows: int | None = None,
    loss: Loss | None = None,
    unlike: str = "",
) -> Audit:
    """Return the audit of model(*args, **kwargs), with `rows` measured rows per head (None: all).

    `unlike` is the reason why the inputs differ from the training data: the scores are then not judged.
    """
    copied = _copied(args, kwargs)  # before the run, because a cache in the inputs grows
    with watched(model, Settings(rows, keep=True, may_be_empty=True)) as seen:
        if loss is None:
            with torch.no_grad():
                model(*args, **kwargs)
        else:
            _run_with_backward(model, args, kwargs, loss)
    layers = {name: replace(layer, tokens=_token_ids(layer, (*args, kwargs))) for name, layer in seen.layers.items()}
    found = diagnose(layers, trained=is_trained(model))
    findings, not_checked = found.findings, unchecked(layers, seen.missed)
    if unlike and found.trained:
        findings = [each for each in findings if each.code not in SYMPTOMS]
        found = replace(found, unjudged=unlike)
    if not any(module.training for module in model.modules()):
        findings += evaluation_findings(layers)
    others = None if copied is None else _in_other_mode(model, *copied)
    mode = "evaluation" if model.training else "training"
    if others is None:
        not_checked += (f"The model could not be watched in {mode} mode, so that was not checked.",)
    else:
        findings = [*findings, *mode_findings(layers, others, model.training)]
        findings += evaluation_findings(others) if model.training else ()
        reported = {(finding.layer, finding.code) for finding in found.findings}
        unreadable = {finding.layer for finding in found.findings if finding.code == "non_finite"}
        findings += (
            replace(each, message=f"In {mode} mode: {each.message}")
            for each in diagnose(others, trained=found.trained).findings
            if (each.layer, each.code) not in reported and each.layer not in unreadable and each.code not in SYMPTOMS
        )
    passes = 1 + (others is not None)
    return replace(found, findings=in_order(findings, layers), unchecked=not_checked, forward_passes=passes)


def _token_ids(layer: Layer, inputs: Any) -> Tensor | None:
    """Return the token ids of a layer's keys in the first sequence; None unless exactly one input can hold them.

    Masks and token types have two values, and positions repeat no value.
    """
    integers = (each for each in tensors_in(inputs) if each.dtype in (torch.int64, torch.int32) and not each.is_meta)
    found = [each[0] if each.dim() == 2 else each for each in integers if each.dim() in (1, 2) and len(each)]
    ids = [each for each in found if len(each) == layer.key_len and 2 < len(each.unique()) < len(each)]
    return ids[0] if ids and all(torch.equal(each, ids[0]) for each in ids) else None


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested mappings, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(each)


def _run_with_backward(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], loss: Loss) -> None:
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not learned:
        raise InputError("Expected a parameter that requires a gradient, and the model has none: leave the loss out.")
    with torch.enable_grad():
        value = loss(model(*args, **kwargs))
        if not isinstance(value, Tensor) or value.numel() != 1:
            found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise InputError(f"Expected loss to return one number as a tensor, got {found}.")
        torch.autograd.grad(value, learned, allow_unused=True)


def _copied(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]] | None:
    """Copy the inputs for a second run; return None if they cannot be copied."""
    try:
        nested = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.is_nested)
        cloned = {id(each): each.clone() for each in nested if each.layout is torch.strided}  # deepcopy shares them
        return copy.deepcopy((args, kwargs), cloned)
    except Exception:  # such as a non-leaf tensor, a generator or an open file
        return None


def _in_other_mode(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Layer] | None:
    """Return the layers in the other mode; None if the model does not run in it."""
    try:
        settings = Settings(rows=ROWS_IN_OTHER_MODE, may_be_empty=True)
        with warnings.catch_warnings(), _other_mode(model), torch.no_grad(), watched(model, settings) as seen:
            warnings.simplefilter("ignore")  # the first run warned already
            model(*args, **kwargs)
    except Exception:  # the model's own code may raise anything
        return None
    return seen.layers


@contextmanager
def _other_mode(model: nn.Module) -> Iterator[None]:
    """Switch between training and evaluation; restore flags, buffers and random state on exit."""
    flags = {module: module.training for module in model.modules()}
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if not buffer.is_meta
    ]
    with torch.random.fork_rng():
        model.train(not model.training)
        try:
            yield
        finally:
            for module, flag in flags.items():
                module.training = flag
            with torch.no_grad():
                for module, name, buffer, before in buffers:
                    buffer.copy_(before)
                    setattr(module, name, buffer)  # a forward may have replaced the buffer
