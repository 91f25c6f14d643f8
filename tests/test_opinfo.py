"""What torch tests its own attention with, given to ours: the samples of its operator and module databases."""

from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

import attnscale
from tests.others import OTHERS_MAY_WARN
from tests.precision import assert_as_exact_as_sdpa, worst

pytest.importorskip("expecttest")  # torch's databases import it
pytestmark = OTHERS_MAY_WARN

OURS, THEIRS = attnscale.attention, F.scaled_dot_product_attention
LAYERS = ("nn.TransformerEncoderLayer", "nn.TransformerDecoderLayer", "nn.TransformerEncoder", "nn.Transformer")


@cache
def operator():
    from torch.testing._internal.common_methods_invocations import op_db

    return next(each for each in op_db if each.name == "nn.functional.scaled_dot_product_attention")


@cache
def modules():
    from torch.testing._internal.common_modules import module_db

    return {each.name: each for each in module_db}


def samples(dtype=torch.float32, requires_grad=False, device="cpu"):
    torch.manual_seed(0)
    return [
        ((sample.input, *sample.args), sample.kwargs)
        for sample in operator().sample_inputs(device, dtype, requires_grad)
    ]


def outcome(function, args, kwargs):
    """What a function returns, drawing the same random numbers each time."""
    torch.manual_seed(5)
    return function(*args, **kwargs)


def gradients(function, args, kwargs):
    output = outcome(function, args, kwargs)
    learning = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor) and each.requires_grad]
    torch.manual_seed(3)
    return output, *torch.autograd.grad(output, learning, torch.randn_like(output))


def test_outputs_and_gradients_are_those_of_sdpa():
    for args, kwargs in samples(torch.float64, requires_grad=True):
        torch.testing.assert_close(gradients(OURS, args, kwargs), gradients(THEIRS, args, kwargs))


def test_every_dtype_of_sdpa_is_one_of_ours_and_as_exact():
    for dtype in operator().dtypes - {torch.float64}:
        for args, kwargs in samples(dtype, requires_grad=True):
            ours, theirs = gradients(OURS, args, kwargs), gradients(THEIRS, args, kwargs)
            assert [each.dtype for each in ours] == [each.dtype for each in theirs]
            if kwargs["dropout_p"]:
                continue  # what is dropped depends on the dtype
            exact = gradients(THEIRS, *tree_map(_doubled, (args, kwargs)))
            fused = gradients(_sdpa_of_full_operands, args, kwargs)
            for own, *sdpas, expected in zip(ours, theirs, fused, exact, strict=True):
                expected = expected.detach().numpy()
                assert_as_exact_as_sdpa(own, max(sdpas, key=partial(worst, expected=expected)), expected)


def _sdpa_of_full_operands(query, key, value, **kwargs):
    """SDPA fuses what has all its axes, which ours gives it; what must be broadcast it takes apart, and rounds less."""
    if not kwargs.get("enable_gqa"):
        axes = torch.broadcast_shapes(*(each.shape[:-2] for each in (query, key, value)))
        query, key, value = (each.expand(*axes, *each.shape[-2:]) for each in (query, key, value))
    return THEIRS(query, key, value, **kwargs)


def _doubled(value):
    return value.detach().double().requires_grad_() if isinstance(value, torch.Tensor) else value


def test_second_derivatives_are_right_where_sdpa_has_them():
    assert operator().supports_gradgrad
    for args, kwargs in samples(torch.float64)[::6]:
        args = tuple(arg[..., :2, :2].detach().requires_grad_() for arg in args)  # its cost grows with the square
        kwargs = {name: value[:2, :2] if isinstance(value, torch.Tensor) else value for name, value in kwargs.items()}
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels of a CPU have none
            assert torch.autograd.gradgradcheck(lambda *args, kwargs=kwargs: outcome(OURS, args, kwargs), args)


def test_what_sdpa_differentiates_twice_by_default_ours_does():
    for args, kwargs in samples(torch.float64)[::2]:
        args = tuple(arg[..., :2, :2].detach().requires_grad_() for arg in args)
        kwargs = {name: value[:2, :2] if isinstance(value, torch.Tensor) else value for name, value in kwargs.items()}
        theirs, ours = (_second_derivatives(run, args, kwargs) for run in (THEIRS, OURS))
        if theirs is not None:
            assert ours is not None
            torch.testing.assert_close(ours, theirs)


def _second_derivatives(function, args, kwargs):
    first = torch.autograd.grad(outcome(function, args, kwargs).square().sum(), args, create_graph=True)
    try:
        return torch.autograd.grad(sum(each.sin().sum() for each in first), args)
    except RuntimeError as error:
        assert "is not implemented" in str(error)  # noqa: PT017  # a kernel that has none
        return None


def test_transforms_of_torch_func_give_what_they_give_of_sdpa():
    for args, kwargs in samples(torch.float64):
        if kwargs["dropout_p"]:
            continue  # draws differ under vmap, of SDPA as of ours
        lead = 0 if args[0].dim() == args[1].dim() else None
        axes = (lead, 0, 0)
        ours, theirs = (
            torch.vmap(lambda q, k, v, kwargs=kwargs, run=run: run(q, k, v, **kwargs), axes)(*args)
            for run in (OURS, THEIRS)
        )
        torch.testing.assert_close(ours, theirs)
        grad = [
            torch.func.grad(lambda q, k, v, kwargs=kwargs, run=run: run(q, k, v, **kwargs).square().sum())(*args)
            for run in (OURS, THEIRS)
        ]
        torch.testing.assert_close(*grad)


def test_compiled_it_gives_what_sdpa_gives():
    for args, kwargs in samples()[::6]:
        torch._dynamo.reset()
        compiled = torch.compile(OURS, backend="aot_eager", fullgraph=True)
        if not kwargs["dropout_p"]:
            torch.testing.assert_close(outcome(compiled, args, kwargs), outcome(THEIRS, args, kwargs))


def test_tensors_without_values_give_shapes():
    for args, kwargs in samples():
        expected = THEIRS(*args, **kwargs)
        meta = OURS(*(arg.to("meta") for arg in args), **tree_map(lambda x: _moved(x, "meta"), kwargs))
        with FakeTensorMode() as mode:
            faked = OURS(
                *(mode.from_tensor(arg) for arg in args),
                **tree_map(lambda x: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x, kwargs),
            )
        for each in (meta, faked):
            assert (each.shape, each.dtype) == (expected.shape, expected.dtype)


def _moved(value, device):
    return value.to(device) if isinstance(value, torch.Tensor) else value


def made(name, ours, dtype, training):
    """A module and its twin for every sample of the database; with ours in the place of torch's attention."""
    info = modules()[name]
    torch.manual_seed(0)
    for sample in info.module_inputs_func(info, "cpu", dtype, requires_grad=True, training=training):
        given = sample.constructor_input
        torch.manual_seed(1)
        theirs = info.module_cls(*given.args, **given.kwargs).to(dtype).train(training)
        yield ours(info.module_cls, given, theirs, dtype).train(training), theirs, sample.forward_input


def with_ours_inside(module_cls, given, theirs, dtype):
    torch.manual_seed(1)
    twin = module_cls(*given.args, **given.kwargs).to(dtype)
    twin.load_state_dict(theirs.state_dict())
    for name, module in list(twin.named_modules()):
        if isinstance(module, nn.MultiheadAttention):
            parent = twin.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], as_ours(module, dtype))
    return twin


def as_ours(module, dtype):
    own = attnscale.MultiheadAttention(
        module.embed_dim, module.num_heads, module.dropout, module.in_proj_bias is not None,
        batch_first=module.batch_first, dtype=dtype,
    )  # fmt: skip
    own.load_state_dict(module.state_dict())
    return own


def ours_itself(module_cls, given, theirs, dtype):
    twin = attnscale.MultiheadAttention(*given.args, dtype=dtype, **given.kwargs)
    twin.load_state_dict(theirs.state_dict())
    return twin


def assert_twins(ours, theirs, given):
    results = []
    for module in (ours, theirs):
        torch.manual_seed(2)
        found = module(*given.args, **given.kwargs)
        found = found if isinstance(found, tuple) else (found,)
        inputs = [each for each in given.args if isinstance(each, torch.Tensor) and each.requires_grad]
        loss = sum(each.nan_to_num().sum() for each in found if each is not None)
        results.append((found, torch.autograd.grad(loss, [*inputs, *module.parameters()], allow_unused=True)))
    torch.testing.assert_close(*(found for found, _ in results), equal_nan=True)
    if not any(each.isnan().any() for each in results[1][0] if each is not None):
        torch.testing.assert_close(*(gradient for _, gradient in results))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_module_is_that_of_torch(dtype, training):
    for ours, theirs, given in made("nn.MultiheadAttention", ours_itself, dtype, training):
        assert_twins(ours, theirs, given)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("training", [True, False])
def test_transformers_with_ours_inside_are_those_of_torch(name, training):
    for ours, theirs, given in made(name, with_ours_inside, torch.float64, training):
        assert_twins(ours, theirs, given)


REFUSED = {
    "a mask and causality": (dict(attn_mask=torch.ones(3, 5), is_causal=True), {}),
    "a mask of whole numbers": (dict(attn_mask=torch.ones(3, 5, dtype=torch.long)), {}),
    "a mask of another precision": (dict(attn_mask=torch.ones(3, 5).double()), {}),
    "a mask of too many dimensions": (dict(attn_mask=torch.ones(1, 1, 1, 3, 5)), {}),
    "a mask that does not broadcast": (dict(attn_mask=torch.ones(2, 5)), {}),
    "dropout above one": (dict(dropout_p=2.0), {}),
    "one dimension": ({}, dict(query=torch.ones(4))),
    "whole numbers": ({}, {name: torch.ones(2, 2, 3, 4, dtype=torch.long) for name in ("query", "key", "value")}),
    "complex numbers": ({}, {name: torch.ones(2, 2, 3, 4) * 1j for name in ("query", "key", "value")}),
    "two dtypes": ({}, dict(key=torch.ones(2, 2, 5, 4).double())),
    "two devices": ({}, dict(key=torch.ones(2, 2, 5, 4, device="meta"))),
    "heads that do not divide": (dict(enable_gqa=True), dict(query=torch.ones(2, 3, 3, 4))),
    "heads that do not broadcast": ({}, dict(query=torch.ones(2, 4, 3, 4))),
    "no tensor": ({}, dict(query=[1.0])),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_sdpa_refuses_is_refused_with_its_error_and_a_sentence(name):
    options, tensors = REFUSED[name]
    given = {"query": torch.ones(2, 2, 3, 4), "key": torch.ones(2, 2, 5, 4), "value": torch.ones(2, 2, 5, 4)} | tensors
    with sdpa_kernel(SDPBackend.MATH), pytest.raises((RuntimeError, TypeError)) as theirs:
        THEIRS(**given, **options)
    for run in (attnscale.attention, attnscale.attention_with_stats):
        with pytest.raises(attnscale.AttnscaleError, match=r"^Expected .*\.$") as ours:
            run(**given, **options)
        kind = TypeError if theirs.type is TypeError else RuntimeError
        assert isinstance(ours.value, kind)
