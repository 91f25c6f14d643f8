"""Seen: the attention layers of a watched model, with their measurements."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from attnscale.declared import Declared
from attnscale.measure.statistics import Place, in_place
from attnscale.measure.stats import merged_when_read
from attnscale.plain import printable, readable
from attnscale.results import PlottedResult
from attnscale.watching.layer import Layer, LayerCall, MeasuredCall, merged
from attnscale.watching.missed import MissedAttention
from attnscale.watching.module_stack import Line

if TYPE_CHECKING:
    from attnscale.watching.plan import Plan

COLUMNS = ("layer", "kind", "heads", "d_k", "scale", "expected")  # followed by the statistics of Place.SEEN
DEEPEST = 128  # runs of one module per forward; with more, the runs are time steps, not depths


class Layers(dict[str, Layer]):
    """Layers by module path; a parent path also works if it contains exactly one attention."""

    def __missing__(self, path: str) -> Layer:
        inside = [name for name in self if name.startswith((f"{path}.", f"{path}["))]
        if len(inside) == 1:
            return self[inside[0]]
        options = ", ".join(inside or self)
        raise KeyError(f"{path}: expected the path of one attention, one of: {options}")


class Seen(PlottedResult):
    """The attentions that ran in a watched model, with their measurements."""

    def __init__(
        self,
        display_name: Callable[[str], str],
        declare: Callable[[str, int], Declared],
        unused_norms: Callable[[str], tuple[str, ...]],
    ) -> None:
        self._display_name = display_name
        self._declare = declare
        self.unused_norms = unused_norms
        self.misplaced_norms: Callable[[str], tuple[str, ...]] = lambda path: ()
        self.without_gradients = False  # some calls in training mode ran with gradients off
        self.is_compiled = False  # some attention belongs to compiled code and was traced uncompiled
        self.is_probed = False  # measured by probes in the model's own run, not by a trace
        self.fallbacks: Mapping[str, str] = {}  # modules without probes, which ran uncompiled, with the reason
        self.plan: Plan | None = None  # where to place probes at the next step
        self.obstacle = "some of its operations could not be followed"  # why there is no plan
        self.missed = MissedAttention()  # filled at the end of watching
        self.unfollowed: list[str] = []  # modules that seem to attend in an unrecognised way
        self._sites: dict[tuple[object, ...], list[LayerCall]] = {}
        self._built: tuple[int, Layers] = (0, Layers())

    def note(self, path: str, line: Line, call: LayerCall, depth: int = 0) -> None:
        """Record one call; `depth` counts earlier runs of its module in the same forward.

        Calls are grouped by module, line and parameter row, because a line that attends in a loop over heads or layers
        uses other parameter rows in each iteration.
        """
        site = (path, line, call.heads, call.head_dim, call.first_row)
        self._sites.setdefault(site, []).append(call)
        call.depth = depth

    @property
    def calls(self) -> int:
        """Number of recorded attention calls."""
        return sum(len(calls) for calls in self._sites.values())

    @property
    def modules(self) -> list[str]:
        """Display names of the modules that attend, found without building layers."""
        return [self._display_name(str(path)) for (path, *_), calls in self._sites.items() if calls]

    @property
    def layers(self) -> Layers:
        """Attention layers by module path, in order of execution; a second one in a module is named `path#2`.

        A module that runs several times per forward, as in ALBERT, is split by depth: `path[0]`, `path[1]`, … It stays
        one layer if its runs are a loop over time: its keys grow by a constant number per run, or it runs more than
        128 times.
        """
        if self._built[0] != self.calls:
            by_layer = self.calls_by_layer().items()
            layers = {name: self.layer_of(name, path, calls) for name, (path, calls) in by_layer}
            self._built = (self.calls, Layers(layers))
        return self._built[1]

    def facts(self) -> "dict[str, LayerFacts]":
        """Return facts about each layer that a log record stores besides statistics."""
        return {
            name: LayerFacts(calls[-1].heads, calls[-1].softcap, path in self.fallbacks, calls[-1].rescaled)
            for name, (path, calls) in self.calls_by_layer().items()
        }

    def calls_by_layer(self) -> dict[str, tuple[str, list[LayerCall]]]:
        """Return the module path and calls of each layer, by layer name."""
        found: dict[str, tuple[str, list[LayerCall]]] = {}
        for (site, *_), calls in filter(itemgetter(1), self._sites.items()):
            path, number = str(site), 2
            name = self._display_name(path)
            while name in found or f"{name}[0]" in found:
                name, number = f"{self._display_name(path)}#{number}", number + 1
            found |= {name + suffix: (path, some) for suffix, some in by_depth(calls).items()}
        return found

    def layer_of(self, name: str, path: str, noted: Sequence[LayerCall]) -> Layer:
        """Build the layer of this name and module path from its calls."""
        calls = [call.seen for call in noted]
        last, longest = calls[-1], max(calls, key=lambda call: (call.query_len, call.key_len))
        return Layer(
            name=name,
            kind=last.kind,
            heads=last.heads,
            kv_heads=last.kv_heads,
            head_dim=last.head_dim,
            model_dims=last.model_dims,
            query_len=longest.query_len,
            key_len=max(call.key_len for call in calls),
            causal=longest.causal,
            softcap=last.softcap,
            dtype=last.dtype,
            stats=merged_when_read([call.stats for call in calls]),
            scales=_over_rows(calls, lambda call: call.scales),
            query_norm=_root_over_rows(calls, lambda call: call.query_norm),
            key_norm=_root_over_rows(calls, lambda call: call.key_norm),
            declared=self._declare(path, last.head_dim),
            wiring=replace(
                merged([call.wiring_of_all for call in calls]),
                unused_norms=self.unused_norms(path),
                misplaced_norms=self.misplaced_norms(path),
            ),
            reading=merged([call.reading for call in calls]),
            softmaxes=tuple(call.softmax for call in calls),
            calls=len(calls),
            queries=sum(call.rows for call in calls),
            left_out=tuple(call.padding for call in calls if call.padding is not None),
            query=None if longest.kept is None else longest.kept.query[:1],
            key=None if longest.kept is None else longest.kept.key[:1],
            kept=tuple(call.kept for call in calls if call.kept is not None),
            origins=tuple(call.origins_of_all for call in calls),
            sinks=longest.sinks,
            cosine=_cosine_over_rows(calls),
            highest_bias=max(call.highest_bias for call in calls),
            is_fallback=path in self.fallbacks,
            gradients=tuple(call.gradients for call in calls if call.gradients is not None),
            measured=tuple(call.stats for call in calls),
        )

    def __str__(self) -> str:
        return table(self.layers.values())

    def __dir__(self) -> list[str]:
        return ["calls", "layers", "plot", "to_pandas"]  # other attributes are internal


class LayerFacts(NamedTuple):
    """Facts about a layer that a log record stores besides statistics."""

    heads: int
    softcap: float | None
    is_fallback: bool
    rescaled: tuple[str, ...]  # sides normalised, or multiplied by a temperature, after their projection


def table(layers: Collection[Layer], words: Mapping[str, str] | None = None) -> str:
    """Return a table with one line per layer and a note about padding; `words` are verdicts by layer name."""
    rows = [(*COLUMNS, *(entry.one_line for entry in in_place(Place.SEEN))), *map(_cells, layers)]
    if words is not None:
        rows = [
            (*row, word) for row, word in zip(rows, ["verdict", *(words[layer.name] for layer in layers)], strict=True)
        ]
    columns = rows[0]
    widths = [max(len(row[column]) for row in rows) for column in range(len(columns))]
    lines = (
        "  ".join(
            cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join([*(line.rstrip() for line in lines), *padding_note(layers)])


def by_depth(calls: list[LayerCall]) -> dict[str, list[LayerCall]]:
    """Group calls by depth under the suffix of the layer's name; one group with no suffix if all are one layer."""
    depths: dict[int, list[LayerCall]] = {}
    for call in calls:
        depths.setdefault(call.depth, []).append(call)
    keys = [max(call.key_len for call in depths[depth]) for depth in sorted(depths)]
    if len(depths) == 1 or len(depths) > DEEPEST or _is_over_time(keys):
        return {"": calls}
    return {f"[{depth}]": some for depth, some in sorted(depths.items())}


def padding_note(layers: Collection[Layer]) -> list[str]:
    """Return a sentence with the number of padding queries that statistics exclude; empty without padding."""
    padded = [layer for layer in layers if layer.padding]
    if not padded:
        return []
    most = max(padded, key=lambda layer: layer.padding)
    where = "every layer" if len(padded) == len(layers) else f"{len(padded)} of {len(layers)} layers"
    several = len({(layer.padding, layer.queries) for layer in padded}) > 1
    return [f"Left out as padding: {'up to ' if several else ''}{most.padding} of {most.queries} queries in {where}."]


def _is_over_time(keys: list[int]) -> bool:
    """Return True if the number of keys grows by a constant in each run."""
    steps = {after - before for before, after in pairwise(keys)}
    return len(keys) > 2 and len(steps) == 1 and steps.pop() > 0


def _over_rows(calls: list[MeasuredCall], values: Callable[[MeasuredCall], Tensor]) -> Tensor:
    """Return the mean of a value per head over the rows of all calls, without padding."""
    known = [call for call in calls if call.rows] or calls[:1]
    found = [values(call) for call in known]
    if len(known) == 1:
        return found[0]
    rows = torch.stack([_rows_without_padding(call, found[0].device) for call in known])
    return (torch.stack(found) * (rows / rows.sum()).unsqueeze(-1)).sum(0)


def _root_over_rows(calls: list[MeasuredCall], values: Callable[[MeasuredCall], Tensor]) -> Tensor:
    return values(calls[0]) if len(calls) == 1 else _over_rows(calls, lambda call: values(call).square()).sqrt()


def _cosine_over_rows(calls: list[MeasuredCall]) -> Tensor | None:
    """Return None unless every call has a cosine; without biases it follows from the spread of the scores."""
    known = {id(call): call.cosine for call in calls if call.cosine is not None}
    return _root_over_rows(calls, lambda call: known[id(call)]) if len(known) == len(calls) else None


def _rows_without_padding(call: MeasuredCall, device: torch.device) -> Tensor:
    """Return the rows of a call without padding; padding on another device is ignored, to avoid a synchronisation."""
    rows = torch.full((), call.rows, dtype=torch.float64, device=device)  # a copy would synchronise
    return rows if call.padding is None or call.padding.device != device else rows - call.padding.sum()


def _cells(layer: Layer) -> tuple[str, ...]:
    heads = str(layer.heads) if layer.kv_heads == layer.heads else f"{layer.heads}/{layer.kv_heads}"
    statistics = [
        (entry.factor * entry.whole(layer.stats), entry.factor * entry.error(layer.stats))
        for entry in in_place(Place.SEEN)
    ]
    numbers = ((layer.scale_applied, math.nan), (layer.scale_expected, math.nan), *statistics)
    shown = ("–" if math.isnan(number) else f"{readable(number)}{_give_or_take(error)}" for number, error in numbers)
    return printable(layer.name), printable(layer.kind), heads, str(layer.head_dim), *shown


def _give_or_take(error: float) -> str:
    return "" if math.isnan(error) else "±?" if math.isinf(error) else f"±{error:.1g}"
