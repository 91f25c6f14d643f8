"""FlexAttention and Hugging Face models in training, compiled on a GPU."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attnscale import Monitor, QKClip
from attnscale.errors import NotInsideWarning

from .runs import VOCABULARY, LlamaLogits, clipped, monitored, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # torch's own, which differ from version to version
]


class Flex(nn.Module):
    """Two layers of documents, by FlexAttention, each with a residual."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, 128), nn.Linear(128, VOCABULARY)
        self.layers = nn.ModuleList(FlexLayer() for _ in range(2))

    def forward(self, given):
        x = self.embedding(given)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class FlexLayer(nn.Module):
    """Its attention."""

    def __init__(self):
        super().__init__()
        self.made = nn.Linear(128, 384)
        documents = torch.arange(24, device="cuda") // 7
        self.block_mask = create_block_mask(
            lambda b, h, i, j: (documents[i] == documents[j]) & (j <= i), None, None, 24, 24, device="cuda"
        )

    def forward(self, x):
        query, key, value = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.made(x).chunk(3, -1))
        return flex_attention(query, key, value, block_mask=self.block_mask).transpose(1, 2).flatten(2)


MODELS = {
    "flex": lambda: Flex().cuda(),
    "Hugging Face, sdpa": lambda: LlamaLogits("sdpa", 128, 2).cuda(),
    "Hugging Face, flex": lambda: LlamaLogits("flex_attention", 128, 2).cuda(),
    "Hugging Face, written out": lambda: LlamaLogits("eager", 128, 2).cuda(),
}


TRACED = {"flex", "Hugging Face, flex"}  # their kernels take no probe


@pytest.mark.parametrize("model", MODELS)
def test_sampled_steps_are_measured_inside(model):
    torch._dynamo.reset()
    expected, _ = monitored(MODELS[model], lambda model: model, 3, device="cuda", bfloat16=True)
    torch._dynamo.reset()
    made, found = MODELS[model](), []
    run = torch.compile(made)
    monitor = Monitor(made, 1, None, [found.append])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(made, run, 3, after=monitor.step, device="cuda", bfloat16=True)
        monitor.close()
    assert any(issubclass(each.category, NotInsideWarning) for each in caught) == (model in TRACED)
    for one, other in zip(expected, found, strict=True):
        for name, layer in one.layers.items():
            for number, values in layer.numbers.items():
                assert other.layers[name].numbers[number] == pytest.approx(values, rel=5e-2, abs=1e-4), (name, number)


@pytest.mark.parametrize("model", MODELS)
def test_heads_are_clipped_inside(model):
    torch._dynamo.reset()
    one, _, _ = clipped(MODELS[model], lambda model: model, 0.2, 3, device="cuda", bfloat16=True)
    torch._dynamo.reset()
    made = MODELS[model]()
    run = torch.compile(made)
    with QKClip(made, 0.2) as clip:
        train(made, run, 3, after=clip.step, device="cuda", bfloat16=True)
        assert clip.is_inside == (model not in TRACED)
        assert clip.last is not None
    for (name, expected), found in zip(one.named_parameters(), made.parameters(), strict=True):
        assert torch.allclose(expected, found, rtol=2e-2, atol=1e-3), name
