"""What may be timed gives every thread an element, and a run that is cut short keeps what it has measured."""

import importlib
import json

import pytest
import torch
from compiling import compiled

PROGRAM = """
import json, tune
print(json.dumps({name: list(tune.candidates(name)) for name in tune.SPACES}))
"""
ELEMENTS = {"BLOCK", "ELEMENTS", "COUNTERS"}


@pytest.fixture(scope="module")
def offered():
    return json.loads(compiled("-c", PROGRAM))


def test_no_candidate_has_more_threads_than_elements(offered):
    of_one_dimension = 0
    for name, candidates in offered.items():
        assert candidates, f"{name} has nothing to try"
        for candidate in candidates:
            for elements in ELEMENTS & candidate.keys():
                if "NUM_WARPS" in candidate:
                    of_one_dimension += 1
                    assert candidate[elements] >= 32 * candidate["NUM_WARPS"], (name, candidate)
    assert of_one_dimension > 30


def test_a_tile_of_two_dimensions_may_have_short_edges(offered):
    assert {"BLOCK": 32, "num_warps": 8} in offered["linear.triton_linear"]
    assert {"BLOCK_ROWS": 4, "NUM_WARPS": 8} in offered["rows.triton_rows"]


def test_what_is_committed_is_offered(offered):
    for name, candidates in offered.items():
        module = importlib.import_module(f"tritonrec.kernels.{name}")
        if hasattr(module, "configuration"):
            continue
        committed = {key: getattr(module, key) for key in candidates[0]}
        assert committed in candidates, (name, committed)


CUT_SHORT = """
import sys, tune, torch
torch.cuda.get_device_name = lambda: "a device"
times = iter([3.0, 1.0, 2.0])

def microseconds(name, candidate):
    if name == "bucketize.triton_bucketize":
        raise KeyboardInterrupt
    if name == "fixed_point.triton_fixed_point":
        raise RuntimeError("out of resources")
    return next(times)

tune.microseconds = microseconds
from pathlib import Path
try:
    tune.tune([*tune.SPACES], Path(sys.argv[1]))
except KeyboardInterrupt:
    print("cut short")
"""


def test_each_module_is_written_before_the_next_begins(tmp_path):
    program, tables = tmp_path / "cut_short.py", tmp_path / "tune.json"
    program.write_text(CUT_SHORT)
    printed = compiled(program, tables)
    assert (
        printed.endswith("cut short\n") and 'silu.triton_silu {"BLOCK": 1024, "microseconds": 1.0}' in printed
    )
    assert json.loads(tables.read_text()) == {
        "device": "a device",
        "tables": {
            "silu.triton_silu": [
                {"BLOCK": 1024, "microseconds": 1.0},
                {"BLOCK": 2048, "microseconds": 2.0},
                {"BLOCK": 512, "microseconds": 3.0},
            ],
            "fixed_point.triton_fixed_point": [],  # no candidate ran
        },
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(AssertionError, match="there is no GPU here to time candidates on"):
        compiled("ci/compile/tune.py")
