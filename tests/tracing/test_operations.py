"""Operations as they reach a watcher, and what becomes of a tensor's role under each effect."""

from contextlib import suppress

import pytest
import torch

from attnscale.tracing.lineage import Ledger, Node, moved
from attnscale.tracing.operations import READERS, WHOLE
from attnscale.tracing.product import Product
from attnscale.tracing.roles import (
    EVERY,
    AboutScores,
    AboutWeights,
    Exponential,
    ExponentialSum,
    InverseSum,
    LogSum,
    LogWeights,
    LostWeights,
    Mixed,
    MixedByPowers,
    Noise,
    Outer,
    Scores,
    Softmax,
    Weights,
)
from attnscale.tracing.tracer import Tracer
from attnscale.watching.op_traits import traits_of

FUSED_ON_CUDA = {"_fused_rms_norm"}  # one kernel there, which a build of torch without CUDA does not show


def overloads(name):
    """The traits of all forms of an operation, but those that TorchScript alone knows."""
    for written in (name, f"{name}_"):
        packet = getattr(torch.ops.aten, written, None)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            with suppress(RuntimeError):
                yield traits_of(getattr(packet, overload))


@pytest.mark.parametrize("name", sorted(set(READERS) - FUSED_ON_CUDA - set(WHOLE)))
def test_no_reader_waits_for_an_operation_that_arrives_in_parts(name):
    traits = list(overloads(name))
    assert traits, "torch has no such operation"
    assert any(not each.is_composite or each.fused_on for each in traits), "it is decomposed before a mode sees it"


PRODUCT = Product(torch.zeros(2, 3), torch.zeros(3, 2), Node((2, 3)), Node((3, 2)), ("",), (2, 2), object())
SOFTMAX = Softmax(axis=-1)
ELEMENTWISE = EVERY - {"norm", "exp"}
MOVED = {"same", "detach"}
ROLES = {
    Scores: (Scores(PRODUCT), ELEMENTWISE),
    AboutScores: (AboutScores(PRODUCT), EVERY),
    Exponential: (Exponential(PRODUCT, Node((2, 2))), MOVED | {"fill"}),
    ExponentialSum: (ExponentialSum(PRODUCT, Node((2, 2)), 1), MOVED | {"plus"}),
    InverseSum: (InverseSum(PRODUCT, Node((2, 2)), 1), MOVED),
    LogSum: (LogSum(PRODUCT, 1), MOVED | {"plus"}),
    LogWeights: (LogWeights(SOFTMAX), MOVED),
    Weights: (Weights(SOFTMAX), ELEMENTWISE),
    AboutWeights: (AboutWeights(SOFTMAX), EVERY),
    Noise: (Noise(), MOVED | {"times", "over"}),
    LostWeights: (LostWeights("attention"), ELEMENTWISE),
    Mixed: (Mixed(SOFTMAX), MOVED | {"times", "over"}),
    MixedByPowers: (MixedByPowers(PRODUCT, torch.zeros(2, 2), Node((2, 2))), MOVED),
    Outer: (Outer(torch.zeros(2, 1), torch.zeros(1, 2)), set()),
}


@pytest.mark.parametrize("effect", sorted(EVERY))
@pytest.mark.parametrize("kind", ROLES)
def test_a_role_is_passed_on_by_the_one_rule_or_leaves_what_it_was_about(kind, effect):
    role, survives = ROLES[kind]
    after = moved(Node((2, 2), role=role), (2, 2), None, effect).role
    if effect in survives:
        assert after is role
    elif isinstance(role, Weights):
        assert isinstance(after, AboutWeights)
        assert after.softmax is SOFTMAX
    elif role.product is None:
        assert after is None
    else:
        assert isinstance(after, AboutScores)
        assert after.product is PRODUCT


def test_an_operation_that_nobody_knows_is_followed_where_it_keeps_the_shape():
    tracer = Tracer(Ledger(), lambda: ("",), lambda scores, node, axis, by="": None)
    x = torch.randn(2, 3)
    tracer.ledger.write(x, Node((2, 3), learned=True))
    tracer.read("erf", (x,), {}, y := torch.erf(x), is_mutable=False)
    tracer.read("cumsum", (x, 1), {}, z := x[:, :2].clone(), is_mutable=False)
    assert [step.effect for step in tracer.ledger.node(y).steps] == ["other"]
    assert tracer.ledger.node(z).steps == ()
    assert tracer.ledger.node(z).learned
