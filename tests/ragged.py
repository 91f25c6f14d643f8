"""Ragged batches for tests: the same sequences packed, nested, alone and padded."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from attnscale import Visibility


@dataclass
class Batch:
    """Packed tokens of sequences of these lengths, (total, heads, width)."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    q_lens: list[int]
    kv_lens: list[int]

    @property
    def tensors(self):
        return self.query, self.key, self.value

    @property
    def starts(self):
        return tuple(torch.tensor([0, *lengths]).cumsum(0) for lengths in (self.q_lens, self.kv_lens))

    def nested(self):
        rows, keys = self.starts
        keys = rows if self.q_lens == self.kv_lens else keys
        return tuple(
            torch.nested.nested_tensor_from_jagged(tokens, offsets).transpose(1, 2)
            for tokens, offsets in zip(self.tensors, (rows, keys, keys), strict=True)
        )

    def alone(self):
        """Query, key and value of each sequence, (1, heads, length, width)."""
        parts = (
            tokens.split(lengths)
            for tokens, lengths in zip(self.tensors, (self.q_lens, self.kv_lens, self.kv_lens), strict=True)
        )
        for sequence in zip(*parts, strict=True):
            yield tuple(tokens.transpose(0, 1).unsqueeze(0) for tokens in sequence)

    def padded(self):
        """(batch, heads, longest, width) with zeros behind, and which rows and keys are none of padding."""
        made = []
        for tokens, lengths in zip(self.tensors, (self.q_lens, self.kv_lens, self.kv_lens), strict=True):
            parts = [part.transpose(0, 1) for part in tokens.split(lengths)]
            longest = max(lengths)
            made.append(torch.stack([torch.nn.functional.pad(x, (0, 0, 0, longest - x.shape[1])) for x in parts]))
        real = [torch.arange(max(lens)) < torch.tensor(lens).unsqueeze(-1) for lens in (self.q_lens, self.kv_lens)]
        return *made, *real

    def mask(self, seen):
        """What every row of the padded batch sees, written out: (batch, 1, longest, longest)."""
        *_, rows, keys = self.padded()
        masks = []
        for own, theirs, q_len, kv_len in zip(rows, keys, self.q_lens, self.kv_lens, strict=True):
            limits = seen.within(q_len, kv_len).shown(slice(0, len(own)), slice(0, len(theirs)), "cpu")
            both = own.unsqueeze(-1) & theirs
            masks.append(both if limits is None else both & limits)
        return torch.stack(masks).unsqueeze(1)


def batch(q_lens, kv_lens, heads=2, kv_heads=None, head_dim=3, value_dim=5, dtype=torch.float64, requires_grad=False):
    def tokens(total, heads, width):
        return torch.randn(total, heads, width, dtype=dtype, requires_grad=requires_grad)

    kv_heads = kv_heads or heads
    return Batch(
        tokens(sum(q_lens), heads, head_dim),
        tokens(sum(kv_lens), kv_heads, head_dim),
        tokens(sum(kv_lens), kv_heads, value_dim),
        q_lens,
        kv_lens,
    )


SEEN = (
    Visibility(),
    Visibility.causal(),
    Visibility.causal(from_the_end=True),
    Visibility.causal(window=3),
    Visibility.causal(1, window=2, from_the_end=True),
    Visibility(last=1, first=-2),
)


@st.composite
def batches(draw):
    """Sequences of several lengths, none among them, with groups of heads; and what a row sees of its sequence."""
    count = draw(st.integers(1, 4))
    q_lens = draw(st.lists(st.integers(0, 7), min_size=count, max_size=count))
    kv_lens = q_lens if draw(st.booleans()) else draw(st.lists(st.integers(0, 7), min_size=count, max_size=count))
    if not sum(q_lens) or not sum(kv_lens):
        q_lens, kv_lens = [*q_lens, 3], [*kv_lens, 2]
    torch.manual_seed(draw(st.integers(0, 2**31)))
    kv_heads = draw(st.sampled_from([1, 2]))
    group = draw(st.sampled_from([1, 2]))
    made = batch(q_lens, kv_lens, kv_heads * group, kv_heads, requires_grad=True)
    return made, draw(st.sampled_from(SEEN))
