"""What the benchmark suites share."""

import pytest
import torch

from tritonrec.host_memory import keep_freed_memory

keep_freed_memory()  # as commands and ranks do: no contender pays for pages that a call before it gave back


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """The CPU, and a GPU where there is one."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return request.param


@pytest.fixture
def one_thread():
    """torch computes on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
