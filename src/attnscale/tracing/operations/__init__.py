"""Every operation of the running model -> its place in the lineage.

Operations reach this as ATen's: einsum, matmul and `@` have become bmm and views by then. What is not named here is
taken as elementwise where its result has the shape of an operand, and as the beginning of a lineage otherwise.
"""

from attnscale.tracing.operations import arithmetic, moving
from attnscale.tracing.operations.operation import Operation, Result, moved, unknown

__all__ = ["Operation", "moved", "read"]

READERS = moving.READERS | arithmetic.READERS


def read(operation: Operation) -> Result:
    """The node of the result, or of each of several results."""
    return READERS.get(operation.name, unknown)(operation)
