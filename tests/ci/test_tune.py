"""What may be timed has an element a thread and passed the emulator; a run cut short keeps its tables."""

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


@pytest.mark.if_changed
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


@pytest.mark.if_changed
def test_what_is_committed_is_offered(offered):
    for name, candidates in offered.items():
        module = importlib.import_module(f"tritonrec.kernels.{name}")
        if hasattr(module, "configuration"):
            continue
        committed = {key: getattr(module, key) for key in candidates[0]}
        assert committed in candidates, (name, committed)


@pytest.mark.if_changed
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(AssertionError, match="there is no GPU here to time candidates on"):
        compiled("ci/compile/tune.py")
