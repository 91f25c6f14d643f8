"""Watching on a GPU: other kernels, padded heads, half precision, compiled flex."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import GPT2Config, GPT2Model, LlamaConfig, LlamaModel

import attnscale
from attnscale.models import CausalTransformer
from tests.zoo.entry import SelfAttention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # torch's own, which differ from version to version
]
BACKENDS = [
    SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH,
]  # fmt: skip


class Causal(SelfAttention):
    def forward(self, x):
        return self.merge(F.scaled_dot_product_attention(*self.project(x), is_causal=True))


@pytest.mark.parametrize("head_dim", [64, 36])
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_every_backend_of_sdpa(backend, head_dim):
    torch.manual_seed(0)
    model = Causal(4 * head_dim, 4).to("cuda", torch.bfloat16)
    x = torch.randn(2, 300, 4 * head_dim, device="cuda", dtype=torch.bfloat16)
    try:
        with sdpa_kernel(backend), torch.no_grad():
            plain = model(x)
    except RuntimeError as error:
        pytest.skip(f"no {backend.name} here: {error}")
    with sdpa_kernel(backend), torch.no_grad(), attnscale.watch(model, rows=None) as seen:
        watched = model(x)
    assert torch.equal(plain, watched)
    layer = next(iter(seen.layers.values()))
    assert (layer.heads, layer.head_dim, layer.causal) == (4, head_dim, True)
    assert layer.scale_applied == pytest.approx(head_dim**-0.5, rel=4e-3)
    query, key, _ = model.project(x)
    expected = attnscale.score_stats(query.double(), key.double(), is_causal=True)
    torch.testing.assert_close(layer.stats.std, expected.std, rtol=2e-2, atol=0.0)
    torch.testing.assert_close(layer.stats.entropy, expected.entropy, rtol=2e-2, atol=0.0)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_whole_models(kind, implementation):
    torch.manual_seed(0)
    if kind == "gpt2":
        model = GPT2Model._from_config(
            GPT2Config(n_embd=96, n_head=3, n_layer=2, vocab_size=99), attn_implementation=implementation
        )
    else:
        config = LlamaConfig(
            hidden_size=96, num_attention_heads=6, num_key_value_heads=2, num_hidden_layers=2, vocab_size=99
        )
        model = LlamaModel._from_config(config, attn_implementation=implementation)
    model = model.to("cuda").eval()
    ids = torch.randint(0, 99, (2, 50), device="cuda")
    with torch.no_grad():
        plain = model(ids)[0]
        with attnscale.watch(model) as seen:
            watched = model(ids)[0]
    assert torch.equal(plain, watched)
    heads, kv_heads, head_dim = (3, 3, 32) if kind == "gpt2" else (6, 2, 16)
    assert len(seen.layers) == 2
    for layer in seen.layers.values():
        assert (layer.heads, layer.kv_heads, layer.head_dim, layer.causal) == (heads, kv_heads, head_dim, True)
        assert layer.scale_applied == pytest.approx(head_dim**-0.5, rel=1e-3)
    assert str(seen)
    assert not [finding for finding in attnscale.audit(model, ids).findings if finding.severity == "error"]


def test_training_under_autocast():
    torch.manual_seed(0)
    model = Causal(64, 2).to("cuda")
    x = torch.randn(2, 40, 64, device="cuda")
    with torch.autocast("cuda", torch.bfloat16), attnscale.watch(model) as seen:
        model(x).float().square().mean().backward()
    layer = next(iter(seen.layers.values()))
    assert layer.scale_applied == pytest.approx(32**-0.5, rel=4e-3)
    assert layer.calls == 1


@pytest.mark.parametrize("backend", BACKENDS[:3])
def test_a_step_with_fused_norms_is_the_same_to_the_last_bit(backend, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    tokens = torch.randint(0, 256, (4, 128), device="cuda")

    def step(watched):
        torch.manual_seed(0)
        model = CausalTransformer(256, 128, 2, 2).to("cuda")
        with sdpa_kernel(backend), attnscale.watch(model) if watched else nullcontext():
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(tokens).float().logsumexp(-1).mean()
            loss.backward()
        return [loss, *(parameter.grad for parameter in model.parameters())]

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        plain, again, watched = step(False), step(False), step(True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, plain, again))  # or the comparison means nothing
    assert all(map(torch.equal, plain, watched))
