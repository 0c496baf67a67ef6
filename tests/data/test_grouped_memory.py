"""Promise: a log is grouped by user in less memory than it has itself."""

import limited
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytestmark = [
    pytest.mark.slow,  # test_grouped.py has logs in several buckets
    limited.ON_LINUX,
]

ROWS, SHARE = 6_000_000, 3

BEFORE = """
import gc, os, resource, sys, torch
from tritonrec.data import convert_sequences, load
from tritonrec.data.grouped import sequences_of, windows_of
log, warm, allowed, how = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
torch.set_num_threads(1)
convert_sequences.BUCKET_ROWS, convert_sequences.DEALT_ROWS = 150_000, 150_000
make = {"sequences": sequences_of, "windows": lambda path: windows_of(path, 10, 5),
        "whole": lambda path: load(f"parquet:{path}")}[how]
make(warm)
"""
AFTER = """\
make(log)
print("done")
"""
PROGRAM = BEFORE + limited.LIMIT + AFTER


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """A file, its bytes in memory, and a small file."""
    random = np.random.default_rng(0)

    def written(rows):
        path = tmp_path_factory.mktemp("log") / "log.parquet"
        columns = {
            "user": random.integers(0, rows // 40, rows),
            "item": random.integers(0, 5000, rows),
            "timestamp": random.integers(10**9, 2 * 10**9, rows),
            "rating": random.integers(1, 6, rows).astype(np.float64),
        }
        table = pa.table(columns)
        pq.write_table(table, path, row_group_size=30_000)
        return path, table.nbytes

    log, size = written(ROWS)
    return log, size, written(300_000)[0]


@pytest.mark.parametrize("how", ["sequences", "windows", "whole"])
def test_a_log_of_three_times_the_memory(logs, how, tmp_path):
    log, size, small = logs
    limited.check(how == "whole", PROGRAM, log, small, size // SHARE, how, cache=tmp_path)
    assert how == "whole" or list(tmp_path.glob(f"{how}/*/part-*.parquet"))
