"""Which files are mutated."""

from __future__ import annotations

from pathlib import Path

PACKAGES = ("pipeline", "embedding", "distributed", "checkpoint", "kernels")
COMPILED = ("numba_", "triton_")
"""Files of kernels: `intentions.jsonl` has edits of Triton's."""
UNSAFE = "rank_process.py"
"""It sends signals: an edit of it might end processes of others."""


def chosen_files(root: Path, kernels: bool = False) -> list[str]:
    """Host code of `PACKAGES`, relative to `root`, in order; or the files of their numba kernels."""
    files = [path for name in PACKAGES for path in sorted(Path(root, "tritonrec", name).rglob("*.py"))]
    if kernels:
        return [str(path.relative_to(root)) for path in files if path.name.startswith("numba_")]
    return [
        str(path.relative_to(root))
        for path in files
        if not path.name.startswith(COMPILED) and path.name not in ("reference.py", "__init__.py", UNSAFE)
    ] + ["tritonrec/pipeline/reference.py"]
