"""Read the scale, the soft-cap and the QK-norm that a model declares.

A configuration and a published architecture define the scale. An attribute such as `self.scale` may be a multiplier, a
divisor, or a fourth root applied to both query and key, and it may itself be a mistake. `Authority` distinguishes
these cases.
"""

from dataclasses import dataclass
from enum import IntEnum

from torch import nn

from attnscale.declared import attributes, configuration
from attnscale.declared.configuration import QK_NORM_FLAGS, Parents, attentions_among, field, parents_of

FOLDED = "_attnscale_folded"  # kept when the module is copied or pickled; not in its state_dict


class Authority(IntEnum):
    """Reliability of a declared scale."""

    NONE = 0  # nothing is declared
    ATTRIBUTE = 1  # a number that may mean the scale: a match is accepted, a mismatch is no error
    NAMED = 2  # a number that can only mean the scale: a mismatch is an error, but a match may be wrong too
    CONFIGURED = 3  # a configuration, a published architecture or a rule: any value is a deliberate choice


@dataclass(frozen=True)
class Declared:
    """Values that a model declares, or None; a source is a field, such as `config.query_pre_attn_scalar`."""

    scale: float | None = None
    scale_source: str = ""
    softcap: float | None = None
    softcap_source: str = ""
    qk_norm: bool = False
    qk_norm_source: str = ""
    scale_readings: tuple[float, ...] = ()  # all multipliers that the declaration can mean
    scale_authority: Authority = Authority.NONE
    scale_of_one: str = ""  # name of a scale attribute with the value 1: forgotten, or chosen together with a norm
    stretch: float = 1.0  # factor on the scores for a stretched context, to be applied once
    stretch_source: str = ""
    stretch_confused: float = 1.0  # the factor with mscale in place of mscale_all_dim
    folded: float | None = None  # factor that rescale_() or calibrate_() folded into the weights


def declared(model: nn.Module, path: str, head_dim: int) -> Declared:
    """Read the nearest configuration of the module at `path`, then the attributes of the module and its parents.

    >>> attention = nn.Module()
    >>> attention.scale = 8.0
    >>> found = declared(nn.ModuleDict({"attn": attention}), "attn", head_dim=64)
    >>> found.scale, found.scale_source
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


def _qk_norm_source(configs: configuration.Configs, around: Parents) -> str:
    """Return the name of the flag that enables a QK-norm.

    A flag in the configuration of a published architecture is ignored: Llama 4 has one flag for the model, and
    normalises only the layers with rotary embedding.
    """
    is_published = bool(around) and type(around[0][1]).__module__.startswith("transformers.")
    holders = [*(() if is_published else configs), *around]
    flags = ((prefix, name) for prefix, holder in holders for name in QK_NORM_FLAGS if field(holder, name) is True)
    return next((f"{prefix}.{name}" if prefix else name for prefix, name in flags), "")


def note_folded(module: nn.Module, factor: float) -> None:
    """Record a factor on q·k that was folded into the weights of a module."""
    setattr(module, FOLDED, getattr(module, FOLDED, 1.0) * factor)


def _scale(
    configs: configuration.Configs, parents: Parents, around: Parents, head_dim: int
) -> tuple[float | None, str, tuple[float, ...], Authority]:
    usual, stretch = head_dim**-0.5, configuration.rotary_factor(configs)[0]
    stretched = (usual * stretch,) if stretch != 1.0 else ()
    published = configuration.architecture_scale(configs, around, head_dim)
    if configured := configuration.configured_scale(configs, parents, head_dim) or published:
        scale, source = configured
        return scale, source, (scale, scale * stretch), Authority.CONFIGURED
    if rule := attributes.attribute_rule(around, head_dim):
        value, source = rule
        return value, source, () if value is None else (value,), Authority.CONFIGURED
    if found := attributes.attribute_scale(around, head_dim):
        scale, source, readings, is_sure = found
        return scale, source, readings + stretched, Authority.NAMED if is_sure else Authority.ATTRIBUTE
    return None, "", stretched, Authority.NONE
