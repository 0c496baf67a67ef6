"""The implementations of the ops alone, without torch's dispatcher, shape checks and derivatives.

For callers inside the package whose tensors are plain and fit by construction: `data`, `embedding`,
`checkpoint` and `pipeline`. (The dispatcher also imports torch's compiler, a second of each process's start.)
A function takes the arguments of its op's schema in order, and `impl` by keyword (`kernels.op.Op.launch`).
Row numbers and overlaps are still checked: a wrong one would read or write any memory.
"""

from tritonrec.kernels.bucketize.op import BUCKETIZE, COUNTING_SORT, OWNER_OF
from tritonrec.kernels.fixed_point.op import FROM_FIXED_POINT, TO_FIXED_POINT
from tritonrec.kernels.hash_table.op import HASH_ERASE, HASH_FIND, HASH_GROW, HASH_INSERT
from tritonrec.kernels.intersect.op import INTERSECT, INTERSECT_PADDED
from tritonrec.kernels.packed_rows.op import ADD_PACKED_ROWS, PACK_ROWS
from tritonrec.kernels.philox.op import INITIAL_ROWS, INITIAL_ROWS_OF_TABLES, RANDOM_INDICES
from tritonrec.kernels.rows.op import GATHER_ROWS, SCATTER_ROWS, SEGMENT_SUM, SEGMENT_SUM_INTO
from tritonrec.kernels.sparse_optimizers.op import SPARSE_LAZY_DECAY, SPARSE_UPDATES
from tritonrec.kernels.sum_of_squares.op import SUM_OF_SQUARES
from tritonrec.kernels.unique.op import UNIQUE, UNIQUE_PADDED, UNIQUE_TABLE

add_packed_rows = ADD_PACKED_ROWS.launch
bucketize = BUCKETIZE.launch
counting_sort = COUNTING_SORT.launch
from_fixed_point = FROM_FIXED_POINT.launch
gather_rows = GATHER_ROWS.launch
hash_erase = HASH_ERASE.launch
hash_find = HASH_FIND.launch
hash_grow = HASH_GROW.launch
hash_insert = HASH_INSERT.launch
initial_rows = INITIAL_ROWS.launch
initial_rows_of_tables = INITIAL_ROWS_OF_TABLES.launch
intersect = INTERSECT.launch
intersect_padded = INTERSECT_PADDED.launch
owner_of = OWNER_OF.launch
pack_rows = PACK_ROWS.launch
random_indices = RANDOM_INDICES.launch
scatter_rows = SCATTER_ROWS.launch
segment_sum = SEGMENT_SUM.launch
segment_sum_into = SEGMENT_SUM_INTO.launch
sparse_lazy_decay = SPARSE_LAZY_DECAY.launch
sparse_update = {rule: op.launch for rule, op in SPARSE_UPDATES.items()}
sum_of_squares = SUM_OF_SQUARES.launch
to_fixed_point = TO_FIXED_POINT.launch
unique = UNIQUE.launch
unique_padded = UNIQUE_PADDED.launch
unique_table = UNIQUE_TABLE.launch
