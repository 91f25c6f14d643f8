"""Models by name, org/name: those in the local Hugging Face cache, read as folders; fetched only where asked for."""

import os
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from attnscale.errors import ModelError
from attnscale.loading.telling import telling

PART = r"[A-Za-z0-9][\w.-]{0,95}"
NAME = re.compile(rf"(?P<model>({PART}/)?{PART})(@(?P<revision>{PART}))?")
MAIN = "main"
DATA = ("*.json", "*.txt", "*.model")  # configuration and vocabulary: never code
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")  # the second where there is none of the first


def is_name(spec: str) -> bool:
    """Whether this is written like a model's name on a hub, with a revision or without.

    >>> is_name("org/name"), is_name("gpt2@main"), is_name("../name"), is_name("a/b/c")
    (True, True, False, False)
    """
    return NAME.fullmatch(spec) is not None and ".." not in spec


def cached(spec: str, environment: Mapping[str, str] = os.environ) -> Path | None:
    """The folder of that model in the cache; None where it holds no such model."""
    name, revision = _parted(spec)
    folder = _cache(environment) / f"models--{name.replace('/', '--')}"
    snapshots = folder / "snapshots"
    if not snapshots.is_dir():
        return None
    known = sorted(path.name for path in snapshots.iterdir() if path.is_dir())
    wanted = _commit(folder, revision or MAIN)
    found = [commit for commit in known if commit == wanted or (revision and commit.startswith(revision))]
    if len(found) == 1:
        return snapshots / found[0]
    if len(known) == 1 and revision is None:
        return snapshots / known[0]
    listed = ", ".join(known[:3]) or "none"
    raise ModelError(
        f"Expected the revision {revision or MAIN!r} of {name} in the cache, and it holds {listed}; name one of them, "
        f"as {name}@REVISION, or fetch it with --download."
    )


def download(spec: str) -> None:
    """Fetch a model's configuration, vocabulary and weights into the cache: asked for by hand, and data alone."""
    name, revision = _parted(spec)
    try:
        hub: Any = import_module("huggingface_hub")
    except ImportError:
        raise ModelError("--download needs the package huggingface_hub: pip install 'attnscale[hf]'.") from None
    with telling(f"fetch {spec}"):
        for patterns in ((*DATA, WEIGHTS[0]), (WEIGHTS[1],)):
            folder = Path(hub.snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
            if any(folder.glob(WEIGHTS[0])):
                return


def _parted(spec: str) -> tuple[str, str | None]:
    found = NAME.fullmatch(spec)
    if found is None:
        raise ModelError(f"Expected a model's name, as org/name or org/name@revision, got {spec!r}.")
    return found["model"], found["revision"]


def _commit(folder: Path, revision: str) -> str:
    """What a branch or a tag stands for; the revision itself where it is none."""
    try:
        with (folder / "refs" / revision).open("r", encoding="ascii") as file:
            return file.read(96).strip()
    except (OSError, UnicodeDecodeError):
        return revision


def _cache(environment: Mapping[str, str]) -> Path:
    """Where Hugging Face's libraries keep models, by the settings that they read."""
    home = environment.get("XDG_CACHE_HOME") or "~/.cache"
    root = environment.get("HF_HOME") or f"{home}/huggingface"
    own = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
    return Path(own or f"{root}/hub").expanduser()
