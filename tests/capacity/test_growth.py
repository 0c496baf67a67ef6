"""Promise: a table that outgrows a limit of the kernel's goes on as its policy says, and is refused else."""

import json
import os
import subprocess
import sys

import pytest
from speeds import slow_except

pytest.importorskip("resource", reason="Windows has no such limit")
CODE = """
import json, resource, sys, torch
from pathlib import Path
from tritonrec.capacity.bound import tells_of_memory
from tritonrec.embedding import DynamicTable, Eviction, Placement, PrecisionTiers, TablePolicy, trained_table

KEYS, WIDTH, STEPS = 2000, 192, 24
trained_table.BLOCK = 512


def grown(**way):
    table, draw = DynamicTable(64, WIDTH, chunk_rows=1024, **way), torch.Generator().manual_seed(3)
    for step in range(STEPS):
        found = table.lookup(torch.arange(KEYS) * 17 + step * KEYS * 17, step)
        table.update(found.handles, torch.randn(KEYS, WIDTH, generator=draw), found.low_precision)
    return table


way = eval(sys.argv[1])
grown(**way)  # compiles, and starts threads
had = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_DATA, (had + (int(sys.argv[2]) << 20), -1))
try:
    table = grown(**way)  # 36.9 MB of rows
except (MemoryError, RuntimeError) as error:
    assert tells_of_memory(error), error
    print('"refused"')
    sys.exit()
resource.setrlimit(resource.RLIMIT_DATA, (-1, -1))
found = vars(table.counters) | {"values": 4 * WIDTH * len(table) - table.memory()["saved_by_fp16"]}
if "placement" in way:
    (keys, rows), (others, expected) = table.export(), grown().export()
    found["same"] = torch.equal(keys, others) and torch.equal(rows, expected)
print(json.dumps(found))
"""
WAYS = {
    "nothing": "{}",
    "evict": "{'policy': TablePolicy(Eviction('lru', capacity='12MiB'))}",
    "demote": "{'policy': TablePolicy(precision=PrecisionTiers('21MiB', every=2))}",
    "demote and evict": "{'policy': TablePolicy(Eviction('lru', capacity=24_000),"
    " precision=PrecisionTiers('11MiB', every=2))}",
    "spill": "{'placement': Placement('disk', memory='3500KiB', path='.')}",
}
MIB = {"spill": 8}
"""Of the limit, 35 by default: a table on disk has ten times its memory."""


@pytest.mark.if_changed
@pytest.mark.every_case
@pytest.mark.parametrize("way", slow_except(["nothing", "demote", "spill"], WAYS))
def test_each_policy_keeps_a_table_below_the_limit(way, tmp_path):
    command = [sys.executable, "-c", CODE, WAYS[way], str(MIB.get(way, 35))]
    returned = {"MALLOC_MMAP_THRESHOLD_": "65536"}
    ran = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, timeout=300, env={**os.environ, **returned}
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert (found == "refused") == (way == "nothing")
    if way == "nothing":
        return
    assert (found["evicted"] > 0) == ("evict" in way) and (found["demoted"] > 0) == ("demote" in way)
    assert (found["disk_written"] > 0) == (way == "spill") == found.get("same", False)
    if way == "demote":  # to the row, but for the new ones of the steps since the last pass
        beyond = found["values"] + 48 * 48_000 - (21 << 20) - 2 * 2000 * (4 * 192 + 48)
        assert -2 * 192 < beyond <= 0
