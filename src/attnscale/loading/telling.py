"""Other people's code may raise anything; a person is told it in one sentence."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from attnscale.errors import AttnscaleError, ModelError

# Where it was raised is said of the code that called torch, and not of what watches it.
HERE = Path(__file__).parent.parent
OURS = tuple(str(room) for room in (Path(torch.__file__).parent, HERE / "watching", HERE / "tracing"))
LONGEST = 300  # characters of an exception's own words


@contextmanager
def telling(doing: str) -> Iterator[None]:
    """Turn whatever is raised within into a ModelError, `Could not <doing>: …`; attnscale's own errors pass."""
    try:
        yield
    except (AttnscaleError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # SystemExit, and a panic of a library in Rust, are no Exceptions
        if is_out_of_memory(error):
            raise ModelError(
                f"Out of memory: could not {doing}. Try a smaller --length or another --device."
            ) from error
        raise ModelError(f"Could not {doing}: {described(error)}.") from error


def described(error: BaseException) -> str:
    """An exception in one line: what it is, what it says, and where it was raised.

    >>> described(ValueError("too deep"))
    'ValueError, too deep'
    """
    says = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    told = [frame for frame in frames if not frame.filename.startswith(OURS)] or frames
    where = f" ({Path(told[-1].filename).name}, line {told[-1].lineno})" if told else ""
    return f"{type(error).__name__}{', ' if says else ''}{says[:LONGEST].rstrip('.')}{where}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, in the words of Python, of torch's allocators or of a GPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and ("allocate memory" in str(error) or "out of memory" in str(error))
