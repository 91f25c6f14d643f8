"""Operations as they reach a tracer."""

from contextlib import suppress

import torch

from attnscale.tracing import READERS, Tracer
from attnscale.tracing.lineage import Lineage, Node
from attnscale.watching.kernels import traits_of

FUSED_ON_CUDA = {"_fused_rms_norm"}  # one kernel there, which a build of torch without CUDA does not show
OF_NESTED_TENSORS = {"matmul", "softmax"}  # composite otherwise


def overloads(name):
    """Yield the traits of all forms of an operation, but those that TorchScript alone knows."""
    for written in (name, f"{name}_"):
        packet = getattr(torch.ops.aten, written, None)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            with suppress(RuntimeError):
                yield traits_of(getattr(packet, overload))


def test_no_reader_waits_for_an_operation_that_arrives_in_parts():
    for name in set(READERS) - FUSED_ON_CUDA - OF_NESTED_TENSORS:
        traits = list(overloads(name))
        assert traits, f"torch has no operation {name}"
        assert any(not each.is_composite or each.fused_on for each in traits), f"{name} is decomposed"


def test_an_unknown_operation_that_keeps_the_shape_is_followed():
    tracer = Tracer(Lineage(), lambda: ("",), lambda scores, node, axis, by="": None)
    x = torch.randn(2, 3)
    tracer.lineage.write(x, Node((2, 3), learned=True))
    tracer.read("erf", (x,), {}, y := torch.erf(x), is_mutable=False)
    tracer.read("cumsum", (x, 1), {}, z := x[:, :2].clone(), is_mutable=False)
    assert [step.effect for step in tracer.lineage.node(y).steps] == ["other"]
    assert tracer.lineage.node(z).steps == ()
    assert tracer.lineage.node(z).learned
