"""Measuring inside compiled models on a GPU: the same numbers, CUDA graphs, and nothing that is waited for."""

import warnings

import pytest
import torch

from attnscale import QKClip
from attnscale.attending.call import Call
from attnscale.errors import NotInsideWarning
from attnscale.measure.largest import raise_largest_

from ..measure.test_largest import NAMES, full_matrix, visibilities
from .models import flex, llama, small_model, tokens
from .runs import CUDA, assert_same_parameters, clipped, eager, monitored, train

pytestmark = CUDA
WAYS = {
    "inductor": torch.compile,
    "cuda graphs": lambda model: torch.compile(model, mode="reduce-overhead"),
    "dynamic": lambda model: torch.compile(model, dynamic=True, fullgraph=True),
}
MODELS = {
    "flex": lambda: flex("documents", layers=2, width=128, device="cuda"),
    "Hugging Face, SDPA": lambda: llama("sdpa", 128, 2).cuda(),
    "Hugging Face, flex": lambda: llama("flex_attention", 128, 2).cuda(),
    "Hugging Face, written out": lambda: llama("eager", 128, 2).cuda(),
}


def model():
    return small_model(d_model=128).cuda()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_heads_over_the_limit_have_their_largest_score(name, dtype, softcap):
    torch.manual_seed(0)
    query, key = 3 * torch.randn(2, 4, 301, 64, device="cuda"), torch.randn(2, 2, 333, 64, device="cuda")
    query[:, 0] *= 4
    with torch.device("cuda"):
        seen = visibilities(2, 4, 301, 333)[name]
    call = Call(query.to(dtype), key.to(dtype), key.to(dtype), seen, 0.0, 0.125, softcap)
    expected = full_matrix(call).amax((0, 2, 3))
    limit = float(expected.sort().values[1:3].mean())
    largest = torch.full((4,), -torch.inf, device="cuda")
    raise_largest_(largest, torch.tensor([limit], device="cuda"), torch.zeros((), device="cuda"), call)
    over = expected > limit
    assert torch.allclose(largest[over], expected[over].float(), rtol=1e-4)
    assert (largest[~over] <= limit).all()


def assert_close(found, expected, rtol, atol):
    assert len(found) == len(expected)
    for one, other in zip(expected, found, strict=True):
        for name, layer in one.layers.items():
            for number, values in layer.numbers.items():
                assert other.layers[name].numbers[number] == pytest.approx(values, rel=rtol, abs=atol), (name, number)


@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_model_records_the_numbers_of_an_eager_one(way):
    expected, losses = monitored(model, eager, 6, every=2, device="cuda")
    torch._dynamo.reset()
    found, same = monitored(model, WAYS[way], 6, every=2, device="cuda")
    assert torch.allclose(losses, same, rtol=1e-3)
    assert len(found) == 3
    assert_close(found, expected, 2e-2, 1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_model_is_clipped_as_an_eager_one(way):
    expected, _ = clipped(model, eager, 0.5, 6, device="cuda")
    found, clip = clipped(model, WAYS[way], 0.5, 6, device="cuda")
    assert clip.last is not None
    assert_same_parameters(found, expected, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_flex_attention_and_models_of_hugging_face_take_probes(name):
    expected, _ = monitored(MODELS[name], eager, 3, device="cuda", bfloat16=True)
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found, _ = monitored(MODELS[name], torch.compile, 3, device="cuda", bfloat16=True)
    assert not any(issubclass(each.category, NotInsideWarning) for each in caught)
    assert_close(found, expected, 5e-2, 1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_flex_attention_and_models_of_hugging_face_are_clipped_inside(name):
    expected, _ = clipped(MODELS[name], eager, 0.2, 3, device="cuda", bfloat16=True)
    torch._dynamo.reset()
    found = MODELS[name]()
    run = torch.compile(found)
    with QKClip(found, 0.2) as clip:
        train(found, run, 3, after=clip.step, device="cuda", bfloat16=True)
        assert clip.is_inside
        assert clip.last is not None
    assert_same_parameters(found, expected, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_waited_for_where_scores_are_in_range(way):
    net = model()
    run, clip = WAYS[way](net), QKClip(net, 100.0)
    train(net, run, 4, after=clip.step, device="cuda")
    given = tokens(0, device="cuda")[:, :-1]
    run(given).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer = torch.optim.SGD(net.parameters(), 1e-6)
        for _ in range(3):
            run(given).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            clip.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert clip.last is None
    clip.close()
