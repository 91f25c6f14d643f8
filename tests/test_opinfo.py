"""What torch tests its own attention with, given to ours: the samples of its operator and module databases."""

import copy
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


def made(name, training):
    """A module of torch for every sample of the database, and its twin with our attention inside."""
    info = modules()[name]
    torch.manual_seed(0)
    for sample in info.module_inputs_func(info, "cpu", torch.float64, requires_grad=True, training=training):
        given = sample.constructor_input
        theirs = info.module_cls(*given.args, **given.kwargs).double().train(training)
        ours = copy.deepcopy(theirs)
        for path, module in list(ours.named_modules()):
            if isinstance(module, nn.MultiheadAttention):
                parent, _, own = path.rpartition(".")
                setattr(ours.get_submodule(parent), own, as_ours(module).train(training))
        yield ours, theirs, sample.forward_input


def as_ours(module):
    own = attnscale.MultiheadAttention(
        module.embed_dim, module.num_heads, module.dropout, module.in_proj_bias is not None,
        batch_first=module.batch_first, dtype=torch.float64,
    )  # fmt: skip
    own.load_state_dict(module.state_dict())
    return own


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


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("training", [True, False])
def test_transformers_with_ours_inside_are_those_of_torch(name, training):
    for ours, theirs, given in made(name, training):
        assert_twins(ours, theirs, given)
