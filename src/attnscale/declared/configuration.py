"""Read the scale, the soft-cap and the QK-norm from a configuration, or from the published architecture."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor, nn

from attnscale.module_paths import modules_by_path
from attnscale.rules.yarn import sharpening

Configs = list[tuple[str, object]]  # names of attributes, and the configurations that they hold
Parents = list[tuple[str, nn.Module]]  # paths and modules: a module, its parent, …, the model
# Fields of a configuration or a module that enable a QK-norm.
QK_NORM_FLAGS = (
    "use_qk_norm", "qk_norm", "qk_layernorm", "qk_layer_norm", "use_qk_layernorm", "qk_layer_norms", "normalize_qk",
    "qk_normalization",
)  # fmt: skip
# Fields that set the multiplier, and fields that set x for a multiplier of 1/√x.
MULTIPLIERS = ("attention_multiplier", "softmax_scale", "attention_softmax_scale", "sm_scale", "qk_scale")
UNDER_ROOT = ("query_pre_attn_scalar", "attention_scores_scalar")
ROTARY = ("rope_parameters", "rope_scaling")
LATENTS = ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank")  # widths of multi-head latent attention
BY_WEIGHTS, BY_LAYER = "scale_attn_weights", "scale_attn_by_inverse_layer_idx"  # GPT-2's two flags
KNOWN_FIELDS = (
    *MULTIPLIERS, *UNDER_ROOT, *QK_NORM_FLAGS, "attn_config", BY_WEIGHTS, BY_LAYER, "key_multiplier", *ROTARY,
    *LATENTS,
)  # fmt: skip
# A soft-cap of the attention, not of the final logits or a router: `attn_logit_softcapping`, `attention_logit_cap`, …
SOFTCAP = re.compile(r"^(conf_)?(attn|attention)_(logits?_)?(soft_?cap(ping)?|cap)$|^(attn|attention)_logits?_softcap")
MODULE_FIELDS = frozenset(vars(nn.Module()))

# Published architectures with a scale other than 1/√d_k that is not in their configuration, from their code in
# transformers 5.22; tests/declared/test_architectures.py builds each and compares the applied scale. They are
# identified by the `model_type` of their configuration, never by their weights.
# Folded into the initialisation of the query projection (T5 and its descendants), omitted (GPT-Neo, Dia), or left to
# the gains of a QK-norm (Gemma 3n and 4):
UNSCALED = {
    "t5", "mt5", "umt5", "longt5", "switch_transformers", "udop", "pop2piano",
    "pix2struct_text_model", "pix2struct_vision_model", "gpt_neo", "dia_encoder", "dia_decoder",
    "gemma3n_text", "gemma4_text",
}  # fmt: skip
DISENTANGLED = {"deberta", "deberta-v2", "sew-d"}  # sum of up to three products; 1/√(3 d_k) for all three
BY_DIM = {"inkling_text"}  # normalised queries and keys, divided by d_k
BY_WIDTH = {"cvt"}  # 1/√width of the stage: the released weights were trained with it


def configs_at(parents: Parents) -> Configs:
    """Return the configurations of the nearest module that has any.

    The attribute `config` always counts. Another attribute counts if it is an object with one of the KNOWN_FIELDS.
    """
    return next((found for _, module in parents if (found := list(_configs_in(module)))), [])


def configured_scale(configs: Configs, parents: Parents, head_dim: int) -> tuple[float, str] | None:
    """Return the multiplier set by a configuration, and the name of the field."""
    for name, config in configs:
        for prefix, holder in ((name, config), (f"{name}.attn_config", field(config, "attn_config"))):
            for scalar in UNDER_ROOT:
                if (value := positive(holder, scalar)) is not None:
                    return value**-0.5, f"{prefix}.{scalar}"
            for multiplier in MULTIPLIERS:
                if (value := number(holder, multiplier)) is not None:
                    return value, f"{prefix}.{multiplier}"
        weights, by_layer, index = field(config, BY_WEIGHTS), field(config, BY_LAYER) is True, layer_index(parents)
        if by_layer and index is not None:
            return (1.0 if weights is False else head_dim**-0.5) / (index + 1), f"{name}.{BY_LAYER}"
        if isinstance(weights, bool):
            return (head_dim**-0.5 if weights else 1.0), f"{name}.{BY_WEIGHTS}"
        plain, rotary, latents = (number(config, each) or 0.0 for each in LATENTS)
        if plain and rotary and head_dim in (plain + rotary, latents + rotary, latents):
            return (plain + rotary) ** -0.5, f"{name}.{LATENTS[0]} + {LATENTS[1]}"
        if (value := number(config, "key_multiplier")) is not None:  # Falcon-H1 multiplies its keys
            return value * head_dim**-0.5, f"{name}.key_multiplier"
    return None


def configured_softcap(configs: Configs, path: str) -> tuple[float, str] | None:
    """Return the soft-cap of the scores and its field; a conformer's soft-cap counts only in an audio tower."""
    is_audio = "audio" in path or "conformer" in path
    for holder, config in configs:
        for name in filter(SOFTCAP.match, field_names(config)):
            cap = positive(config, name)
            if cap is not None and (is_audio or not name.startswith("conf_")):
                return cap, f"{holder}.{name}"
    return None


def rotary_factor(configs: Configs) -> tuple[float, str, float]:
    """Return the factor of a stretched rotary embedding on the scores, the name of its field, and a wrong factor.

    The factor is (0.1 m ln s + 1)², or 1 without stretching. Models apply it in the rotation, where it is no scale, or
    in the scale of the softmax (DeepSeek); both are right. The wrong factor uses `mscale` for m although
    `mscale_all_dim` is the right field; if both fields agree, it equals the factor.
    """
    fields = ((f"{name}.{each}", field(config, each)) for name, config in configs for each in ROTARY)
    source, rope = next(((source, each) for source, each in fields if isinstance(each, Mapping) and each), ("", {}))
    factor, stretch = rope.get("attention_factor"), rope.get("factor")
    kind = str(rope.get("rope_type", rope.get("type", "")))
    if ("yarn" in kind or "longrope" in kind) and isinstance(factor, int | float) and factor > 0:
        return float(factor) ** 2, source, float(factor) ** 2
    if "yarn" in kind and isinstance(stretch, int | float) and stretch > 1:
        both = float(rope.get("mscale_all_dim") or rope.get("mscale") or 1.0)
        return sharpening(float(stretch), both), source, sharpening(float(stretch), float(rope.get("mscale") or both))
    return 1.0, source, 1.0


def architecture_scale(configs: Configs, around: Parents, head_dim: int) -> tuple[float, str] | None:
    """Return the multiplier of a published architecture that is not in its configuration, and the architecture."""
    config = next((values for _, values in configs if isinstance(field(values, "model_type"), str)), None)
    kind, scale = field(config, "model_type"), None
    if kind in UNSCALED:
        scale = 1.0
    elif kind in BY_DIM:
        scale = 1 / head_dim
    elif kind in DISENTANGLED:
        terms = {"c2p", "p2c"} & set(field(config, "pos_att_type") or ())
        scale = ((1 + len(terms)) * head_dim) ** -0.5
    elif kind in BY_WIDTH:
        width = next((found for _, module in around if (found := number(module, "embed_dim"))), None)
        scale = None if width is None else width**-0.5
    return None if scale is None else (scale, f"the published {kind}")


def _configs_in(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield the names and configurations of a module's attributes, `config` first."""
    config = getattr(module, "config", None)
    if _is_configuration(config):
        yield "config", config
    if getattr(module, BY_LAYER, None) is True:
        yield type(module).__name__, module
    for name, value in vars(module).items():
        if name not in MODULE_FIELDS and name != "config" and _is_configuration(value) and any(_known_fields(value)):
            yield name, value


def _known_fields(config: object) -> Iterator[str]:
    """Yield the KNOWN_FIELDS that an object sets."""
    for name in field_names(config):
        value = field(config, name)
        is_set = value is not None and (value is not False or name == BY_WEIGHTS)
        if is_set and (name in KNOWN_FIELDS or SOFTCAP.match(name)):
            yield name


def _is_configuration(value: object) -> bool:
    has_fields = isinstance(value, Mapping) or hasattr(value, "__dict__") or is_dataclass(value)
    return has_fields and not callable(value) and not isinstance(value, Tensor)


def field(holder: object, name: str) -> Any:
    """Return the field of this name of an object or a mapping; None if there is none."""
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)


def number(holder: object, name: str) -> float | None:
    """Return a field that is a finite number or a tensor with one element; None for anything else."""
    value = field(holder, name)
    if isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point() and not value.is_meta:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def positive(holder: object, name: str) -> float | None:
    """Return a field that is a positive number; None for anything else."""
    value = number(holder, name)
    return value if value is not None and value > 0 else None


def field_names(holder: object) -> list[str]:
    """Return the names of all fields in order."""
    if isinstance(holder, Mapping):
        return sorted(map(str, holder))
    return sorted({*getattr(holder, "__dict__", {}), *getattr(holder, "__dataclass_fields__", {})})


def parents_of(model: nn.Module, path: str) -> Parents:
    """Return the module at `path` and its parents up to the model; stop where the path does not exist."""
    modules, parts = modules_by_path(model), path.split(".") if path else []
    names = (".".join(parts[:length]) for length in range(len(parts), -1, -1))
    return [(name, modules[name]) for name in names if name in modules]


def attentions_among(parents: Parents) -> Parents:
    """Return the module that computes the attention, and its nearest parents that are attention classes too."""
    for depth, (_, module) in enumerate(parents):
        kind = type(module).__name__.lower()
        if depth and not ("attention" in kind or "attn" in kind):
            return parents[:depth]
    return parents


def layer_index(parents: Parents) -> int | None:
    """Return the layer number of a module: its `layer_idx`, else the last number in its path."""
    for _, module in parents:
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int):
            return index
    numbers = re.findall(r"(?<![^.])\d+(?![^.])", parents[0][0])
    return int(numbers[-1]) if numbers else None
