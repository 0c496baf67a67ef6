"""Compiles every Triton kernel for every target, without a GPU, and compares with what is committed.

    python ci/compile/compile_matrix.py --check     against ci/baselines/compile.json
    python ci/compile/compile_matrix.py --update    writes the baseline and the table in docs/platforms.md
    python ci/compile/compile_matrix.py --check --only silu --targets sm_90
    python ci/compile/compile_matrix.py --update --kernels linear.     rows of these kernels alone

A row is one launch (see launches.py) for one target: registers of a thread, bytes of its stack, to which
registers are spilled (scratch on AMD), shared memory of a block, matrix instructions and atomics in the
program text, TF32, and bytes of code. A check fails, and names the row, where

    a kernel is not reached by any case, or a row of the baseline is no longer there, or one is new
    a stack appears or grows            shared memory exceeds what a block may have
    matrix instructions disappear       atomics appear
    TF32 is used at all: nobody here asked for fewer bits
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import struct
import subprocess
import sys
import tempfile
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BASELINE = ROOT / "ci" / "baselines" / "compile.json"
DOCS = ROOT / "docs" / "platforms.md"
# backend, architecture, warp size, bytes of shared memory that a block may have
TARGETS: dict[str, tuple[str, Any, int, int]] = {
    "sm_80": ("cuda", 80, 32, 163 * 1024),
    "sm_90": ("cuda", 90, 32, 227 * 1024),
    "sm_100": ("cuda", 100, 32, 227 * 1024),
    "gfx942": ("hip", "gfx942", 64, 64 * 1024),
}
MATRIX = re.compile(r"\b(wgmma\.mma_async|tcgen05\.mma|mma\.sync|v_mfma)")
ATOMIC = re.compile(
    r"^\s*(?:@!?%p\d+ )?((?:atom|red)\.|(?:global|flat|buffer|ds)_(?:atomic|cmpst|add_rtn))", re.M
)

Row = dict[str, Any]
Report = dict[str, Any]


def measure(launch: Any, target: str) -> Row:
    """Compile one launch and read what became of it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    backend, arch, warp, _ = TARGETS[target]
    attributes = {path: [["tt.divisibility", 16]] for path in launch.aligned}
    source = ASTSource(launch.kernel, launch.signature, launch.constants, attributes)
    compiled = triton.compile(source, target=GPUTarget(backend, arch, warp), options=launch.options)
    return {"config": launch.config, **read(compiled, backend)}


def read(compiled: Any, backend: str) -> Row:
    text = compiled.asm["ptx" if backend == "cuda" else "amdgcn"]
    binary = compiled.asm["cubin" if backend == "cuda" else "hsaco"]
    found = sorted(set(MATRIX.findall(text)))
    if backend == "cuda":
        usage = resource_usage(binary)
        registers, stack = usage["REG"], usage["STACK"] + usage.get("LOCAL", 0)
    else:
        registers = number_after(r"\.vgpr_count:", text) + number_after(r"\.agpr_count:", text)
        stack = number_after(r"\.private_segment_fixed_size:", text)
    return {
        "registers": registers,
        "stack": stack,
        "shared": compiled.metadata.shared,
        "matrix": len(MATRIX.findall(text)),
        "kind": " ".join(found),
        "atomics": len(ATOMIC.findall(text)),
        "tf32": "tf32" in text,
        "code": code_size(binary),
    }


def number_after(pattern: str, text: str) -> int:
    found = re.search(pattern + r"\s*(\d+)", text)
    return int(found[1]) if found else 0


def resource_usage(cubin: bytes) -> dict[str, int]:
    """``REG``, ``STACK``, ``SHARED``, ``LOCAL``... of the only kernel of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [nvidia_tool("cuobjdump"), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", text)}


def nvidia_tool(name: str) -> str:
    """A tool of the CUDA toolkit that Triton's wheel carries."""
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def code_size(elf: bytes) -> int:
    """Bytes in the sections of an ELF file that hold instructions."""
    start = struct.unpack_from("<Q", elf, 0x28)[0]
    size, count = struct.unpack_from("<HH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, start + i * size) for i in range(count)]
    executable, bits = 0x4, 1
    return sum(length for _, kind, flags, _, _, length in headers if kind == bits and flags & executable)


@cache
def launches_of(target: str, only: str) -> list[Any]:
    """Launches with a key each; equal keys are numbered."""
    import launches

    seen: dict[str, int] = {}
    keyed = []
    for launch in launches.launches(target, only):
        number = seen[launch.key] = seen.get(launch.key, 0) + 1
        keyed.append((launch.key if number == 1 else f"{launch.key} ({number})", launch))
    return keyed


def work(job: tuple[str, str, int]) -> tuple[str, str, Row]:
    """One row, in a process of a pool: JIT functions cannot be pickled, indices of the list can."""
    target, only, index = job
    key, launch = launches_of(target, only)[index]
    try:
        return target, key, measure(launch, target)
    except Exception as error:
        return target, key, {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:300]}"}


def compile_all(targets: list[str], only: str, jobs: int, begin: str = "") -> Report:
    """All rows: {kernel: {target: row}}, with the versions that made them; of kernels that begin so."""
    import launches

    rows = [
        (target, only, i)
        for target in targets
        for i, (key, _) in enumerate(launches_of(target, only))
        if key.startswith(begin)
    ]
    kernels: dict[str, dict[str, Row]] = {}
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for target, key, row in pool.imap_unordered(work, rows, chunksize=1):
            kernels.setdefault(key, {})[target] = row
    reached = [launch.kernel for target in targets for _, launch in launches_of(target, only)]
    ordered = {key: {t: kernels[key][t] for t in targets if t in kernels[key]} for key in sorted(kernels)}
    missing = [] if only else launches.uncovered(reached)
    return {"provenance": provenance(), "uncovered": missing, "kernels": ordered}


def provenance() -> dict[str, str]:
    import torch
    import triton

    tools = {}
    for name in ("ptxas", "ptxas-blackwell"):
        with_version = subprocess.run([nvidia_tool(name), "--version"], capture_output=True, text=True).stdout
        found = re.search(r"V(\d[\d.]+)", with_version)
        tools[name] = found[1] if found else "unknown"
    return {"triton": triton.__version__, "torch": torch.__version__, **tools, "date": str(date.today())}


def faults(now: Report) -> list[str]:
    """What is wrong with a report on its own."""
    found = [f"{name}: no case in ci/compile/launches.py compiles it" for name in now["uncovered"]]
    for key, rows in now["kernels"].items():
        for target, row in rows.items():
            where = f"{key} for {target}"
            if "error" in row:
                found.append(f"{where}: does not compile: {row['error']}")
                continue
            if row["shared"] > TARGETS[target][3]:
                found.append(
                    f"{where}: {row['shared']} bytes of shared memory, a block may have {TARGETS[target][3]}"
                )
            if row["tf32"]:
                found.append(f"{where}: uses TF32")
    return found


def regressions(before: Report, now: Report, targets: list[str], only: str = "") -> list[str]:
    """What got worse, one line each, kernel and target named."""
    found = []
    for key in sorted(before["kernels"].keys() | now["kernels"].keys()):
        for target in targets:
            old, new = (report["kernels"].get(key, {}).get(target) for report in (before, now))
            where = f"{key} for {target}"
            if old is None and new is not None:
                found.append(f"{where}: not in the baseline (--update adds it)")
            elif new is None and old is not None and not only:
                found.append(f"{where}: in the baseline, but no longer compiled")
            if old is None or new is None or "error" in new or "error" in old:
                continue
            if new["stack"] > old["stack"]:
                found.append(
                    f"{where}: spills {new['stack']} bytes, was {old['stack']}; config {new['config']}"
                )
            if old["matrix"] and not new["matrix"]:
                found.append(f"{where}: lost its matrix instructions, had {old['matrix']} of {old['kind']}")
            if new["atomics"] and not old["atomics"]:
                found.append(f"{where}: has atomics now: {new['atomics']}")
    return found


def dump(report: Report) -> str:
    """JSON with one line for each row, so that a change reads as a change of its line."""
    lines = []
    for key, rows in report["kernels"].items():
        inner = ",\n".join(f"   {json.dumps(target)}: {json.dumps(row)}" for target, row in rows.items())
        lines.append(f"  {json.dumps(key)}: {{\n{inner}\n  }}")
    head = json.dumps(report["provenance"])
    return (
        f'{{\n "provenance": {head},\n "uncovered": [],\n "kernels": {{\n' + ",\n".join(lines) + "\n }\n}\n"
    )


def table(report: Report) -> str:
    """The Markdown table: a line for each kernel, its chosen configurations only, worst of them."""
    made = report["provenance"]
    lines = [
        f"Triton {made['triton']}, ptxas {made['ptxas']} ({made['ptxas-blackwell']} for sm_100), "
        f"{made['date']}; {len(report['kernels'])} launches for {len(TARGETS)} targets, compiled by",
        "`make compile-matrix`, no GPU. Registers of a thread / bytes of stack / KiB of shared memory, each",
        "the most of all launches of a kernel, and its matrix instructions. All rows:",
        "[ci/baselines/compile.json](../ci/baselines/compile.json).",
        "",
        "| kernel | " + " | ".join(TARGETS) + " |",
        "|---|" + "---|" * len(TARGETS),
    ]
    by_kernel: dict[str, dict[str, list[Row]]] = {}
    for key, rows in report["kernels"].items():
        for target, row in rows.items():
            by_kernel.setdefault(key.split()[0], {}).setdefault(target, []).append(row)
    for name, by_target in by_kernel.items():
        cells = []
        for target in TARGETS:
            if target not in by_target:
                cells.append("not launched")
                continue
            good = [row for row in by_target[target] if "error" not in row]
            if not good:
                cells.append("does not compile")
                continue
            registers, stack, shared = (
                max(row[what] for row in good) for what in ("registers", "stack", "shared")
            )
            kinds = sorted({kind for row in good for kind in row["kind"].split()})
            cells.append(" ".join([f"{registers} / {stack} / {shared / 1024:.3g}", *kinds]))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def put_between(text: str, mark: str, new: str) -> str:
    """`text` with what stands between ``<!-- mark -->`` and ``<!-- end mark -->`` replaced."""
    begin, end = f"<!-- {mark} -->", f"<!-- end {mark} -->"
    if begin not in text or end not in text:
        raise ValueError(f"the page has no part between {begin} and {end}")
    head, rest = text.split(begin, 1)
    return f"{head}{begin}\n{new}\n{end}{rest.split(end, 1)[1]}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare with the baseline")
    parser.add_argument("--update", action="store_true", help="write the baseline and the table")
    parser.add_argument("--only", default="", help="cases whose label contains this")
    parser.add_argument("--kernels", default="", help="kernels whose name begins so; not with --check")
    parser.add_argument("--targets", default=",".join(TARGETS), help="separated by commas")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--baseline", type=Path, default=BASELINE)
    parser.add_argument("--json", type=Path, help="also write what was measured here")
    arguments = parser.parse_args()
    targets = arguments.targets.split(",")
    if unknown := set(targets) - set(TARGETS):
        parser.error(f"--targets takes some of {', '.join(TARGETS)}, got {', '.join(sorted(unknown))}")
    if arguments.update and (arguments.only or len(targets) < len(TARGETS)):
        parser.error("--update compiles everything: leave out --only and --targets")
    if arguments.check and arguments.kernels:
        parser.error("--check compares all kernels of a case: leave out --kernels")
    now = compile_all(targets, arguments.only, arguments.jobs, arguments.kernels)
    wrong = faults(now)
    if arguments.json:
        arguments.json.write_text(dump(now))
    if arguments.check:
        before = json.loads(arguments.baseline.read_text())
        if before["provenance"]["triton"] != now["provenance"]["triton"]:
            print(
                f"baseline of Triton {before['provenance']['triton']}, this is {now['provenance']['triton']}"
            )
        if arguments.only:
            before["kernels"] = {k: v for k, v in before["kernels"].items() if k in now["kernels"]}
        wrong += regressions(before, now, targets, arguments.only)
    if arguments.update:
        if arguments.kernels:
            before = json.loads(arguments.baseline.read_text())
            if before["provenance"]["triton"] != now["provenance"]["triton"]:
                parser.error("another Triton than the baseline's: leave out --kernels")
            kept = {k: rows for k, rows in before["kernels"].items() if not k.startswith(arguments.kernels)}
            now["kernels"] = dict(sorted((kept | now["kernels"]).items()))
        arguments.baseline.write_text(dump(now))
        DOCS.write_text(put_between(DOCS.read_text(), "compile matrix", table(now)))
    count = sum(len(rows) for rows in now["kernels"].values())
    print(f"{count} compilations of {len(now['kernels'])} launches, {len(wrong)} at fault")
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    sys.exit(main())
