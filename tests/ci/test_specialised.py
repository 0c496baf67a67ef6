"""Promise: Triton compiles a kernel once, whatever number of rows, tokens or keys a batch has."""

import json

import pytest
from compiling import COMPILE, compiled


@pytest.mark.if_changed
def test_another_batch_takes_the_same_programs():
    assert json.loads(compiled(COMPILE / "programs.py")) == {}


@pytest.mark.if_changed
def test_where_triton_specialises_numbers_of_the_batch_they_are_found():
    specialised = "from tritonrec.kernels import triton_jit; triton_jit.OF_THE_BATCH.clear(); "
    found = json.loads(
        compiled("-c", specialised + "import json, programs; print(json.dumps(programs.by_batch()))")
    )
    assert len(found) > 30 and found["hash_table.find_kernel"] == ["num_keys"]
    assert found["linear.add_weight_gradients_kernel"] == ["tokens", "tokens_of_share"]
