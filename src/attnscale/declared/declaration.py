"""What a model says about its attention: the scale, the soft-cap, a QK-norm.

A configuration says it outright, and a published architecture by its name. An attribute such as `self.scale` may be
a multiplier, a divisor or a fourth root given to both query and key, and it may be the very mistake that is looked
for; `Authority` keeps these apart.
"""

from dataclasses import dataclass
from enum import IntEnum

from torch import nn

from attnscale.declared.architectures import architecture_scale
from attnscale.declared.attributes import (
    attribute_by_layer,
    attribute_qk_norm,
    attribute_rule,
    attribute_scale,
    attribute_softcap,
)
from attnscale.declared.configuration import (
    config_at,
    configured_qk_norm,
    configured_scale,
    configured_softcap,
    rotary_factor,
)
from attnscale.declared.folded import folded_factor
from attnscale.declared.parents import Parents, attentions_among, parents_of


class Authority(IntEnum):
    """How much a declared scale weighs."""

    NONE = 0  # nothing is said
    ATTRIBUTE = 1  # a number that may mean the scale: it excuses what it matches, and accuses of nothing
    NAMED = 2  # a number that can only mean the scale: what is not applied was ignored, but it may itself be wrong
    CONFIGURED = 3  # a configuration, a published architecture or a rule: whatever it says is a choice


@dataclass(frozen=True)
class Declared:
    """None where nothing is said; `source` names the field, as in `config.query_pre_attn_scalar`."""

    scale: float | None = None
    scale_source: str = ""
    softcap: float | None = None
    softcap_source: str = ""
    qk_norm: bool = False
    qk_norm_source: str = ""
    scale_readings: tuple[float, ...] = ()  # every multiplier that the declaration can mean
    scale_authority: Authority = Authority.NONE
    folded: float | None = None  # what rescale_() or calibrate_() put into the weights, in place of a multiplier


def declared(model: nn.Module, path: str, head_dim: int) -> Declared:
    """Read the configuration nearest to the module at `path`, then the attributes of that module and those around it.

    >>> attention = nn.Module()
    >>> attention.scale = 8.0
    >>> said = declared(nn.ModuleDict({"attn": attention}), "attn", head_dim=64)
    >>> said.scale, said.scale_source
    (0.125, 'attn.scale')
    """
    parents = parents_of(model, path)
    config, around = config_at(parents), attentions_among(parents)
    scale, scale_source, readings, authority = _scale(config, parents, around, head_dim)
    softcap, softcap_source = configured_softcap(config, path) or attribute_softcap(around) or (None, "")
    qk_norm_source = configured_qk_norm(config, parents) or attribute_qk_norm(around) or ""
    return Declared(
        scale, scale_source, softcap, softcap_source, bool(qk_norm_source), qk_norm_source, readings, authority,
        folded_factor(parents),
    )  # fmt: skip


def _scale(
    config: object | None, parents: Parents, around: Parents, head_dim: int
) -> tuple[float | None, str, tuple[float, ...], Authority]:
    stretch, usual = rotary_factor(config), head_dim**-0.5
    stretched = (usual * stretch,) if stretch != 1.0 else ()
    said = (
        configured_scale(config, parents, head_dim)
        or architecture_scale(config, around, head_dim)
        or attribute_by_layer(around, parents, head_dim)
    )
    if said:
        scale, source = said
        return scale, source, (scale, scale * stretch), Authority.CONFIGURED
    chosen = attribute_rule(around, head_dim)
    if chosen:
        value, source = chosen
        return value, source, () if value is None else (value,), Authority.CONFIGURED
    found = attribute_scale(around, head_dim)
    if found is None:
        return None, "", stretched, Authority.NONE
    authority = Authority.NAMED if found.can_only_be_the_scale else Authority.ATTRIBUTE
    return found.scale, found.source, found.readings + stretched, authority
