"""Small models in training, plain or looked at, and what they were seen to do."""

import torch
import torch.nn.functional as F
from torch import nn

from attnscale import Monitor, QKClip
from attnscale.models import CausalTransformer

VOCABULARY = 31


def small_model(**changes):
    """Two layers of two heads."""
    torch.manual_seed(0)
    return CausalTransformer(VOCABULARY, **({"d_model": 32, "layers": 2, "heads": 2} | changes))


def tokens(step, batch=3, length=24, device="cpu"):
    """The batch of a step."""
    drawn = torch.randint(0, VOCABULARY, (batch, length + 1), generator=torch.Generator().manual_seed(step))
    return drawn.to(device)


def train(model, run=None, steps=4, *, after=lambda: None, micro=1, rate=0.1, batches=tokens, device="cpu", **autocast):
    """Losses of so many steps of SGD; `run` is what calls the model, compiled perhaps."""
    run = model if run is None else run
    optimizer = torch.optim.SGD(model.parameters(), rate)
    losses = []
    for step in range(steps):
        for part in range(micro):
            given = batches(100 * part + step, device=device)
            with torch.autocast(device, torch.bfloat16, enabled=bool(autocast)):
                logits = run(given[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), given[:, 1:].flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


def monitored(make, compiled, steps=4, *, every=1, rows=None, **training):
    """Records of a model in training, and its losses: `compiled` makes what runs of a model."""
    model, records = make(), []
    run = compiled(model)
    monitor = Monitor(model, every, rows, [records.append])
    losses = train(model, run, steps, after=monitor.step, **training)
    monitor.close()
    return records, losses


def clipped(make, compiled, threshold, steps=4, **training):
    """A model after training with QKClip, the clip, and its reports."""
    model, reports = make(), []
    run = compiled(model)
    clip = QKClip(model, threshold)
    train(model, run, steps, after=lambda: reports.append(clip.step()), **training)
    clip.close()
    return model, clip, [*filter(None, reports)]


class Reused(nn.Module):
    """One attention that runs three times in a forward, as ALBERT's does, and one beside it that attends twice."""

    def __init__(self, width=16, heads=2):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.again, self.twice = Attention(width, heads, 1), Attention(width, heads, 2)

    def forward(self, given):
        x = 0.1 * self.embedding(given)
        for _ in range(3):
            x = x + 0.1 * self.again(x)
        return self.head(x + 0.1 * self.twice(x))


class Attention(nn.Module):
    """Attends so many times in one run, each time with projections of its own."""

    def __init__(self, width, heads, times):
        super().__init__()
        self.heads = heads
        self.made = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(times))

    def forward(self, x):
        for made in self.made:
            query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in made(x).chunk(3, -1))
            if made is self.made[0]:
                out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            else:
                out = F.scaled_dot_product_attention(query, key, value)
            x = x + out.transpose(1, 2).flatten(2)
        return x


class LlamaLogits(nn.Module):
    """A Hugging Face Llama with two keys for four heads, called with tokens alone."""

    def __init__(self, implementation, width, layers):
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=width, intermediate_size=width, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=VOCABULARY, use_cache=False, attn_implementation=implementation,
        )  # fmt: skip
        self.inner = LlamaForCausalLM(config)

    def forward(self, given):
        return self.inner(input_ids=given).logits


def whole(backend="aot_eager", **settings):
    return lambda model: torch.compile(model, backend=backend, **settings)


WAYS = {  # of compiling a model with `layers`
    "dynamic": whole(dynamic=True),
    "no autograd": whole("eager"),
    "each layer": lambda model: (
        [layer.compile(backend="aot_eager", fullgraph=True) for layer in model.layers] and model
    ),
}
