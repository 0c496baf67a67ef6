"""Without a GPU, real or emulated, Triton kernels are interpreted; one pool of ranks serves all tests."""

import os
from typing import Any

import pytest
import torch

from tritonrec.kernels import dispatch

if not torch.cuda.is_available() and dispatch.emulated is None:  # decided before anything imports triton
    os.environ["TRITON_INTERPRET"] = "1"

MESHES = (1, 2, 3, 4, (2, 2), (4, 2), (4, 4))


class SharedRanks:
    """A `RankPool` of four ranks that starts at its first use, and again after a rank has failed."""

    def __init__(self) -> None:
        self.started: Any = None

    def run(self, *args: Any, **options: Any) -> list[Any]:
        from tritonrec.distributed import RankDiedError, RankPool

        if self.started is None:
            self.started = RankPool(MESHES)
        try:
            return self.started.run(*args, **options)
        except RankDiedError:
            self.close()
            raise

    def close(self) -> None:
        if self.started is not None:
            self.started.close()
        self.started = None


@pytest.fixture(scope="session")
def pool():
    pool = SharedRanks()
    yield pool
    pool.close()
