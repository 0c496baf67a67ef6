"""Kernels of the CPU compiled ahead, so that the first calls of an installed wheel compile nothing.

    python ci/compile/ahead.py FOLDER [--target x86-64-v3 ...]

The kernels go to FOLDER, from where `ci/wheel.sh` takes them; FOLDER may hold those of other Pythons. A
process runs the programs of `measure_first_calls.py` (all ops, a training step, `tritonrec warmup`) and notes
the types of each kernel's arguments. Then one process for each target compiles these types and runs nothing,
so that this processor need not be of the target's kind. At the end fresh processes run the programs with the
kernels, where this processor can, and it is an error if one compiles a kernel.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "ci/benchmarks"), str(ROOT / "ci/compile")]
from measure_first_calls import PROGRAMS  # noqa: E402
from numba.core.codegen import get_host_cpu_features  # noqa: E402

from tritonrec.kernels.kernel_cache import AHEAD, TARGETS, targets_of  # noqa: E402

COUNTED = """
import json, sys
import ahead
from numba.core import event
names = []
class Listener(event.Listener):
    def on_start(self, found):
        function = found.data["dispatcher"].py_func
        names.append(f"{function.__module__}.{function.__name__}")
    def on_end(self, _): pass
event.register("numba:compile", Listener())
import torch
from tritonrec import ops
exec(sys.argv[1])
compiled = [name for name in names if name.startswith("tritonrec.")]
types = {name: [str(each) for each in kernel.signatures] for name, kernel in ahead.kernels().items()}
print(json.dumps({"compiled": compiled, "kernels": types}))
"""


def kernels() -> dict[str, Any]:
    """All numba functions of the modules of tritonrec that this process has loaded, by module and name."""
    from numba.core.dispatcher import Dispatcher

    return {
        f"{name}.{each.__name__}": each
        for name, module in sorted(sys.modules.items())
        if name.startswith("tritonrec.") and isinstance(module, ModuleType)
        for each in vars(module).values()
        if isinstance(each, Dispatcher) and each.__module__ == name
    }


def counted(
    program: str, package: Path = ROOT, cache: Path | None = None, target: str = "", **changed: str
) -> dict[str, Any]:
    """What a fresh process compiles, and the kernels of the modules that it has loaded with their types.

    Args:
        package: the folder whose `tritonrec` it imports.
        cache: where its kernels are kept; by default where those of this process are.
        target: what it compiles for; by default this processor.
        changed: further variables of its environment.
    """
    return json.loads(_run(COUNTED, program, package=package, cache=cache, target=target, **changed))


def _run(
    code: str,
    *arguments: str,
    package: Path = ROOT,
    cache: Path | None = None,
    target: str = "",
    **changed: str,
) -> str:
    """The last line that a process prints."""
    searched = [package, ROOT / "ci/compile", ROOT / "ci/benchmarks", *sys.path]
    chosen = {"PYTHONPATH": os.pathsep.join(map(str, searched))}
    if cache:
        chosen["NUMBA_CACHE_DIR"] = str(cache)
    if target:
        chosen |= {"NUMBA_CPU_NAME": target, "NUMBA_CPU_FEATURES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=package,
        env={**os.environ, **chosen, **changed},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"a process for {target or 'this processor'} failed:\n{done.stderr[-4000:]}")
    return done.stdout.splitlines()[-1]


def note(file: str, programs: str) -> None:
    """Run programs, and write the types that each kernel was compiled for."""
    import torch

    for program in json.loads(programs):
        exec(program, {"torch": torch})
    Path(file).write_bytes(pickle.dumps({name: list(each.signatures) for name, each in kernels().items()}))


def compile_noted(file: str, folder: str) -> None:
    """Compile what `note` wrote for ``NUMBA_CPU_NAME``, and keep it in a folder."""
    from numba.core import config

    from tritonrec.kernels.kernel_cache import AheadCache, KernelCache

    if config.USING_SVML:
        raise RuntimeError("numba uses Intel's SVML here, which a user of the wheel need not have")
    for name, signatures in pickle.loads(Path(file).read_bytes()).items():
        module, _, kernel = name.rpartition(".")
        compiled = getattr(importlib.import_module(module), kernel)
        if not isinstance(compiled._cache, KernelCache):
            continue  # a helper that is no kernel of its own
        for types in signatures:
            compiled.compile(types)
            AheadCache(compiled.py_func).write(types, compiled.overloads[types], Path(folder))


def compile_ahead(folder: Path, targets: Sequence[str], programs: Sequence[str]) -> list[Path]:
    """Compile for each target the kernels that `programs` call; returns their files."""
    folder.mkdir(parents=True, exist_ok=True)
    of_this_python = f"*.{sys.implementation.cache_tag}.*.nbc"
    for file in folder.glob(of_this_python):
        file.unlink()
    with tempfile.TemporaryDirectory() as scratch:
        noted = Path(scratch) / "noted.pickle"
        call = "import sys, ahead; ahead.{}(*sys.argv[1:]); print('done')"
        _run(call.format("note"), str(noted), json.dumps(programs), cache=Path(scratch) / "noted")

        def compiling(target: str) -> None:
            cache = Path(scratch) / target
            _run(call.format("compile_noted"), str(noted), str(folder), cache=cache, target=target)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compiling, targets))
    files = sorted(folder.glob(of_this_python))
    for file in files:
        file.chmod(0o644)
    return files


def package_with(kernels: Path, folder: Path) -> Path:
    """A copy of the package in a folder, with kernels as a wheel has them; returns the folder."""
    package = folder / "tritonrec"
    shutil.copytree(ROOT / "tritonrec", package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(kernels, package / "kernels" / AHEAD.name)
    return folder


def compiled_by(package: Path, target: str, programs: dict[str, str]) -> dict[str, list[str]]:
    """By program, the kernels that a fresh process compiles with the package of a folder."""
    found = {}
    for name, program in programs.items():
        with tempfile.TemporaryDirectory() as cache:
            found[name] = counted(program, package, Path(cache), target)["compiled"]
    return found


def main() -> None:
    """As the module's docstring says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="all by default")
    options = parser.parse_args()
    folder, targets = options.folder.resolve(), options.target or list(TARGETS)
    files = compile_ahead(folder, targets, list(PROGRAMS.values()))
    print(
        f"{len(files)} kernels for {', '.join(targets)}, {sum(each.stat().st_size for each in files):,} bytes"
    )
    here = targets_of(("", "", get_host_cpu_features()))
    with tempfile.TemporaryDirectory() as scratch:
        package = package_with(folder, Path(scratch))
        for target in targets:
            if target not in here:
                print(f"{target}: not run, as this processor is of another kind")
                continue
            compiled = {
                name: found for name, found in compiled_by(package, target, PROGRAMS).items() if found
            }
            if compiled:
                sys.exit(f"error: {target}: compiled though the package has kernels: {compiled}")
            print(f"{target}: {len(PROGRAMS)} programs compile nothing")


if __name__ == "__main__":
    main()
