"""Measuring inside compiled models on a GPU: the same numbers, CUDA graphs, and nothing that is waited for."""

import pytest
import torch

from attnscale.attending.call import Call
from attnscale.measure.largest import raise_largest_

from ..measure.test_largest import NAMES, full_matrix, visibilities
from .runs import clipped, monitored, small_model, tokens, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # torch's own, which differ from version to version
]
WAYS = {
    "inductor": lambda model: torch.compile(model),
    "cuda graphs": lambda model: torch.compile(model, mode="reduce-overhead"),
    "dynamic": lambda model: torch.compile(model, dynamic=True, fullgraph=True),
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


@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_model_tells_what_an_eager_one_does(way):
    torch._dynamo.reset()
    (eager, plain), (found, losses) = (
        monitored(model, compiled, 6, every=2, rows=None, device="cuda")
        for compiled in (lambda model: model, WAYS[way])
    )
    assert torch.allclose(plain, losses, rtol=1e-3)
    assert len(eager) == len(found) == 3
    for one, other in zip(eager, found, strict=True):
        for name, layer in one.layers.items():
            for number, values in layer.numbers.items():
                assert other.layers[name].numbers[number] == pytest.approx(values, rel=2e-2), (way, name, number)


@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_model_is_clipped_as_an_eager_one(way):
    torch._dynamo.reset()
    one, _, _ = clipped(model, lambda model: model, 0.5, 6, device="cuda")
    other, clip, _ = clipped(model, WAYS[way], 0.5, 6, device="cuda")
    assert clip.last is not None
    for (name, expected), found in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.allclose(expected, found, rtol=1e-2, atol=1e-4), (way, name)


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_waited_for_where_scores_are_in_range(way):
    torch._dynamo.reset()
    from attnscale import QKClip

    made = model()
    run, clip = WAYS[way](made), QKClip(made, 100.0)
    train(made, run, 4, after=clip.step, device="cuda")
    given = tokens(0, device="cuda")[:, :-1]
    run(given).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer = torch.optim.SGD(made.parameters(), 1e-6)
        for _ in range(3):
            run(given).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            clip.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert clip.last is None
    clip.close()
