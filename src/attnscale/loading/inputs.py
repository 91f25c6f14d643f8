"""What a Hugging Face model is called with: text, pictures or sound of the sizes its configuration names."""

import inspect
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnscale.errors import ModelError, SettingError
from attnscale.loading.given import Sequence
from attnscale.loading.loaded import DEFAULT_LENGTH, Request
from attnscale.loading.tokens import Batch, Tokenizer, padded, random_tokens, tokenizer_in

SAMPLE_RATE = 16_000  # one second of sound, for models that take waveforms
MASKS = {"attention_mask": "input_ids", "decoder_attention_mask": "decoder_input_ids"}  # of which tokens each is
IMAGE = 224  # pixels a side, where a configuration names none


@dataclass(frozen=True)
class Inputs:
    """Keyword arguments, what they are in words, and what was assumed."""

    kwargs: dict[str, Tensor]
    fed: str
    notes: tuple[str, ...] = ()
    unknown: float = 0.0  # share of the tokens that the model has no word for


def make_inputs(model: Any, request: Request, folder: Path | None = None) -> Inputs:
    """Inputs for a model by what its forward takes; `folder` is where its tokenizer would be."""
    taken = inspect.signature(model.forward).parameters
    config, main = model.config, model.main_input_name
    kwargs: dict[str, Tensor] = {}
    fed: list[str] = []
    notes: list[str] = []
    unknown = 0.0
    pairs = hasattr(config, "projection_dim") and {"input_ids", "pixel_values"} <= taken.keys()  # CLIP and its kin
    if main == "pixel_values" or pairs:
        kwargs["pixel_values"] = torch.cat([_pictures(config) for _ in range(request.samples)])
        fed.append(f"a random picture {'×'.join(map(str, kwargs['pixel_values'].shape[1:]))}")
    elif main == "input_features":
        kwargs["input_features"] = torch.cat([_features(config, request.length) for _ in range(request.samples)])
        fed.append(f"random sound features {'×'.join(map(str, kwargs['input_features'].shape[1:]))}")
    elif main == "input_values":
        kwargs["input_values"] = torch.cat([_sound(config) for _ in range(request.samples)])
        fed.append(f"random sound of {kwargs['input_values'].shape[1]} samples")
    elif main != "input_ids":
        raise ModelError(
            f"{type(model).__name__} takes {main!r}, which cannot be made here; "
            "give it as package.module:callable, a function that returns (model, inputs)."
        )
    text_names = [name for name in ("input_ids", "decoder_input_ids") if _wants(name, main, pairs, model, taken)]
    if text_names:
        batch, words, note = _tokens(model, request, folder)
        kwargs |= dict.fromkeys(text_names, batch.ids)
        if batch.mask is not None:
            kwargs |= {name: batch.mask for name in MASKS if name in taken and MASKS[name] in text_names}
        fed.append(words)
        notes += [note] if note else []
        unknown = batch.unknown
    elif request.given:
        raise SettingError(f"{type(model).__name__} takes no text; leave --text, --tokens and --data out.")
    if hasattr(config, "vision_config") and "pixel_values" not in kwargs:
        notes.append("Only the text part of this model was run.")
    return Inputs(_in_dtype_of(model, kwargs), " and ".join(fed), tuple(notes), unknown)


def _wants(name: str, main: str, pairs: bool, model: Any, taken: Any) -> bool:
    if name == "decoder_input_ids":
        return name in taken and (model.config.is_encoder_decoder or main != "input_ids")
    return name in taken and (main == "input_ids" or pairs)


def _tokens(model: Any, request: Request, folder: Path | None) -> tuple[Batch, str, str]:
    """What it is run on, in words too, and a note."""
    length, note = _length(model, request.length)
    vocabulary, tokenizer = _vocabulary(model), _tokenizer(folder, request)
    if tokenizer is None and not request.given:
        untold = "There is no tokenizer that could be read, so the tokens are random."
        drawn = random_tokens(vocabulary, length, request.samples)
        return Batch(drawn), f"{drawn.numel()} random tokens", f"{note} {untold}".strip()
    ids = [_ids(sequence, tokenizer, length) for sequence in request.texts]
    highest = max(max(sequence) for sequence in ids)
    if highest >= vocabulary:
        owner = "tokenizer does" if tokenizer else "tokens do"
        raise ModelError(
            f"The {owner} not fit the model: there is token {highest}, and the model knows {vocabulary} tokens."
        )
    flat = [each for sequence in ids for each in sequence]
    batch = padded(ids, getattr(model.config.get_text_config(), "pad_token_id", None))
    unknown = 0.0 if tokenizer is None else tokenizer.unknown_share(flat)
    return replace(batch, unknown=unknown), f"{len(flat)} tokens of {request.source}", note


def _tokenizer(folder: Path | None, request: Request) -> Tokenizer | None:
    try:
        return None if folder is None else tokenizer_in(folder)
    except ModelError:
        if any(isinstance(sequence, str) for sequence in request.given):
            raise
        return None


def _ids(sequence: Sequence, tokenizer: Tokenizer | None, length: int) -> list[int]:
    if not isinstance(sequence, str):
        return sequence[:length]
    if tokenizer is None:
        raise ModelError("A text needs the model's tokenizer, and there is none beside its config.json.")
    return tokenizer.ids(sequence, length)


def _length(model: Any, wanted: int | None) -> tuple[int, str]:
    """How many tokens, and a note where that is beyond what the model was made for."""
    text = model.config.get_text_config()
    named = (getattr(text, name, None) for name in ("max_position_embeddings", "max_target_positions"))
    limits = [limit for limit in named if isinstance(limit, int) and limit > 1]
    tables = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and ("pos" in name.rsplit(".", 1)[-1] or name.endswith("wpe"))
    ]
    taken = max((table.padding_idx + 1 for table in tables if table.padding_idx is not None), default=0)
    limit = min(limits) - taken if limits else None  # RoBERTa's positions start after the padding token
    if wanted is None or limit is None or wanted <= limit:
        return wanted or min(DEFAULT_LENGTH, limit or DEFAULT_LENGTH), ""
    if tables:
        raise SettingError(f"Expected --length of at most {limit}, which is as far as the model's positions go.")
    return wanted, f"The model was made for {limit} tokens, and is run on {wanted}."


def _vocabulary(model: Any) -> int:
    size = getattr(model.config.get_text_config(), "vocab_size", None)
    if isinstance(size, int) and size > 0:
        return size
    embedding = model.get_input_embeddings()
    if isinstance(embedding, nn.Embedding):
        return embedding.num_embeddings
    raise ModelError(f"{type(model).__name__} does not say how many tokens it knows.")


def _pictures(config: Any) -> Tensor:
    """Standard normal pixels, (1, channels, height, width), or (1, frames, channels, height, width)."""
    parts = [config, *(getattr(config, name, None) for name in ("vision_config", "encoder", "backbone_config"))]
    channels = _first(parts, "num_channels", "in_channels") or 3
    size = _first(parts, "image_size", "img_size", "crop_size") or IMAGE
    if isinstance(size, dict):
        size = (size["height"], size["width"])
    height, width = size if isinstance(size, tuple | list) else (size, size)
    frames = _first(parts, "num_frames", "frames_per_clip")
    return torch.randn(1, *([frames] if frames else []), channels, height, width)


def _features(config: Any, length: int | None) -> Tensor:
    """Log-mel features as Whisper takes them, (1, bins, frames), or (1, frames, features) as others do."""
    bins, positions = getattr(config, "num_mel_bins", None), getattr(config, "max_source_positions", None)
    if bins and positions:
        return torch.randn(1, bins, 2 * positions)
    width = _first([config], "feature_projection_input_dim", "input_feat_per_channel")
    if not width:
        raise ModelError(f"The features that a {config.model_type} model takes cannot be made here.")
    return torch.randn(1, length or DEFAULT_LENGTH, width)


def _sound(config: Any) -> Tensor:
    """A spectrogram where the model takes one, (1, frames, bins), else one second of noise, (1, samples)."""
    if hasattr(config, "frequency_stride"):
        return torch.randn(1, config.max_length, config.num_mel_bins)
    return torch.randn(1, SAMPLE_RATE)


def _first(parts: list[Any], *names: str) -> Any:
    found = (getattr(part, name, None) for name in names for part in parts if part is not None)
    return next((value for value in found if value), None)


def _in_dtype_of(model: Any, kwargs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in kwargs.items()}
