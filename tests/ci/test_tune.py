"""What may be timed has an element a thread and passed the emulator; a run cut short keeps its tables."""

import importlib
import json

import pytest
import torch
from compiling import ROOT, compiled

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

tune.microseconds, tune.passed = microseconds, tune.candidates
from pathlib import Path
try:
    tune.tune([*tune.SPACES], Path(sys.argv[1]))
except KeyboardInterrupt:
    print("cut short")
"""


@pytest.mark.slow
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


EMULATED = """
import json, sys, tune
from pathlib import Path
from tritonrec.kernels.silu import triton_silu

tune.PASSED, name, good, bad = Path(sys.argv[1]), "silu.triton_silu", {"BLOCK": 1024}, {"BLOCK": 100}
tune.candidates = lambda name: [good, bad]
assert tune.emulate(name) == [good]  # 100 is no power of two
tune.launches.CASES = {"silu": lambda: triton_silu.forward_kernel[(1,)](
    *tune.torch.ones(2, 99), 120, BLOCK=1024, num_warps=4
)}
assert tune.emulate(name) == []  # reads and writes behind its tensors
for source, passed in ((tune.digest(name), [good]), ("another", [])):
    tune.PASSED.write_text(json.dumps({name: {"source": source, "passed": [good]}}))
    assert tune.passed(name) == passed and tune.passed("linear.triton_linear") == []
"""


@pytest.mark.slow
def test_only_what_passed_the_emulator_is_timed(tmp_path):
    program = tmp_path / "emulated.py"
    program.write_text(EMULATED)
    compiled(program, tmp_path / "passed.json")


def test_the_candidates_that_passed_are_candidates(offered):
    for name, row in json.loads((ROOT / "ci" / "baselines" / "tune.json").read_text()).items():
        assert row["passed"] and all(each in offered[name] for each in row["passed"]), name


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(AssertionError, match="there is no GPU here to time candidates on"):
        compiled("ci/compile/tune.py")
