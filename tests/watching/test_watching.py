"""What watch() promises around the attentions it sees."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, StaticCache

import attnscale
from attnscale.errors import AttnscaleError
from tests.watching.layers import Plain
from tests.zoo.entry import Block, SelfAttention


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.blocks = nn.ModuleList(Block(24, Plain(24, 2)) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_row_that_checkpointing_recomputes_is_counted_once(reentrant):
    model = Checkpointed(reentrant)
    x = torch.randn(2, 7, 24, requires_grad=True)
    with attnscale.watch(model, rows=None) as seen:
        model(x).sum().backward()
    assert [layer.calls for layer in seen.layers.values()] == [1, 1]
    assert seen.layers["blocks.0.attention"].stats.rows.tolist() == [14, 14]


def tiny_llama(**options):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=None, **options,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_generation_with_a_cache(implementation):
    model = tiny_llama(attn_implementation=implementation)
    prompt = torch.randint(3, 64, (1, 9))
    plain = model.generate(prompt, max_new_tokens=5, do_sample=False)
    with attnscale.watch(model, rows=None) as seen:
        watched = model.generate(prompt, max_new_tokens=5, do_sample=False)
    assert torch.equal(plain, watched)
    layer = seen.layers["model.layers.0.self_attn"]
    assert (layer.heads, layer.kv_heads, layer.head_dim, layer.calls, layer.causal) == (4, 2, 12, 5, True)
    assert layer.scale_applied == pytest.approx(12**-0.5, rel=1e-6)
    assert layer.stats.rows.tolist() == [13] * 4  # nine of the prompt and four new tokens
    assert layer.stats.count.tolist() == [13 * 14 // 2] * 4


@pytest.mark.parametrize("padding", [0, 4])
def test_a_preallocated_cache(padding):
    model = tiny_llama(attn_implementation="eager")
    shown = torch.ones(2, 9, dtype=torch.long)
    shown[0, :padding] = 0
    cache = StaticCache(config=model.config, max_cache_len=32)
    with attnscale.watch(model, rows=None) as seen, torch.no_grad():
        model(torch.randint(3, 64, (2, 9)), attention_mask=shown, past_key_values=cache)
    layer = seen.layers["model.layers.1.self_attn"]
    assert layer.scale_applied == pytest.approx(12**-0.5, rel=1e-3)
    assert (layer.heads, layer.kv_heads, layer.causal) == (4, 2, True)
    length = 9 - padding
    assert layer.stats.count.tolist() == [45 + length * (length + 1) // 2] * 4


class Measured(SelfAttention):
    """Attention that measures itself, or the same without."""

    def __init__(self, measures, **options):
        super().__init__(24, 2)
        self.measures, self.options = measures, options

    def forward(self, x):
        if self.measures:
            return self.merge(attnscale.attention_with_stats(*self.project(x), **self.options)[0])
        return self.merge(attnscale.attention(*self.project(x), **self.options))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"softcap": 2.0, "scale": 0.7},
        {"attn_mask": torch.rand(7, 7) < 0.8},
        {"attn_mask": attnscale.Visibility.causal(window=3)},
        {"attn_mask": attnscale.Visibility.of_documents(torch.tensor([[0, 0, 1, 1, 1, 2, 2]]))},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_attention_that_measures_itself_is_seen_as_attention(options, mode):
    model, plain = Measured(True, **options), Measured(False, **options)
    plain.load_state_dict(model.state_dict())
    x = torch.randn(2, 7, 24)
    with mode():
        expected = model(x)
        with attnscale.watch(model, rows=None) as seen:
            output = model(x)
        with attnscale.watch(plain, rows=None) as wanted:
            plain(x)
    assert torch.equal(output, expected)
    (ours,), (theirs,) = seen.layers.values(), wanted.layers.values()
    assert ours.scale_applied == pytest.approx(theirs.scale_applied)
    assert (ours.causal, ours.softcap, ours.padding) == (theirs.causal, theirs.softcap, theirs.padding)
    for name in ("rows", "count", "mean", "std", "max", "entropy", "entropy_ratio", "top1", "jacobian_trace"):
        torch.testing.assert_close(getattr(ours.stats, name), getattr(theirs.stats, name), rtol=1e-4, atol=1e-5)
    if output.requires_grad:
        found = [torch.autograd.grad(each.square().sum(), list(model.parameters())) for each in (output, expected)]
        assert all(map(torch.equal, *found))


def test_the_path_of_a_module_around_an_attention_finds_it():
    model = GPT2LMHeadModel(GPT2Config(n_embd=24, n_head=2, n_layer=2, vocab_size=50)).eval()
    with attnscale.watch(model) as seen, torch.no_grad():
        model(torch.randint(0, 50, (1, 6)))
    assert seen.layers["transformer.h.1"] is seen.layers["transformer.h.1.attn"]
    with pytest.raises(KeyError, match=r"transformer\.h\.0\.attn"):
        seen.layers["transformer"]


def test_the_table_names_every_layer():
    model = Checkpointed(reentrant=False)
    with attnscale.watch(model) as seen, torch.no_grad():
        model(torch.randn(1, 5, 24))
    assert [name for name in dir(seen) if not name.startswith("_")] == ["calls", "layers", "plot", "to_pandas"]
    lines = str(seen).splitlines()
    assert lines[0].split()[:3] == ["layer", "kind", "heads"]
    assert [line.split()[0] for line in lines[1:]] == ["blocks.0.attention", "blocks.1.attention"]


@pytest.mark.parametrize(
    ("model", "run", "message"),
    [
        (torch.softmax, len, r"torch\.nn\.Module"),
        (nn.Linear(1, 1), repr, "no module of it was called"),
        (nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), lambda model: model[0](torch.randn(2, 4)), "saw none"),
        (Plain(24, 2), lambda model: model(torch.randn(0, 5, 24)), "empty batch or sequence"),
        (Plain(24, 2), lambda model: model(torch.randn(2, 0, 24)), "empty batch or sequence"),
    ],
)
def test_a_model_in_which_nothing_was_seen_is_an_error_that_says_why(model, run, message):
    with pytest.raises(AttnscaleError, match=message), attnscale.watch(model), torch.no_grad():
        run(model)


@pytest.mark.parametrize("rows", [0, -1, 2.5, True])
def test_invalid_rows_are_refused(rows):
    with pytest.raises(AttnscaleError, match="whole number"), attnscale.watch(nn.Linear(1, 1), rows=rows):
        pass


def test_the_attention_of_another_model_is_not_counted():
    model, other = Block(24, Plain(24, 2)), Block(24, Plain(24, 3))
    x = torch.randn(1, 5, 24)
    with attnscale.watch(model) as seen, torch.no_grad():
        other(x)
        model(x)
    assert [layer.heads for layer in seen.layers.values()] == [2]


def test_a_table_of_rotary_angles_made_by_a_product_is_no_query():
    class Rotary(SelfAttention):
        def forward(self, x):
            query, key, value = self.project(x)
            angles = torch.ones(1, self.head_dim, 1) @ torch.arange(x.shape[1], dtype=x.dtype)[None, None]
            turn = torch.outer(torch.arange(x.shape[1], dtype=x.dtype), torch.ones(3)) @ torch.ones(3, self.head_dim)
            query, key = query * angles.mT.cos() + query * turn.sin(), key * angles.mT.cos() + key * turn.sin()
            return self.merge(torch.softmax(query @ key.mT / self.head_dim**0.5, -1) @ value)

    model = Rotary(24, 2)
    with attnscale.watch(model) as seen, torch.no_grad():
        model(torch.randn(2, 7, 24))
    layer = seen.layers["Rotary"]
    assert (layer.heads, layer.kv_heads, layer.head_dim) == (2, 2, 12)
    assert layer.scale_applied == pytest.approx(12**-0.5, rel=1e-6)


def test_a_constant_on_pieces_of_the_weights_counts_once():
    class Pieces(SelfAttention):
        def forward(self, x):
            query, key, value = self.project(x)
            weights = torch.softmax(query @ key.mT, -1) * 0.25
            return self.merge(weights[..., :3] @ value[:, :, :3] + weights[..., 3:] @ value[:, :, 3:])

    model = Pieces(24, 2)
    with attnscale.watch(model) as seen, torch.no_grad():
        model(torch.randn(2, 7, 24))
    assert seen.layers["Pieces"].wiring.factor_after_softmax == pytest.approx(0.25)


@pytest.fixture(scope="module")
def doubled():
    """An operation that is made of others, and on this device all the same one kernel, which rounds otherwise."""
    library = torch.library.Library("attnscale_test", "FRAGMENT")
    library.define("doubled(Tensor x) -> Tensor")
    library.impl("doubled", lambda x: (x.exp() * 2).log() / 2, "CompositeImplicitAutograd")
    library.impl("doubled", lambda x: x * 2, "CPU")
    yield torch.ops.attnscale_test.doubled
    library._destroy()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_operation_with_its_own_kernel_is_not_decomposed(doubled, mode):
    class Doubling(Plain):
        def forward(self, x):
            return super().forward(doubled(x))

    model, x = Doubling(24, 2), torch.randn(2, 5, 24)
    with mode():
        expected = model(x)
        with attnscale.watch(model) as seen:
            assert torch.equal(model(x), expected)
    assert seen.layers["Doubling"].calls == 1


def test_norms_of_attention_written_out_are_over_every_entry_of_a_batch():
    model, x = Plain(10, 2), torch.randn(3, 7, 10) * torch.tensor([1.0, 10.0, 100.0]).view(3, 1, 1)
    with attnscale.watch(model, rows=None) as seen, torch.no_grad():
        model(x)
        layer, (query, key, _) = seen.layers["Plain"], model.project(x)
    for vectors, found in ((query, layer.query_norm), (key, layer.key_norm)):
        torch.testing.assert_close(found, vectors.double().square().sum(-1).mean((0, 2)).sqrt())


@pytest.mark.parametrize(("scale", "is_causal", "applied"), [(-0.3, False, -0.3), (0.0, False, 0.0), (0.0, True, 0.0)])
def test_a_scale_that_is_not_above_zero_is_shown(scale, is_causal, applied):
    model = Measured(False, scale=scale, is_causal=is_causal)
    with torch.no_grad(), attnscale.watch(model) as seen:
        model(torch.randn(2, 7, 24))
    assert seen.layers["Measured"].scale_applied == pytest.approx(applied, abs=1e-20)


def test_attention_written_out_is_measured_in_blocks_of_rows(monkeypatch):
    model, x = Plain(24, 2), torch.randn(2, 11, 24)
    with attnscale.watch(model) as whole:
        model(x)
    monkeypatch.setattr("attnscale.watching.rows.BLOCK_SCORES", 2 * 2 * 11 * 3)
    with attnscale.watch(model) as joined:
        model(x)
    (one,), (other,) = whole.layers.values(), joined.layers.values()
    torch.testing.assert_close(other.stats.entropy, one.stats.entropy)
    torch.testing.assert_close(other.stats.sink, one.stats.sink)
