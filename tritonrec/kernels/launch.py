"""The implementations of the ops alone, without torch's dispatcher, shape checks and derivatives.

For the hot paths of the package, `embedding` and `pipeline`, whose tensors are plain and fit by construction. A
function takes all arguments of its op's schema in their order, and `impl` by keyword (`kernels.op.Op.launch`).
Row numbers and overlaps are still checked: a wrong one would read or write any memory.
"""

from tritonrec.kernels.unique.register import UNIQUE

unique = UNIQUE.launch
