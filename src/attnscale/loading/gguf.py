"""A GGUF file: its configuration and its weights, as transformers reads them, into transformers' own classes."""

from contextlib import redirect_stderr
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnscale.errors import ModelError
from attnscale.loading.config import disarmed, require_modest
from attnscale.loading.huggingface import fitted, quiet, require_room_for, transformers_package
from attnscale.loading.loaded import Request
from attnscale.loading.memory import require_room
from attnscale.loading.telling import telling

SUFFIX = ".gguf"


def load_gguf(path: Path, request: Request) -> nn.Module:
    """The model in the file, its weights dequantised; at random initialisation where that is asked for."""
    transformers = transformers_package()
    if find_spec("gguf") is None:
        raise ModelError(f"Reading {path} needs the package gguf: pip install gguf.")
    reading: Any = import_module("transformers.modeling_gguf_pytorch_utils")
    require_room(path.stat().st_size, "cpu")
    with quiet(), telling(f"read {path}"):
        raw = disarmed(dict(reading.load_gguf_checkpoint(str(path), return_tensors=False)["config"]))
        kind = raw.get("model_type")
        if kind not in transformers.CONFIG_MAPPING:
            raise ModelError(f"Unknown architecture {kind!r} in {path}: transformers has no such model.")
        require_modest(raw, path)
        config = transformers.CONFIG_MAPPING[kind].from_dict(raw)
        config.dtype = torch.float32
        known = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        make = known[type(config)] if type(config) in known else transformers.MODEL_MAPPING[type(config)]
        sketch = require_room_for(make, config, request)
        if request.random_init:
            model: nn.Module = make(config)
            return model
    request.report("reading weights")
    with quiet(), telling(f"load the weights {path}"), redirect_stderr(StringIO()):  # a bar that cannot be turned off
        found = reading.load_gguf_checkpoint(str(path), True, sketch, torch.float32)
        return fitted(make, config, found["tensors"], path)
