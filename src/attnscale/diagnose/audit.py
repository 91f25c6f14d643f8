"""audit: watch one forward pass of a model, and say what is wrong with its attention."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from attnscale.diagnose.checks import all_findings
from attnscale.diagnose.finding import Finding, severity_rank, worst
from attnscale.diagnose.maturity import is_trained
from attnscale.diagnose.modes import MODES, in_other_mode, mode_findings
from attnscale.diagnose.verdict import Verdict, head_verdicts, layer_verdict, verdict_word
from attnscale.diagnose.what_if import WhatIf, what_if
from attnscale.errors import InputError, SettingError
from attnscale.watching import watch
from attnscale.watching.layer import Layer

Loss: TypeAlias = Callable[[Any], Tensor]  # of what the model returns
GLANCE = 1  # rows a head: enough to read how the scores are made
OF_SCORES = ("diluted", "saturated", "exploding")


@dataclass(frozen=True)
class Audit:
    """What was seen of a model's attention, and what is to be said about it."""

    layers: Mapping[str, Layer]
    trained: bool
    findings: list[Finding]  # the worst first, then by layer
    unchecked: tuple[str, ...] = ()  # a sentence each: what was not looked at, and why
    unjudged: str = ""  # why nothing is concluded from what the scores are like; empty where it is

    @property
    def worst(self) -> str | None:
        """The worst severity found; None where nothing was."""
        return worst(self.findings)

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """Layer by layer, the mean of its heads."""
        found = ((name, layer_verdict(layer)) for name, layer in self.layers.items())
        return {name: verdict for name, verdict in found if verdict is not None}

    @property
    def past_freezing(self) -> int:
        """Heads whose spread is beyond the freezing point, whatever of the gradient passes."""
        return sum(head.is_past_freezing for layer in self.layers.values() for head in head_verdicts(layer))

    def head_verdicts(self, layer: str) -> list[Verdict]:
        """Head by head, of one layer."""
        return head_verdicts(self._layer(layer))

    def what_if(self, layer: str, candidates: Mapping[str, Any] | None = None, rows: int | None = None) -> WhatIf:
        """What every rule would do to the query and key of the first sequence just seen.

        The scale and the soft-cap are the layer's own. A mask or bias that is not causal is not kept, nor the value:
        the key stands in for it.
        """
        seen = self._layer(layer)
        if seen.query is None or seen.key is None:
            raise SettingError(f"The query and key of {layer!r} were not kept; watch with keep=True to try others.")
        mask = _causal_mask(seen.query, seen.key) if seen.causal else None
        is_causal = seen.causal and mask is None
        scale = seen.scales.nan_to_num(seen.scale_expected).to(seen.query.device).view(-1, 1, 1)
        return what_if(
            seen.query,
            seen.key,
            candidates=candidates,
            attn_mask=mask,
            is_causal=is_causal,
            enable_gqa=seen.heads != seen.kv_heads,
            scale=scale,
            softcap=seen.softcap,
            rows=rows,
        )

    def to_dict(self) -> dict[str, Any]:
        """The audit as JSON takes it."""
        return {
            "trained": self.trained,
            "worst": self.worst,
            "findings": [finding.to_dict() for finding in self.findings],
            "unchecked": list(self.unchecked),
            "unjudged": self.unjudged,
            "layers": {
                name: _layer_dict(layer) | {"verdict": verdict_word(layer, self.findings)}
                for name, layer in self.layers.items()
            },
        }

    def __str__(self) -> str:
        if not self.findings:
            return f"Nothing found in {len(self.layers)} attention layers."
        return "\n".join(map(str, self.findings))

    def _layer(self, name: str) -> Layer:
        if name not in self.layers:
            raise SettingError(f"No layer {name!r} was seen. Expected one of: {', '.join(self.layers)}.")
        return self.layers[name]


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
    with watch(model, rows, keep=True) as seen:
        if loss is None:
            with torch.no_grad():
                model(*args, **kwargs)
        else:
            _run_with_backward(model, args, kwargs, loss)
    found = diagnose(seen.layers, trained=is_trained(model))
    if unlike and found.trained:
        kept = [each for each in found.findings if each.code not in OF_SCORES]
        found = replace(found, findings=kept, unjudged=unlike)
    others = _in_other_mode(model, args, kwargs)
    if others is None:
        unseen = f"The model could not be watched in {MODES[not model.training]} mode, so that was not looked at."
        return replace(found, unchecked=(*found.unchecked, unseen))
    more = (
        *mode_findings(found.layers, others, model.training),
        *_only_there(found, diagnose(others, trained=found.trained), MODES[not model.training]),
    )
    return replace(found, findings=_sorted([*found.findings, *more], found.layers))


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


def _in_other_mode(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Layer] | None:
    """The layers as they are in the mode that the model is not in; None where it does not run there."""
    try:
        with warnings.catch_warnings(), in_other_mode(model), torch.no_grad(), watch(model, rows=GLANCE) as seen:
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


def diagnose(layers: Mapping[str, Layer], *, trained: bool) -> Audit:
    """Diagnose layers that were watched before; `trained` as is_trained() says of their model."""
    return Audit(layers, trained, _sorted(all_findings(layers, trained), layers))


def _sorted(findings: Iterable[Finding], layers: Mapping[str, Layer]) -> list[Finding]:
    order = {name: position for position, name in enumerate(layers)}
    return sorted(findings, key=lambda found: (-severity_rank(found.severity), order.get(found.layer, len(order))))


def _causal_mask(query: Tensor, key: Tensor) -> Tensor | None:
    """Queries that continue a cache see all of it: their triangle ends with the keys. None where they are as many."""
    queries, keys = query.shape[-2], key.shape[-2]
    if queries == keys:
        return None
    return torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)


def _layer_dict(layer: Layer) -> dict[str, Any]:
    return {
        "kind": layer.kind,
        "heads": layer.heads,
        "kv_heads": layer.kv_heads,
        "head_dim": layer.head_dim,
        "causal": layer.causal,
        "softcap": layer.softcap,
        "calls": layer.calls,
        "scale_applied": layer.scale_applied,
        "scale_expected": layer.scale_expected,
        "stats": layer.stats.to_dict(),
    }
