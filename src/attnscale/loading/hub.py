"""Find models by name, org/name, in the local Hugging Face cache; download them only with --download."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from attnscale.errors import ModelError, SettingError
from attnscale.loading.model_errors import as_model_error, require_package
from attnscale.loading.request import Request

PART = r"[A-Za-z0-9][\w.-]{0,95}"
NAME = re.compile(rf"(?P<model>({PART}/)?{PART})(@(?P<revision>{PART}))?")
CONFIGS = ("config.json", "adapter_config.json")
DATA = ("*.json", "*.txt", "*.model")  # configuration and vocabulary: never code
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")  # .bin files only if there are no safetensors
# huggingface_hub and transformers read these when imported: no network requests, and no kernels, which are code.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "USE_HUB_KERNELS": "NO",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


def is_name(spec: str) -> bool:
    """Return True for the name of a model on a hub, with or without a revision.

    >>> is_name("org/name"), is_name("gpt2@main"), is_name("../name"), is_name("a/b/c")
    (True, True, False, False)
    """
    return NAME.fullmatch(spec) is not None and ".." not in spec


def cached_folder(spec: str) -> Path:
    """Return the folder of a model in the local cache."""
    name, revision = _parsed(spec)
    hub = _hub()
    for file in CONFIGS:
        found = hub.try_to_load_from_cache(name, file, revision=revision)
        if isinstance(found, str):
            return Path(found).parent
    at = "" if revision is None else f" at revision {revision!r}"
    raise ModelError(
        f"No such file or folder, and no model {name!r}{at} in the local Hugging Face cache. "
        "Add --download to fetch it from the hub."
    )


def download(request: Request) -> None:
    """Fetch the requested model, and the requested base of an adapter, into the cache: data only, never code."""
    names = [name for name in (request.base, request.model) if name and is_name(name) and not Path(name).exists()]
    if not names:
        raise SettingError(f"Expected the name of a model, as org/name, with --download, got {request.model!r}.")
    hub = _hub()
    for spec in names:
        request.report(f"fetching {spec}")
        name, revision = _parsed(spec)
        with as_model_error(f"fetch {spec}"):
            for patterns in ((*DATA, WEIGHTS[0]), (WEIGHTS[1],)):
                folder = Path(hub.snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
                if any(folder.glob(WEIGHTS[0])):
                    break


@contextmanager
def offline() -> Iterator[None]:
    """Disable network access of Hugging Face's libraries, even if they were imported before."""
    before = {name: os.environ.get(name) for name in OFFLINE}
    os.environ.update(OFFLINE)
    constants: Any = sys.modules.get("huggingface_hub.constants")
    was_offline = getattr(constants, "HF_HUB_OFFLINE", None)
    if constants is not None:
        constants.HF_HUB_OFFLINE = True  # every request checks it
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if constants is not None:
            constants.HF_HUB_OFFLINE = was_offline


def _hub() -> Any:
    require_package("huggingface_hub", "Loading a model by name")
    return import_module("huggingface_hub")


def _parsed(spec: str) -> tuple[str, str | None]:
    found = NAME.fullmatch(spec)
    if found is None:
        raise ModelError(f"Expected a model's name, as org/name or org/name@revision, got {spec!r}.")
    return found["model"], found["revision"]
