"""Promise: a log of text is written as shards in less memory than it has itself."""

import limited
import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pytest

from tritonrec.data.presets import CRITEO_CATEGORIES as CATEGORIES
from tritonrec.data.presets import CRITEO_COUNTS as COUNTS

pytestmark = [
    pytest.mark.slow,  # test_log_parts.py has logs in several parts and buckets
    limited.ON_LINUX,
]

ROWS, SHARE = {"csv": 2_400_000, "criteo-tsv": 250_000}, {"csv": 2, "criteo-tsv": 3}

BEFORE = """
import gc, resource, sys, torch
from tritonrec.data import convert_sequences, grouped, load, text_tables
from tritonrec.data.grouped import clicks_of, sequences_of
kind, log, warm, allowed, how = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5]
torch.set_num_threads(1)
convert_sequences.BUCKET_ROWS, convert_sequences.DEALT_ROWS = 150_000, 50_000
text_tables.BLOCK_BYTES, grouped.GROUP_CLICKS = 1 << 16, 1 << 11
columns = "?columns=user,item,timestamp,rating&time_unit=step" if kind == "csv" else ""
make = lambda path: {"csv": sequences_of, "criteo-tsv": clicks_of}[kind](f"{kind}:{path}{columns}")
if how == "whole":
    make = lambda path: load(f"{kind}:{path}{columns}")
make(warm)
"""
AFTER = """\
make(log)
print("done")
"""
PROGRAM = BEFORE + limited.LIMIT + AFTER


def table(kind, rows, random):
    if kind == "csv":
        columns = {
            "user": random.integers(0, rows // 40, rows),
            "item": random.integers(0, 5000, rows),
            "timestamp": random.integers(0, 2**40, rows),
            "rating": random.integers(1, 6, rows),
        }
        return pa.table(columns), 8 * 4 * rows
    names = {"label": random.integers(0, 2, rows)} | {name: random.integers(0, 99, rows) for name in COUNTS}
    words = np.char.mod("%08x", random.integers(0, 2**32, 997))
    names |= {name: words[random.integers(0, 997, rows)] for name in CATEGORIES}
    return pa.table(names), (8 + 4 * len(COUNTS) + 8 * len(CATEGORIES)) * rows


@pytest.fixture(scope="module", params=list(ROWS))
def logs(request, tmp_path_factory):
    """The kind, a file, its bytes as a log in memory, and a small file."""
    random = np.random.default_rng(0)

    def written(rows):
        path = tmp_path_factory.mktemp("log") / "log.gz"
        made, size = table(request.param, rows, random)
        delimiter = "," if request.param == "csv" else "\t"
        options = pc.WriteOptions(include_header=False, delimiter=delimiter, quoting_style="none")
        with pa.CompressedOutputStream(path, "gzip") as out:
            pc.write_csv(made, out, options)
        return path, size

    log, size = written(ROWS[request.param])
    return request.param, log, size, written(ROWS[request.param] // 15)[0]


@pytest.mark.parametrize("how", ["parts", "whole"])
def test_a_log_of_twice_the_memory_or_more(logs, how, tmp_path):
    kind, log, size, small = logs
    limited.check(how == "whole", PROGRAM, kind, log, small, size // SHARE[kind], how, cache=tmp_path)
    assert how == "whole" or list(tmp_path.glob("*/*/part-*.parquet"))
