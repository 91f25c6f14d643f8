"""Every operation of the running model -> its place in the lineage.

Operations reach this as ATen's: einsum, matmul and `@` have become bmm and views by then, but what whole.py names.
What is not named here is taken as elementwise where its result has the shape of an operand, and as the beginning of a
lineage otherwise.
"""

from attnscale.tracing.operations import arithmetic, moving, products, softmaxes
from attnscale.tracing.operations.operation import Operation, Result, unknown
from attnscale.tracing.operations.whole import WHOLE

__all__ = ["READERS", "WHOLE", "Operation", "read"]

# The later know more of an operation than the earlier, and hand on what they do not: a sum may be that of a product.
READERS = moving.READERS | arithmetic.READERS | softmaxes.READERS | products.READERS


def read(operation: Operation) -> Result:
    """The node of the result, or of each of several results."""
    return READERS.get(operation.name, unknown)(operation)
