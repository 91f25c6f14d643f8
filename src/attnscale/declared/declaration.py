"""Read what a model says about its attention: the scale, the soft-cap, a QK-norm.

A configuration says it outright, and a published architecture by its name. An attribute such as `self.scale` may be
a multiplier, a divisor or a fourth root given to both query and key, and it may be the very mistake that is looked
for; `Authority` tells these apart.
"""

from dataclasses import dataclass
from enum import IntEnum

from torch import nn

from attnscale.declared import attributes, configuration
from attnscale.declared.fields import QK_NORM_FLAGS, Parents, attentions_among, field, parents_of

FOLDED = "_attnscale_folded"  # travels with the module when it is copied or pickled, not in its state_dict


class Authority(IntEnum):
    """Weight of a declared scale as evidence."""

    NONE = 0  # nothing is declared
    ATTRIBUTE = 1  # a number that may mean the scale: it excuses what it matches, and accuses of nothing
    NAMED = 2  # a number that can only mean the scale: what is not applied was ignored, but it may itself be wrong
    CONFIGURED = 3  # a configuration, a published architecture or a rule: whatever it says is a choice


@dataclass(frozen=True)
class Declared:
    """Declarations of a model, None where it makes none; `source` names the field: `config.query_pre_attn_scalar`."""

    scale: float | None = None
    scale_source: str = ""
    softcap: float | None = None
    softcap_source: str = ""
    qk_norm: bool = False
    qk_norm_source: str = ""
    scale_readings: tuple[float, ...] = ()  # every multiplier that the declaration can mean
    scale_authority: Authority = Authority.NONE
    scale_of_one: str = ""  # an attribute of 1 that is the scale: left out, or chosen beside a norm
    stretch: float = 1.0  # by which the scores are to be multiplied, once, where a context was stretched
    stretch_source: str = ""
    stretch_confused: float = 1.0  # the factor of mscale, where mscale_all_dim is another
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
    configs, around = configuration.configs_at(parents), attentions_among(parents)
    scale, scale_source, readings, authority = _scale(configs, parents, around, head_dim)
    softcaps = configuration.configured_softcap(configs, path), attributes.attribute_softcap(around)
    softcap, softcap_source = softcaps[0] or softcaps[1] or (None, "")
    qk_norm_source = _qk_norm_source(configs, around)
    folded = getattr(parents[0][1], FOLDED, None) if parents else None
    stretch = configuration.rotary_factor(configs)
    return Declared(
        scale, scale_source, softcap, softcap_source, bool(qk_norm_source), qk_norm_source, readings, authority,
        attributes.scale_of_one(around), *stretch,
        folded if isinstance(folded, float) else None,
    )  # fmt: skip


def _qk_norm_source(configs: list[configuration.Config], around: Parents) -> str:
    """Return the flag that turns a QK-norm on; a norm that was built is watched, not read here.

    Published architectures are not held to it: Llama 4 normalises the layers with rotary embedding only, and its
    flag is the model's, not the layer's.
    """
    is_published = bool(around) and type(around[0][1]).__module__.startswith("transformers.")
    holders = [*(() if is_published else configs), *around]
    flags = ((prefix, name) for prefix, holder in holders for name in QK_NORM_FLAGS if field(holder, name) is True)
    return next((f"{prefix}.{name}" if prefix else name for prefix, name in flags), "")


def note_folded(module: nn.Module, factor: float) -> None:
    """Note that the queries and keys that a module makes were multiplied, together, by this factor."""
    setattr(module, FOLDED, getattr(module, FOLDED, 1.0) * factor)


def _scale(
    configs: list[configuration.Config], parents: Parents, around: Parents, head_dim: int
) -> tuple[float | None, str, tuple[float, ...], Authority]:
    usual, stretch = head_dim**-0.5, configuration.rotary_factor(configs)[0]
    stretched = (usual * stretch,) if stretch != 1.0 else ()
    configured = configuration.configured_scale(configs, parents, head_dim) or configuration.architecture_scale(
        configs, around, head_dim
    )
    if configured:
        scale, source = configured
        return scale, source, (scale, scale * stretch), Authority.CONFIGURED
    rule = attributes.attribute_rule(around, head_dim)
    if rule:
        value, source = rule
        return value, source, () if value is None else (value,), Authority.CONFIGURED
    found = attributes.attribute_scale(around, head_dim)
    if found is None:
        return None, "", stretched, Authority.NONE
    authority = Authority.NAMED if found.is_surely_the_scale else Authority.ATTRIBUTE
    return found.scale, found.source, found.readings + stretched, authority
