"""audit: run a model under watch, in both its modes, and diagnose its attention."""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from attnscale.diagnose.audit import Audit, diagnose, in_order, unchecked
from attnscale.diagnose.checks import SYMPTOMS, evaluation_findings, mode_findings
from attnscale.diagnose.trained import is_trained
from attnscale.errors import InputError
from attnscale.watching.layer import Layer
from attnscale.watching.watch import watched
from attnscale.watching.watcher import Settings

Loss: TypeAlias = Callable[[Any], Tensor]  # of what the model returns
ROWS_IN_OTHER_MODE = 1  # a head: enough to read how the scores are made


def audit(model: nn.Module, *args: Any, loss: Loss | None = None, **kwargs: Any) -> Audit:
    """Run the model, as model(*args, **kwargs), and diagnose every attention in it.

    The model runs twice: as it is, and in its other mode (training, evaluation), for what is wrong in that alone. With
    a `loss` of the model's output, a backward pass shows which sharp heads still learn; no gradient is left on any
    parameter.
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
    """Return the audit of model(*args, **kwargs), measuring so many rows a head, all where None.

    `unlike` says why the inputs are unlike what a trained model knows: its scores are then not judged.
    """
    copied = _copied(args, kwargs)  # before a cache among them grows
    with watched(model, Settings(rows, keep=True, may_be_empty=True)) as seen:
        if loss is None:
            with torch.no_grad():
                model(*args, **kwargs)
        else:
            _run_with_backward(model, args, kwargs, loss)
    layers = dict(seen.layers)
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
        known = {(finding.layer, finding.code) for finding in found.findings}
        unreadable = {finding.layer for finding in found.findings if finding.code == "non_finite"}
        findings += (
            replace(each, message=f"In {mode} mode: {each.message}")
            for each in diagnose(others, trained=found.trained).findings
            if (each.layer, each.code) not in known and each.layer not in unreadable and each.code not in SYMPTOMS
        )
    passes = 1 + (others is not None)
    return replace(found, findings=in_order(findings, layers), unchecked=not_checked, forward_passes=passes)


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
    """Copy the inputs for a second run; None where they cannot be copied."""
    try:
        nested = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.is_nested)
        cloned = {id(each): each.clone() for each in nested if each.layout is torch.strided}  # which deepcopy does not
        return copy.deepcopy((args, kwargs), cloned)
    except Exception:  # a part of another graph, a generator, an open file
        return None


def _in_other_mode(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Layer] | None:
    """Return the layers as they are in the mode that the model is not in; None where it does not run there."""
    try:
        settings = Settings(rows=ROWS_IN_OTHER_MODE, may_be_empty=True)
        with warnings.catch_warnings(), _other_mode(model), torch.no_grad(), watched(model, settings) as seen:
            warnings.simplefilter("ignore")  # the first run warned already
            model(*args, **kwargs)
    except Exception:  # whatever a model's own code raises there
        return None
    return seen.layers


@contextmanager
def _other_mode(model: nn.Module) -> Iterator[None]:
    """Switch training and evaluation; put flags, buffers and random numbers back."""
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
                    setattr(module, name, buffer)  # a forward may put another in its place
