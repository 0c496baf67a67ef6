"""What must not move while the house is rebuilt: SHA-256 of everything that is computed, of two commits.

    python ci/oracle/digests.py --json before.json           # of this checkout, about 8 minutes on two cores
    python ci/oracle/digests.py --compare before.json after.json
    python ci/oracle/digests.py --commits HEAD~3 HEAD        # both, each in a checkout of its own

The parts, which ``--only`` chooses from:

- ``ops``: every op, its public function and the registered one, on drawn arguments; CPU and reference.
- ``cases``: the recorded references of the contract table, which its cases must equal.
- ``training``: `tritonrec train` of each model in each mode with 1, 2 and 4 ranks at both consistencies.
- ``files``: every file of a checkpoint and of an export, and a run that resumes.

Exit status 1 where a name that both have has another digest. A name that one of them lacks is listed: an op
that was removed is no bit that moved.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "ci" / "attack"), str(ROOT / "tests" / "harness")]

CALLS = 16
"""Of each op and implementation."""
MODES = ("sequential", "dbp", "fwp", "nestpipe")
Digests = Iterator[tuple[str, str]]


def sha(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:20]


def ops() -> Digests:
    import numpy as np
    import torch
    from arguments import Draw
    from doors import DRAWN, calls
    from verdicts import flat

    def bits(value: Any) -> bytes:
        if not isinstance(value, torch.Tensor):
            return repr(value).encode()
        told = f"{value.dtype}{tuple(value.shape)}".encode()
        return told + value.detach().clone(memory_format=torch.contiguous_format).numpy().tobytes()

    for call in calls().values():
        for impl in ("cpu", "reference"):
            found = []
            for index in range(CALLS):
                seed = [7, zlib.crc32(call.op.encode()), index]
                drawn = DRAWN[call.op](Draw(np.random.default_rng(seed)))
                given = {name: drawn[name] for name in call.names if name != "impl"} | {"impl": impl}
                try:
                    results = flat(call.doors[0](**given))
                except Exception as error:  # a drawn argument that does not fit is refused by name
                    found.append(f"{type(error).__name__}: {error}".encode())
                    continue
                found += [bits(value) for value in (*results, *(given[name] for name in call.written))]
            yield f"ops/{call.name}/{impl}", sha(*found)


def cases() -> Digests:
    from test_digests import job_of

    from tritonrec.harness.verify.cases import contract_table
    from tritonrec.harness.verify.run_case import record_reference

    job = job_of("hstu", "")
    seen = set()
    with tempfile.TemporaryDirectory() as folder:
        for case in contract_table():
            if case.consistency != "batch":
                continue
            reference = case.reference(job)
            if reference in seen:
                continue
            seen.add(reference)
            try:
                record_reference(reference, case.steps, folder)
            except (ValueError, FileNotFoundError):  # a variant of other data
                continue
            file = Path(folder, reference.file_name)
            yield f"cases/{case.variant or 'plain'} {case.optimizer} {len(seen)}", sha(file.read_bytes())
            file.unlink()


def training() -> Digests:
    from test_digests import MODELS, job_of, write_ratings

    from tritonrec.distributed import Communicators, RankPool
    from tritonrec.harness.train.loop import train
    from tritonrec.harness.train.run import Run
    from tritonrec.pipeline import WindowConfig

    with tempfile.TemporaryDirectory() as folder, RankPool((2, 4)) as pool:
        ratings = write_ratings(Path(folder))
        for model in MODELS:
            for mode in MODES:
                for consistency in ("batch", "window"):
                    window = WindowConfig(3, consistency, clustering=mode == "nestpipe", max_grad_norm=0.5)
                    run = Run(job_of(model, ratings), mode, window, steps=4)
                    for size in (1, 2, 4):
                        summary = (
                            train(Communicators.local(), run, True)
                            if size == 1
                            else pool.run(train, size, run, True)[0]
                        )
                        yield f"training/{model} {mode} {consistency} W={size}", summary["digest"][:20]


def files() -> Digests:
    from test_digests import job_of

    from tritonrec.distributed import Communicators
    from tritonrec.harness.train.loop import train
    from tritonrec.harness.train.run import Run
    from tritonrec.pipeline import WindowConfig
    from tritonrec.serving import export

    # a manifest says where it was saved
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        saved, out = Path("saved"), Path("exported")
        run = Run(
            job_of("hstu", ""), "nestpipe", WindowConfig(3, "batch"), steps=4, checkpoint=saved, save_every=2
        )
        train(Communicators.local(), run, True)
        yield from written("files/checkpoint", saved)
        export(saved, out, run.job.build(run.optimizer)[0])
        yield from written("files/export", out)
        resumed = train(Communicators.local(), replace(run, steps=6, resume=True), True)
        yield "files/resumed", resumed["digest"][:20]


def written(name: str, folder: Path) -> Digests:
    for path in sorted(folder.rglob("*")):
        # an archive of torch.export has the paths of this checkout, and the manifest its digest
        if path.suffix == ".pt2":
            yield f"{name}/{path.relative_to(folder)}", sha(*program(path))
        elif path.is_file() and path.name != "manifest.json":
            yield f"{name}/{path.relative_to(folder)}", sha(path.read_bytes())


def program(path: Path) -> Iterator[bytes]:
    """The graph and the parameters of an archive."""
    import torch

    exported = torch.export.load(path)
    yield str(exported.graph).encode()
    for name, value in sorted(exported.state_dict.items()):
        yield name.encode() + value.detach().contiguous().numpy().tobytes()


PARTS: dict[str, Callable[[], Digests]] = {
    "ops": ops, "cases": cases, "training": training, "files": files
}  # fmt: skip


def record(parts: list[str]) -> dict[str, str]:
    import torch

    torch.set_num_threads(1)
    found = {}
    for part in parts:
        for name, digest in PARTS[part]():
            assert name not in found, name
            found[name] = digest
            if os.environ.get("VERBOSE"):
                print(name, digest, file=sys.stderr)
    return found


def record_commit(commit: str, folder: Path, parts: list[str]) -> dict[str, str]:
    """As `record` of a commit, which has to have this script."""
    place, result = folder / commit.replace("/", "_"), folder / f"{commit.replace('/', '_')}.json"
    subprocess.run(["git", "-C", ROOT, "worktree", "add", "--detach", place, commit], check=True)
    try:
        command = [sys.executable, "ci/oracle/digests.py", "--json", str(result), "--only", *parts]
        subprocess.run(command, cwd=place, env={**os.environ, "PYTHONPATH": str(place)}, check=True)
    finally:
        subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", place], check=True)
    return json.loads(result.read_text())


def compare(before: dict[str, str], after: dict[str, str]) -> int:
    """Print what moved; how many digests did."""
    both = [name for name in before if name in after]
    moved = [name for name in both if before[name] != after[name]]
    for title, names in (
        ("moved", moved),
        ("only before", [name for name in before if name not in after]),
        ("only after", [name for name in after if name not in before]),
    ):
        for name in names:
            print(f"{title}: {name}")
    print(f"{len(both) - len(moved)} of {len(both)} digests are the same")
    return len(moved)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compare", nargs=2, type=Path)
    parser.add_argument("--commits", nargs=2)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    given = parser.parse_args()
    if given.compare:
        before, after = (json.loads(path.read_text()) for path in given.compare)
    elif given.commits:
        with tempfile.TemporaryDirectory() as folder:
            before, after = (record_commit(one, Path(folder), given.only) for one in given.commits)
    else:
        found = json.dumps(record(given.only), indent=1)
        given.json.write_text(found) if given.json else print(found)
        return
    sys.exit(compare(before, after) > 0)


if __name__ == "__main__":
    main()
