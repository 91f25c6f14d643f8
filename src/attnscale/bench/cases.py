"""The attentions that are timed."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One attention to time."""

    batch: int
    heads: int
    length: int
    head_dim: int
    is_causal: bool
    backward: bool
    dtype: str


def cases(device: str, quick: bool = False) -> list[Case]:
    """The cases of a device: those of the README's table, or one small one."""
    if quick:
        return [Case(1, 2, 256, 64, False, False, "float32" if device == "cpu" else "bfloat16")]
    if device == "cpu":
        shapes, dtype = [(1, 8, 1024, 64), (1, 8, 4096, 64)], "float32"
    else:
        shapes, dtype = [(4, 16, 4096, 128), (4, 16, 4096, 64), (1, 16, 16384, 128)], "bfloat16"
    return [
        Case(*shape, is_causal, backward, dtype)
        for shape in shapes
        for is_causal in (False, True)
        for backward in ((False,) if device == "cpu" else (False, True))
    ]
