"""audit: run a model under watch, in both its modes, and say what is wrong with its attention."""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from attnscale.diagnose.audit import Audit, diagnose, in_order
from attnscale.diagnose.dropped import evaluation_findings
from attnscale.diagnose.finding import Finding
from attnscale.diagnose.maturity import is_trained
from attnscale.diagnose.modes import MODES, in_other_mode, mode_findings
from attnscale.diagnose.tokens import with_tokens
from attnscale.diagnose.unchecked import unchecked
from attnscale.errors import InputError
from attnscale.watching.layer import Layer
from attnscale.watching.settings import Settings
from attnscale.watching.watch import watched

Loss: TypeAlias = Callable[[Any], Tensor]  # of what the model returns
GLANCE = 1  # rows a head: enough to read how the scores are made
OF_SCORES = ("diluted", "saturated", "exploding", "qk_norm_freezes")


def audit(model: nn.Module, *args: Any, loss: Loss | None = None, **kwargs: Any) -> Audit:
    """Run the model, as model(*args, **kwargs), and diagnose every attention that was seen.

    It runs twice: as it is, where everything is measured, and in its other mode (training, evaluation), for what is
    wrong in that alone. With a `loss` of what the model returns, a backward pass tells which sharp heads still learn;
    no gradient is left on any parameter.
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
    """The audit of model(*args, **kwargs), by so many rows a head, all where None.

    `unlike` says why the inputs are nothing that a trained model knows: its scores are then not judged.
    """
    copied = _copied(args, kwargs)  # before a cache among them grows
    with watched(model, Settings(rows, keep=True, may_be_empty=True)) as seen:
        if loss is None:
            with torch.no_grad():
                model(*args, **kwargs)
        else:
            _run_with_backward(model, args, kwargs, loss)
    found = diagnose(with_tokens(seen.layers, args, kwargs), trained=is_trained(model))
    found = replace(found, unchecked=unchecked(seen.layers, seen.missed))
    if unlike and found.trained:
        kept = [each for each in found.findings if each.code not in OF_SCORES]
        found = replace(found, findings=kept, unjudged=unlike)
    if not any(module.training for module in model.modules()):
        found = replace(found, findings=in_order([*found.findings, *evaluation_findings(found.layers)], found.layers))
    others = None if copied is None else _in_other_mode(model, *copied)
    if others is None:
        unseen = f"The model could not be watched in {MODES[not model.training]} mode, so that was not looked at."
        return replace(found, unchecked=(*found.unchecked, unseen))
    more = (
        *mode_findings(found.layers, others, model.training),
        *(evaluation_findings(others) if model.training else ()),
        *_only_there(found, diagnose(others, trained=found.trained), MODES[not model.training]),
    )
    return replace(found, findings=in_order([*found.findings, *more], found.layers))


def _run_with_backward(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], loss: Loss) -> None:
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not learned:
        raise InputError("Expected a parameter that requires a gradient, and the model has none: leave the loss out.")
    with torch.enable_grad():
        value = loss(model(*args, **kwargs))
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise InputError(f"Expected loss to return one number as a tensor, got {_described(value)}.")
        torch.autograd.grad(value, learned, allow_unused=True)


def _described(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _copied(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]] | None:
    """The inputs once more, for a second run; None where they cannot be copied."""
    try:
        nested = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.is_nested)
        cloned = {id(each): each.clone() for each in nested if each.layout is torch.strided}  # which deepcopy does not
        return copy.deepcopy((args, kwargs), cloned)
    except Exception:  # a part of another graph, a generator, an open file
        return None


def _in_other_mode(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Layer] | None:
    """The layers as they are in the mode that the model is not in; None where it does not run there."""
    try:
        settings = Settings(rows=GLANCE, may_be_empty=True)
        with warnings.catch_warnings(), in_other_mode(model), torch.no_grad(), watched(model, settings) as seen:
            warnings.simplefilter("ignore")  # what there is to say was said of the other run
            model(*args, **kwargs)
    except Exception:  # whatever a model's own code raises there
        return None
    return seen.layers


def _only_there(here: Audit, there: Audit, mode: str) -> list[Finding]:
    """What is wrong in the other mode alone, but for what the scores are like, which was measured in this one."""
    known = {(finding.layer, finding.code) for finding in here.findings}
    new = [each for each in there.findings if (each.layer, each.code) not in known and each.code not in OF_SCORES]
    return [replace(finding, message=f"In {mode} mode: {finding.message}") for finding in new]
