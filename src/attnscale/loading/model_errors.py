"""Turn errors of third-party code into one sentence instead of a traceback, and silence its log messages."""

import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from attnscale.errors import AttnscaleError, ModelError

# The reported location of an error is the code that called torch, not torch or attnscale.
PACKAGE = Path(__file__).parent.parent
SKIPPED = tuple(str(folder) for folder in (Path(torch.__file__).parent, PACKAGE / "watching", PACKAGE / "tracing"))
MAX_WORDS = 300  # characters of an exception's message


@contextmanager
def as_model_error(action: str) -> Iterator[None]:
    """Turn any exception into a ModelError, `Could not <action>: …`; do not change attnscale's own errors."""
    try:
        yield
    except (AttnscaleError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # SystemExit, and panics of libraries in Rust, are not Exceptions
        if _is_out_of_memory(error):
            raise ModelError(
                f"Out of memory: could not {action}. Try a smaller --length or another --device."
            ) from error
        raise ModelError(f"Could not {action}: {describe(error)}.") from error


def require_package(package: str, what: str, install: str = "'attnscale[hf]'") -> None:
    """Raise an error if an optional package is missing."""
    if find_spec(package) is None:
        raise ModelError(f"{what} needs the package {package}: pip install {install}.")


def describe(error: BaseException) -> str:
    """Describe an exception in one line: its type, its message, and where it was raised.

    >>> describe(ValueError("too deep"))
    'ValueError, too deep'
    """
    message = " ".join(str(error).split())[:MAX_WORDS].rstrip(".")
    frames = traceback.extract_tb(error.__traceback__)
    last = ([frame for frame in frames if not frame.filename.startswith(SKIPPED)] or frames)[-1:]
    where = "".join(f" ({Path(frame.filename).name}, line {frame.lineno})" for frame in last)
    return f"{type(error).__name__}{', ' if message else ''}{message}{where}"


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and ("allocate memory" in str(error) or "out of memory" in str(error))


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars and log messages of transformers and accelerate."""
    offloading = logging.getLogger("accelerate")
    level = offloading.level
    offloading.setLevel(logging.ERROR)
    transformers_logging: Any = import_module("transformers.utils.logging") if "transformers" in sys.modules else None
    if transformers_logging is not None:
        verbosity, has_bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
        transformers_logging.set_verbosity(logging.CRITICAL)
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        offloading.setLevel(level)
        if transformers_logging is not None:
            transformers_logging.set_verbosity(verbosity)
            if has_bars:
                transformers_logging.enable_progress_bar()
