"""Lowers every kernel to Linalg for Ascend, without CANN: run by ``ci/ascend/run.sh`` in its environment.

Triton's front end of triton-ascend turns a launch (see ci/compile/launches.py) into TTIR, and the wheel's
`triton-adapter-opt` turns that into Linalg, the form that Huawei's compiler takes over; that compiler is
part of CANN and does not run here. So a row says "lowers", or at which step it stopped and why.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import compile_matrix
import launches
import triton
from triton._C.libtriton import ir
from triton.backends.ascend import compiler as ascend
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource

BASELINE = compile_matrix.ROOT / "ci" / "baselines" / "ascend.json"
TARGET = GPUTarget("npu", "Ascend910B", 0)


class Unlowerable(Exception):
    """A step failed; the message says which and why."""


def lower(launch: launches.Launch) -> str:
    """Linalg of one launch."""
    names = launch.kernel.arg_names
    tuples = [name for name, kind in launch.signature.items() if isinstance(kind, tuple)]
    if tuples:
        raise Unlowerable(f"signature: {tuples[0]} is a tuple, which this Triton does not have")
    constants = {names[path[0]]: value for path, value in launch.constants.items()}
    signature = {name: kind for name, kind in launch.signature.items() if name not in constants}
    backend = ascend.AscendBackend(TARGET)
    options = backend.parse_options(launch.options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options)
    metadata = {"hash": "0", "target": TARGET, **options.__dict__}
    try:
        source = ASTSource(launch.kernel, signature, constants)
        module = source.make_ir(
            options, backend.get_codegen_implementation(), backend.get_module_map(), context
        )
        module = stages["ttir"](module, metadata)
    except Exception as error:
        raise Unlowerable(f"front end: {reason(str(error))}") from error
    try:
        return stages["ttadapter"](module, metadata)
    except subprocess.CalledProcessError as error:
        how = f"adapter, signal {-error.returncode}" if error.returncode < 0 else "adapter"
        raise Unlowerable(f"{how}: {reason(error.stderr.decode(errors='replace'))}") from error


def reason(text: str) -> str:
    """The line of an error message that says most."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    errors = [line for line in lines if "error:" in line]
    if errors:
        return re.sub(r"^.*?error:\s*", "", errors[0])[:200]
    crash = [
        line for line in lines if re.search(r"Assertion|UNREACHABLE|LLVM ERROR|terminate|PLEASE submit", line)
    ]
    text = re.sub(r"^.*?(?=Assertion)", "", (crash or lines or ["no message"])[0])
    return "crashes without a message" if text.startswith("PLEASE submit") else text[:200]


def table(report: dict[str, Any]) -> str:
    made, kernels = report["provenance"], report["kernels"]
    good = sum(row["lowers"] for row in kernels.values())
    lines = [
        f"triton-ascend {made['triton-ascend']} (Triton {made['triton']}), {made['date']}, by "
        f"`ci/ascend/run.sh`: {good} of {len(kernels)} launches lower to Linalg.",
        "",
        "| kernel | launches that lower | why the others do not |",
        "|---|---|---|",
    ]
    by_kernel: dict[str, list[dict[str, Any]]] = {}
    for key, row in kernels.items():
        by_kernel.setdefault(key.split()[0], []).append(row)
    for name, rows in by_kernel.items():
        why = sorted({row["why"] for row in rows if not row["lowers"]})
        cell = "; ".join(why).replace("|", "\\|").replace("[]", "\\[]")  # no link
        lines.append(f"| {name} | {sum(row['lowers'] for row in rows)} of {len(rows)} | {cell} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="")
    parser.add_argument(
        "--check", action="store_true", help="fail where the baseline lowers and this does not"
    )
    parser.add_argument("--update", action="store_true", help="write the baseline and the table")
    parser.add_argument("--dump", type=Path, help="leave the Linalg files here")
    parser.add_argument("--wheel", default="unknown", help="version of triton-ascend")
    arguments = parser.parse_args()
    kernels = {}
    for key, launch in compile_matrix.launches_of("default", arguments.only):
        try:
            text = lower(launch)
            kernels[key] = {"lowers": True, "linalg_ops": len(re.findall(r"\blinalg\.\w+", text))}
            if arguments.dump:
                arguments.dump.mkdir(parents=True, exist_ok=True)
                (arguments.dump / f"{re.sub(r'[^A-Za-z0-9_.]+', '-', key)}.mlir").write_text(text)
        except Unlowerable as error:
            kernels[key] = {"lowers": False, "why": str(error)}
    made = {"triton-ascend": arguments.wheel, "triton": triton.__version__, "date": str(date.today())}
    report = {"provenance": made, "kernels": dict(sorted(kernels.items()))}
    wrong = []
    if arguments.check:
        before = json.loads(BASELINE.read_text())["kernels"]
        for key, row in kernels.items():
            if before.get(key, {}).get("lowers") and not row["lowers"]:
                wrong.append(f"{key}: no longer lowers: {row['why']}")
    if arguments.update:
        lines = ",\n".join(
            f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in report["kernels"].items()
        )
        BASELINE.write_text(f'{{\n "provenance": {json.dumps(made)},\n "kernels": {{\n{lines}\n }}\n}}\n')
        page = compile_matrix.DOCS
        page.write_text(compile_matrix.put_between(page.read_text(), "ascend", table(report)))
    print(table(report))
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
