"""The attentions that are timed."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One attention to time; key and value have kv_heads, which query heads share."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    is_causal: bool
    backward: bool
    dtype: str


# What people run: long sequences, shared key heads, a very long one, GPT-2's shape, a length that fits no tile, the
# head dimensions beside 128, a step of decoding, and float32.
H200 = (
    (4, 16, 16, 4096, 4096, 128, "bfloat16"),
    (2, 32, 8, 8192, 8192, 128, "bfloat16"),
    (1, 8, 8, 32768, 32768, 128, "bfloat16"),
    (8, 12, 12, 1024, 1024, 64, "bfloat16"),
    (2, 16, 16, 3001, 3001, 128, "bfloat16"),
    (2, 16, 16, 4096, 4096, 96, "bfloat16"),
    (2, 16, 16, 4096, 4096, 256, "bfloat16"),
    (32, 32, 8, 1, 8192, 128, "bfloat16"),
    (2, 8, 8, 2048, 2048, 64, "float32"),
)
TRAINED = [(4, 4096, 128)]  # batch, length and head dimension of what is timed with a backward too
CPU = tuple((1, 8, 8, length, length, 64, "float32") for length in (512, 1024, 4096))


def cases(device: str, quick: bool = False) -> list[Case]:
    """The cases of a device: those of the README's table, or one small one."""
    if quick:
        return [Case(1, 2, 2, 256, 256, 64, False, False, "float32" if device == "cpu" else "bfloat16")]
    return [
        Case(batch, heads, kv_heads, q_len, kv_len, head_dim, is_causal, backward, dtype)
        for batch, heads, kv_heads, q_len, kv_len, head_dim, dtype in (CPU if device == "cpu" else H200)
        for is_causal in ((False, True) if q_len > 1 else (False,))  # a causal query alone would see one key
        for backward in ((False, True) if (batch, q_len, head_dim) in TRAINED else (False,))
    ]
