"""Make inputs for Hugging Face models: text, images or audio with the sizes in the configuration."""

import inspect
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnscale.errors import ModelError, SettingError
from attnscale.loading.model_errors import as_model_error
from attnscale.loading.request import Request, Sequence, split_text
from attnscale.models.text import default_text

DEFAULT_LENGTH = 256  # tokens; enough keys for statistics, and fast on a laptop
SAMPLE_RATE = 16_000  # samples per second; models of waveforms get one second
IMAGE_SIZE = 224  # pixels, if the configuration has no size
MASKS = {"attention_mask": "input_ids", "decoder_attention_mask": "decoder_input_ids"}
VOCABULARIES = ("tokenizer_config.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model")
CHARACTERS_PER_TOKEN = 16  # characters read per requested token
SEED = 0  # for random tokens
Encode = Callable[[str], SequenceOf[int]]  # a tokenizer


@dataclass(frozen=True)
class Loaded:
    """A model and the inputs to call it with: `model(*args, **kwargs)`."""

    model: nn.Module
    title: str
    input_description: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # sentences about assumptions
    unknown_share: float = 0.0  # share of tokens that the model does not know


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return a copy of nested dicts, lists and tuples, with the function applied to every tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) is dict:
        return {name: map_tensors(function, entry) for name, entry in value.items()}
    return type(value)(map_tensors(function, entry) for entry in value) if type(value) in (list, tuple) else value


def texts_of(request: Request) -> tuple[Sequence, ...]:
    """Return the user's sequences; English text by default."""
    return request.user_sequences or split_text(default_text(), request.samples)


def with_inputs(
    model: Any, title: str, request: Request, folder: Path | None = None, assumed: SequenceOf[str] = ()
) -> Loaded:
    """Return a model with inputs that match the signature of its forward; `folder` may contain its tokenizer."""
    accepted = inspect.signature(model.forward).parameters
    config, main = model.config, model.main_input_name
    kwargs: dict[str, Tensor] = {}
    parts: list[str] = []
    notes, unknown_share = list(assumed), 0.0
    is_pair = hasattr(config, "projection_dim") and {"input_ids", "pixel_values"} <= accepted.keys()  # as CLIP
    makers = {
        "pixel_values": (_pictures, "a random picture {}"),
        "input_features": (_features, "random sound features {}"),
        "input_values": (_sound, "random sound of {} samples"),
    }
    made = "pixel_values" if is_pair else main
    if made in makers:
        make, words = makers[made]
        kwargs[made] = torch.cat([make(config, request.length) for _ in range(request.samples)])
        parts.append(words.format("×".join(map(str, kwargs[made].shape[1:]))))
    elif main != "input_ids":
        raise ModelError(
            f"Inputs for {type(model).__name__}, which takes {main!r}, cannot be made here. "
            "Give package.module:callable, a function that returns (model, inputs)."
        )
    has_decoder = config.is_encoder_decoder or main != "input_ids"
    names = {"input_ids": main == "input_ids" or is_pair, "decoder_input_ids": has_decoder}
    text_names = [name for name, is_wanted in names.items() if is_wanted and name in accepted]
    if text_names:
        ids, mask, description, unknown_share = _tokens(model, request, folder, notes)
        kwargs |= dict.fromkeys(text_names, ids)
        if mask is not None:
            kwargs |= {name: mask for name, of in MASKS.items() if name in accepted and of in text_names}
        parts.append(description)
    elif request.user_sequences:
        raise SettingError(f"{type(model).__name__} takes no text; leave --text and --data out.")
    if hasattr(config, "vision_config") and "pixel_values" not in kwargs:
        notes.append("Only the text part of this model was run.")
    kwargs = {name: each.to(model.dtype) if each.is_floating_point() else each for name, each in kwargs.items()}
    return Loaded(model, title, " and ".join(parts), (), kwargs, tuple(notes), unknown_share)


def _tokens(
    model: Any, request: Request, folder: Path | None, notes: list[str]
) -> tuple[Tensor, Tensor | None, str, float]:
    """Return token ids (sequences, length), the padding mask, a description and the share of unknown tokens."""
    length, vocabulary = _length(model, request.length, notes), _vocabulary(model)
    encode, unknown_id = None, None
    try:
        encode, unknown_id = (None, None) if folder is None else _tokenizer_in(folder)
    except ModelError:
        if any(isinstance(sequence, str) for sequence in request.user_sequences):
            raise
    if encode is None and not request.user_sequences:
        notes.append("No tokenizer could be read, so the tokens are random.")
        generator = torch.Generator().manual_seed(SEED)
        drawn = torch.randint(vocabulary, (request.samples, length), generator=generator)
        return drawn, None, f"{drawn.numel()} random tokens", 0.0
    sequences = [_ids(sequence, encode, length) for sequence in texts_of(request)]
    flat = [each for sequence in sequences for each in sequence]
    if max(flat) >= vocabulary:
        subject = "tokens do" if encode is None else "tokenizer does"
        raise ModelError(
            f"The {subject} not fit the model: there is token {max(flat)}, and the model knows {vocabulary} tokens."
        )
    ids, mask = pad(sequences, getattr(model.config.get_text_config(), "pad_token_id", None))
    unknown = 0 if unknown_id is None else flat.count(unknown_id)
    return ids, mask, f"{len(flat)} tokens of {request.source}", unknown / len(flat)


def pad(sequences: list[list[int]], padding: int | None) -> tuple[Tensor, Tensor | None]:
    """Put sequences into one tensor, padded at the end; return a mask too if there is padding.

    >>> pad([[5, 6, 7], [8, 9]], None)[1]
    tensor([[1, 1, 1],
            [1, 1, 0]])
    """
    longest = max(map(len, sequences))
    ids = torch.tensor([each + [padding or 0] * (longest - len(each)) for each in sequences])
    mask = (torch.arange(longest) < torch.tensor([[len(each)] for each in sequences])).long()
    return ids, None if mask.all() else mask


def _tokenizer_in(folder: Path) -> tuple[Encode | None, int | None]:
    """Return the tokenizer of a model, and the id of unknown tokens."""
    with as_model_error(f"read the tokenizer in {folder}"):
        if (folder / "tokenizer.json").is_file():
            from tokenizers import Tokenizer

            fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
            fast.no_truncation()
            fast.no_padding()
            token, number = getattr(fast.model, "unk_token", None), getattr(fast.model, "unk_id", None)
            return lambda text: fast.encode(text).ids, number if token is None else fast.token_to_id(token)
        if any((folder / name).is_file() for name in VOCABULARIES):
            from transformers import AutoTokenizer

            slow = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
            return lambda text: slow(text)["input_ids"], slow.unk_token_id
    return None, None


def _ids(sequence: Sequence, encode: Encode | None, length: int) -> list[int]:
    if not isinstance(sequence, str):
        return sequence[:length]
    if encode is None:
        raise ModelError("A text needs the model's tokenizer, and there is none beside its config.json.")
    found = list(encode(sequence[: CHARACTERS_PER_TOKEN * length]))
    if len(found) < 2:
        raise ModelError(f"Expected a text of at least two tokens, got {len(found)}.")
    return found[:length]


def _length(model: Any, requested: int | None, notes: list[str]) -> int:
    """Return the number of tokens to run on; add a note if it exceeds the model's context."""
    text = model.config.get_text_config()
    named = (getattr(text, name, None) for name in ("max_position_embeddings", "max_target_positions"))
    limits = [limit for limit in named if isinstance(limit, int) and limit > 1]
    tables = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and ("pos" in name.rsplit(".", 1)[-1] or name.endswith("wpe"))
    ]
    # RoBERTa's positions start after the padding token.
    first = max((table.padding_idx + 1 for table in tables if table.padding_idx is not None), default=0)
    limit = min(limits) - first if limits else None
    if requested is None or limit is None or requested <= limit:
        return requested or min(DEFAULT_LENGTH, limit or DEFAULT_LENGTH)
    if tables:
        raise SettingError(f"Expected --length of at most {limit}, the number of positions the model has.")
    notes.append(f"The model was made for {limit} tokens, and was run on {requested}.")
    return requested


def _vocabulary(model: Any) -> int:
    size = getattr(model.config.get_text_config(), "vocab_size", None)
    if isinstance(size, int) and size > 0:
        return size
    embedding = model.get_input_embeddings()
    if isinstance(embedding, nn.Embedding):
        return embedding.num_embeddings
    raise ModelError(f"{type(model).__name__} does not say how many tokens it knows.")


def _pictures(config: Any, _: int | None) -> Tensor:
    """Draw standard normal pixels, (1, channels, height, width) or (1, frames, channels, height, width)."""
    parts = [config, *(getattr(config, name, None) for name in ("vision_config", "encoder", "backbone_config"))]
    channels = _first(parts, "num_channels", "in_channels") or 3
    size = _first(parts, "image_size", "img_size", "crop_size") or IMAGE_SIZE
    if isinstance(size, dict):
        size = (size["height"], size["width"])
    height, width = size if isinstance(size, tuple | list) else (size, size)
    frames = _first(parts, "num_frames", "frames_per_clip")
    return torch.randn(1, *([frames] if frames else []), channels, height, width)


def _features(config: Any, length: int | None) -> Tensor:
    """Draw log-mel features: (1, bins, frames) for Whisper, (1, frames, features) for other models."""
    bins, positions = getattr(config, "num_mel_bins", None), getattr(config, "max_source_positions", None)
    if bins and positions:
        return torch.randn(1, bins, 2 * positions)
    width = _first([config], "feature_projection_input_dim", "input_feat_per_channel")
    if not width:
        raise ModelError(f"The features that a {config.model_type} model takes cannot be made here.")
    return torch.randn(1, length or DEFAULT_LENGTH, width)


def _sound(config: Any, _: int | None) -> Tensor:
    """Draw a spectrogram, (1, frames, bins), if the model accepts one, else a second of noise, (1, samples)."""
    if hasattr(config, "frequency_stride"):
        return torch.randn(1, config.max_length, config.num_mel_bins)
    return torch.randn(1, SAMPLE_RATE)


def _first(parts: list[Any], *names: str) -> Any:
    found = (getattr(part, name, None) for name in names for part in parts if part is not None)
    return next((value for value in found if value), None)
