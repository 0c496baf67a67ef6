"""`tritonrec doctor`: what this machine has, and whether its CPU matmul is batch-invariant."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..version import __version__
from .environment import processor

PACKAGES = ("torch", "triton", "numba", "numpy")

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def doctor(console: Console | None = None) -> int:
    """Print versions, devices, backends and the self-check; 1 if the self-check fails, else 0."""
    from ..ops import linear

    console = console or Console()
    table = Table(title=f"tritonrec {__version__}", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts().items():
        table.add_row(name, escape(value))
    counts = thread_counts()
    failure = first_variance(lambda x, weight, bias: linear(x, weight, bias, impl="cpu"), counts)
    table.add_row(
        "batch invariance",
        f"[red]broken: {failure}[/red]"
        if failure
        else f"[green]rows keep their bits in any batch[/green], threads {', '.join(map(str, counts))}",
    )
    console.print(table)
    if failure:
        console.print("'batch' consistency does not hold on this machine; please report this table.")
    return 1 if failure else 0


def facts() -> dict[str, str]:
    """What can be told about this machine without training, name -> value in words."""
    versions = {package: _version(package) for package in PACKAGES}
    return {
        "python": f"{platform.python_version()} on {platform.platform()}",
        **versions,
        "processor": f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads",
        "matmul": f"{_matmul_libraries()}; kernels {torch.backends.cpu.get_cpu_capability()}",
        "kernels of the CPU": _kernels(),
        "accelerators": _accelerators(),
        "triton runs": _triton_mode(),
        "distributed": _backends(),
        "MovieLens-100K": _movielens(),
    }


def thread_counts() -> list[int]:
    """1, 2, 4, ... up to the number of torch's threads, and that number."""
    most = torch.get_num_threads()
    return sorted({most, *(1 << power for power in range(most.bit_length()) if 1 << power <= most)})


def first_variance(linear: Linear, threads: list[int]) -> str | None:
    """Look for a row whose bits depend on its batch, its place there, or the number of threads.

    Args:
        linear: ``linear(x (L, in), weight (out, in), bias (out,)) -> (L, out)``, float32 on the CPU.
        threads: torch thread counts to try; the present one is restored.

    Returns:
        The first case found, in words, or None.
    """
    generator = torch.Generator().manual_seed(20260801)
    before = torch.get_num_threads()
    try:
        for inputs, outputs in ((50, 200), (64, 64), (128, 96), (257, 31)):
            x = torch.randn(300, inputs, dtype=torch.float32, generator=generator)
            weight = torch.randn(outputs, inputs, dtype=torch.float32, generator=generator)
            bias = torch.randn(outputs, dtype=torch.float32, generator=generator)
            torch.set_num_threads(threads[0])
            expected = linear(x, weight, bias)
            for count in threads:
                torch.set_num_threads(count)
                for first in (0, 1, 131):
                    # Below five rows BLAS libraries switch kernels; around 16 and 64 they switch tiles.
                    for rows in (1, 2, 3, 4, 5, 8, 15, 17, 63, 65, 169):
                        got = linear(x[first : first + rows].clone(), weight, bias)
                        there = expected[first : first + rows]
                        same = (got.view(torch.int32) == there.view(torch.int32)).all(dim=1)
                        if not same.all():
                            row = first + int((~same).nonzero()[0])
                            return (
                                f"row {row} of x (300, {inputs}) @ weight ({outputs}, {inputs}) differs when "
                                f"computed in a batch of {rows} rows with {count} threads"
                            )
    finally:
        torch.set_num_threads(before)
    return None


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _matmul_libraries() -> str:
    libraries = {"MKL": torch.backends.mkl.is_available(), "oneDNN": torch.backends.mkldnn.is_available()}
    branch = os.environ.get("MKL_CBWR")
    names = [name for name, there in libraries.items() if there] or ["neither MKL nor oneDNN"]
    return " and ".join(names) + (f", MKL_CBWR={branch}" if branch else "")


def _kernels() -> str:
    """Whether the package brings kernels for this processor, Python, numba and state of the sources."""
    from numba.core.codegen import get_host_cpu_features

    from ..kernels.kernel_cache import AheadCache, targets_of
    from ..kernels.unique import numba_unique

    targets = targets_of(("", "", get_host_cpu_features()))
    if targets and AheadCache(numba_unique._count_keys.py_func).is_brought:
        return f"compiled ahead; this processor runs those for {' and '.join(targets)}"
    return "compiled at their first call, and kept"


def _accelerators() -> str:
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return "none"
    count = torch.accelerator.device_count()
    if kind.type == "cuda":
        names = sorted({torch.cuda.get_device_name(index) for index in range(count)})
        return f"{count} x {', '.join(names)}"
    return f"{count} x {kind.type}"


def _triton_mode() -> str:
    if find_spec("triton") is None:
        return "nowhere: it is not installed (pip install 'tritonrec[triton]'); CPU kernels are used"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "in the interpreter (TRITON_INTERPRET=1)"
    if torch.accelerator.current_accelerator(check_available=True) is not None:
        return "on the accelerator"
    return "nowhere: no accelerator, and TRITON_INTERPRET=1 is not set; CPU kernels are used"


def _backends() -> str:
    if not torch.distributed.is_available():
        return "not built into this torch"
    known = {
        "gloo": torch.distributed.is_gloo_available(),
        "nccl": torch.distributed.is_nccl_available(),
        "mpi": torch.distributed.is_mpi_available(),
        "hccl": torch.distributed.is_backend_available("hccl"),
    }
    return ", ".join(name for name, there in known.items() if there) or "no backend"


def _movielens() -> str:
    from ..data import movielens

    try:
        if not all((movielens.cache_directory() / name).exists() for name in movielens.FILES):
            return "not in the cache; `tritonrec fetch` fetches it"
        return f"verified, {movielens.fetch()}"
    except (RuntimeError, ValueError, OSError) as error:
        return f"[red]{error}[/red]"
