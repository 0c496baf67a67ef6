"""Promise: a stream of a log of ten times the memory that data may take."""

import limited
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytestmark = limited.ON_LINUX

LENGTH, SHARE = 50, 10

BEFORE = """
import gc, resource, sys, torch
from tritonrec.data import NextItemStream
folder, warm, allowed, how = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
torch.set_num_threads(1)

def stream(path):
    items = torch.arange(1000)
    return NextItemStream(path, 256, 50, 2, 3, catalogue=items, buffer_rows=1024, readers=4)

def train(made):
    return sum(next(made).num_samples for _ in range(made.steps_per_epoch))

train(stream(warm))
made = stream(folder)
"""
AFTER = """\
if how == "stream":
    assert train(made) == made.num_samples
else:
    log = [table for _numbers, table in made.rows.batches(4096)]
print("done")
"""
PROGRAM = BEFORE + limited.LIMIT + AFTER


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """A folder, its bytes in memory, and a small folder."""
    random = np.random.default_rng(0)

    def written(rows):
        path = tmp_path_factory.mktemp("log")
        offsets = pa.array(np.arange(0, rows * LENGTH + 1, LENGTH))
        table = pa.table(
            {
                name: pa.LargeListArray.from_arrays(
                    offsets, pa.array(np.sort(random.integers(0, 2**62, (rows, LENGTH))).ravel())
                )
                for name in ("item", "timestamp")
            }
        )
        pq.write_table(
            table, path / "a.parquet", row_group_size=4096, use_dictionary=False, compression="none",
            data_page_size=1 << 16,
        )  # fmt: skip
        return path, table.nbytes

    folder, size = written(70_000)
    return folder, size, written(20_000)[0]  # of several row groups, as the other one


@pytest.mark.if_changed
@pytest.mark.parametrize("how", ["stream", pytest.param("whole", marks=pytest.mark.slow)])
def test_a_log_of_ten_times_the_memory(logs, how):
    folder, size, small = logs
    limited.check(how == "whole", PROGRAM, folder, small, size // SHARE, how)
