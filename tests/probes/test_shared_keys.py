"""The gradient that reaches a key shared by several heads is the same however its copies are made."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from .runs import VOCABULARY, monitored, tokens
from .test_compiled import assert_same

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of what its compiler imports
HEADS, KEYS, WIDTH = 4, 2, 12


def by_the_kernel(query, key, value):
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)


def repeated(query, key, value):
    key, value = (part.repeat_interleave(HEADS // KEYS, 1) for part in (key, value))
    return F.scaled_dot_product_attention(query, key, value)


def expanded(query, key, value):
    key, value = (part[:, :, None].expand(-1, -1, HEADS // KEYS, -1, -1).reshape(*query.shape) for part in (key, value))
    return F.scaled_dot_product_attention(query, key, value)


def as_hugging_face(query, key, value):
    """Copies where it is compiled."""
    return expanded(query, key, value) if torch.compiler.is_compiling() else by_the_kernel(query, key, value)


def written(query, key, value):
    key, value = (part.repeat_interleave(HEADS // KEYS, 1) for part in (key, value))
    return (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1) @ value


WAYS = (by_the_kernel, repeated, expanded, as_hugging_face, written)


class Grouped(nn.Module):
    """One attention, heads of which share keys, behind what all of them have in common."""

    def __init__(self, attend):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.q_proj, self.kv_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH * KEYS // HEADS)
        self.attend = attend

    def forward(self, given):
        x = self.embedding(given)
        query = self.q_proj(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        key, value = (part.unflatten(-1, (KEYS, -1)).transpose(1, 2) for part in self.kv_proj(x).chunk(2, -1))
        return self.head(self.attend(query, key, value).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("way", WAYS)
def test_an_eager_and_a_compiled_record_have_the_gradient_of_the_key_itself(way):
    expected, _ = monitored(lambda: Grouped(written), lambda model: model, 2)
    eager, _ = monitored(lambda: Grouped(way), lambda model: model, 2)
    torch._dynamo.reset()
    compiled, _ = monitored(lambda: Grouped(way), lambda model: torch.compile(model, backend="aot_eager"), 2)
    assert_same(eager, expected, 1e-4)
    assert_same(compiled, expected, 1e-4)


def test_it_is_the_gradient_that_autograd_finds_for_the_key():
    records, _ = monitored(lambda: Grouped(repeated), lambda model: model, 1)
    model, found = Grouped(by_the_kernel), []

    def attend(query, key, value):
        key.retain_grad()
        found.append(key)
        return by_the_kernel(query, key, value)

    model.attend = attend
    monitored(lambda: model, lambda model: model, 1)
    lengths = found[0].grad.square().sum((0, 2, 3)).sqrt().repeat_interleave(HEADS // KEYS)
    assert records[0].layers["Grouped"].numbers["key_gradient"] == pytest.approx(lengths.tolist(), rel=1e-4)


def copied_in_turns(query, key, value):
    key, value = (part.repeat(1, HEADS // KEYS, 1, 1) for part in (key, value))
    return F.scaled_dot_product_attention(query, key, value)


def test_copies_that_stand_apart_share_what_reaches_their_key():
    records, _ = monitored(
        lambda: Grouped(copied_in_turns), lambda model: model, 2, rate=0.0, batches=lambda _, device: tokens(0)
    )
    traced, probed = (record.layers["Grouped"].numbers["key_gradient"] for record in records)
    assert probed == pytest.approx(traced, rel=1e-4)
    assert traced[:KEYS] == pytest.approx(traced[KEYS:])
