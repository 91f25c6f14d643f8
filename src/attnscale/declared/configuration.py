"""A configuration object, as Hugging Face models carry it -> the scale, soft-cap and QK-norm it sets."""

import re
from collections.abc import Mapping

from torch import nn

from attnscale.declared.fields import field, field_names, number, qk_norm_flag
from attnscale.declared.parents import Parents, layer_index
from attnscale.rules.yarn import sharpening

# A field that sets the multiplier itself.
MULTIPLIERS = ("attention_multiplier", "softmax_scale", "attention_softmax_scale")
# What a step of a path names -> the fields that configure it: a vision tower is not configured by its text_config.
PARTS = {
    "vision": ("vision_config",),
    "visual": ("vision_config",),
    "image": ("vision_config", "image_config"),
    "audio": ("audio_config",),
    "text": ("text_config",),
    "language": ("text_config", "llm_config"),
    "encoder": ("encoder", "encoder_config"),
    "decoder": ("decoder", "decoder_config", "text_config"),
}
# Of the attention, not of the final logits or of a router: `attn_logit_softcapping`, `attention_logit_cap`, …
SOFTCAP = re.compile(r"^(conf_)?(attn|attention)_(logits?_)?(soft_?cap(ping)?|cap)$|^(attn|attention)_logits?_softcap")


def config_at(parents: Parents) -> object | None:
    """The configuration nearest to a module, or the part of it that the module's path names."""
    path = parents[0][0]
    for above, module in parents:
        config = getattr(module, "config", None)
        if config is None or isinstance(config, nn.Module):
            continue
        return _part(config, path[len(above) :])
    return None


def configured_scale(config: object | None, parents: Parents, head_dim: int) -> tuple[float, str] | None:
    """The multiplier a configuration sets, and the field that sets it."""
    scalar = number(config, "query_pre_attn_scalar")
    if scalar is not None and scalar > 0:
        return scalar**-0.5, "config.query_pre_attn_scalar"
    for holder, prefix in ((config, "config"), (field(config, "attn_config"), "config.attn_config")):
        for name in MULTIPLIERS:
            multiplier = number(holder, name)
            if multiplier is not None:
                return multiplier, f"{prefix}.{name}"
    return _switched_scale(config, parents, head_dim) or _key_scale(config, head_dim)


def configured_softcap(config: object | None, path: str) -> tuple[float, str] | None:
    """The soft-cap on the attention's scores; a conformer's is that of the audio tower alone."""
    for name in field_names(config):
        if not SOFTCAP.match(name) or (name.startswith("conf_") and "audio" not in path and "conformer" not in path):
            continue
        cap = number(config, name)
        if cap is not None and cap > 0:
            return cap, f"config.{name}"
    return None


def configured_qk_norm(config: object | None, parents: Parents) -> str | None:
    """The flag that turns a QK-norm on.

    Published architectures are not held to it: Llama 4 normalises the layers with rotary embedding only, and its
    flag is the model's, not the layer's.
    """
    if type(parents[0][1]).__module__.startswith("transformers."):
        return None
    flag = qk_norm_flag(config)
    return None if flag is None else f"config.{flag}"


def rotary_factor(config: object | None) -> float:
    """What a stretched rotary embedding multiplies the scores by: (0.1 m ln s + 1)², 1 where there is none.

    Models put it into the rotation, where it is no scale, or into the softmax's scale (DeepSeek), so both are right.
    """
    rope = field(config, "rope_parameters") or field(config, "rope_scaling")
    if not isinstance(rope, Mapping):
        return 1.0
    given, stretch = rope.get("attention_factor"), rope.get("factor")
    if isinstance(given, int | float) and given > 0:
        return float(given) ** 2
    kind = str(rope.get("rope_type", rope.get("type", "")))
    if "yarn" not in kind or not isinstance(stretch, int | float) or stretch <= 1:
        return 1.0
    mscale = rope.get("mscale_all_dim") or rope.get("mscale") or 1.0
    return sharpening(float(stretch), float(mscale))


def _switched_scale(config: object | None, parents: Parents, head_dim: int) -> tuple[float, str] | None:
    """GPT-2's two switches: no scale at all, and one that falls with depth."""
    weights = field(config, "scale_attn_weights")
    if not isinstance(weights, bool):
        return None
    scale, source = (head_dim**-0.5 if weights else 1.0), "config.scale_attn_weights"
    index = layer_index(parents)
    if field(config, "scale_attn_by_inverse_layer_idx") is True and index is not None:
        return scale / (index + 1), "config.scale_attn_by_inverse_layer_idx"
    return scale, source


def _key_scale(config: object | None, head_dim: int) -> tuple[float, str] | None:
    """Falcon-H1 multiplies its keys as they leave their projection."""
    multiplier = number(config, "key_multiplier")
    return None if multiplier is None else (multiplier * head_dim**-0.5, "config.key_multiplier")


def _part(config: object, path: str) -> object:
    """The sub-configuration that a step of the path names; the configuration itself where none does."""
    for step in path.split("."):
        for word, parts in PARTS.items():
            if word not in step:
                continue
            for name in parts:
                part = field(config, name)
                if part is not None and not isinstance(part, str | int | float | bool):
                    return part
    text = field(config, "text_config")
    has_several_parts = any(field(config, name) is not None for name in ("vision_config", "audio_config"))
    return config if text is None or has_several_parts else text
