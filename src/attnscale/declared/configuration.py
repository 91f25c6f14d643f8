"""A configuration object, as Hugging Face models carry it -> the scale, soft-cap and QK-norm it sets."""

import math
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from attnscale.rules.yarn import sharpening

Lineage = list[tuple[str, nn.Module]]  # a module and its parents, nearest first, with their paths

# A field that sets the multiplier itself.
MULTIPLIERS = ("attention_multiplier", "softmax_scale", "attention_softmax_scale")
# Its holder is named for a part of the model: a vision tower is not configured by its sibling's text_config.
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
QK_NORM_FLAGS = ("use_qk_norm", "qk_norm", "qk_layernorm", "qk_layer_norm", "use_qk_layernorm", "qk_layer_norms")


def config_at(lineage: Lineage) -> object | None:
    """The configuration nearest to a module, or the part of it that the module's path names."""
    path = lineage[0][0] if lineage else ""
    for holder, module in lineage:
        config = getattr(module, "config", None)
        if config is None or isinstance(config, nn.Module):
            continue
        return _part(config, path[len(holder) :])
    return None


def configured_scale(config: object | None, lineage: Lineage, head_dim: int) -> tuple[float, str] | None:
    """The multiplier a configuration sets, and the field that sets it."""
    scalar = _number(config, "query_pre_attn_scalar")
    if scalar is not None and scalar > 0:
        return scalar**-0.5, "config.query_pre_attn_scalar"
    for holder, prefix in ((config, "config"), (_get(config, "attn_config"), "config.attn_config")):
        for name in MULTIPLIERS:
            multiplier = _number(holder, name)
            if multiplier is not None:
                return multiplier, f"{prefix}.{name}"
    return _switched_scale(config, lineage, head_dim) or _key_scale(config, head_dim)


def configured_softcap(config: object | None, path: str) -> tuple[float, str] | None:
    """The soft-cap on the attention's scores; a conformer's is that of the audio tower alone."""
    for name in _names(config):
        if not SOFTCAP.match(name) or (name.startswith("conf_") and "audio" not in path and "conformer" not in path):
            continue
        cap = _number(config, name)
        if cap is not None and cap > 0:
            return cap, f"config.{name}"
    return None


def configured_qk_norm(config: object | None, lineage: Lineage) -> str | None:
    """The flag that turns a QK-norm on.

    Published architectures are not held to it: Llama 4 normalises the layers with rotary embedding only, and its
    flag is the model's, not the layer's.
    """
    if lineage and type(lineage[0][1]).__module__.startswith("transformers."):
        return None
    return next((f"config.{name}" for name in QK_NORM_FLAGS if _get(config, name) is True), None)


def rotary_factor(config: object | None) -> float:
    """What a stretched rotary embedding multiplies the scores by: (0.1 m ln s + 1)², 1 where there is none.

    Models put it into the rotation, where it is no scale, or into the softmax's scale (DeepSeek), so both are right.
    """
    rope = _get(config, "rope_parameters") or _get(config, "rope_scaling")
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


def layer_index(lineage: Lineage) -> int | None:
    """Which layer of the stack a module belongs to: its own `layer_idx`, else the last number of its path."""
    for _, module in lineage:
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int):
            return index
    numbers = re.findall(r"(?<![^.])\d+(?![^.])", lineage[0][0]) if lineage else []
    return int(numbers[-1]) if numbers else None


def _switched_scale(config: object | None, lineage: Lineage, head_dim: int) -> tuple[float, str] | None:
    """GPT-2's two switches: no scale at all, and one that falls with depth."""
    weights = _get(config, "scale_attn_weights")
    if not isinstance(weights, bool):
        return None
    scale, source = (head_dim**-0.5 if weights else 1.0), "config.scale_attn_weights"
    index = layer_index(lineage)
    if _get(config, "scale_attn_by_inverse_layer_idx") is True and index is not None:
        return scale / (index + 1), "config.scale_attn_by_inverse_layer_idx"
    return scale, source


def _key_scale(config: object | None, head_dim: int) -> tuple[float, str] | None:
    """Falcon-H1 multiplies its keys as they leave their projection."""
    multiplier = _number(config, "key_multiplier")
    return None if multiplier is None else (multiplier * head_dim**-0.5, "config.key_multiplier")


def _part(config: object, path: str) -> object:
    """The sub-configuration that a step of the path names; the configuration itself where none does."""
    for step in path.split("."):
        for word, names in PARTS.items():
            if word not in step:
                continue
            for name in names:
                part = _get(config, name)
                if part is not None and not isinstance(part, str | int | float | bool):
                    return part
    text = _get(config, "text_config")
    has_several_parts = any(_get(config, name) is not None for name in ("vision_config", "audio_config"))
    return config if text is None or has_several_parts else text


def _number(config: object | None, name: str) -> float | None:
    value = _get(config, name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None


def _get(config: object | None, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _names(config: object | None) -> list[str]:
    if isinstance(config, Mapping):
        return sorted(map(str, config))
    fields = getattr(config, "__dataclass_fields__", {})
    return sorted({*getattr(config, "__dict__", {}), *fields})
