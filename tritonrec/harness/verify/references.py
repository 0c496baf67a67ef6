"""References on disk. One that a run differs from is recorded again: only equal recordings are a proof."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ...files import ScratchFolder
from ...pipeline.agreement import processor as instructions
from ..environment import environment_of_times
from ..job import Job
from .cases import Case, Reference
from .run_case import record_reference
from .state import bits_of

ABOUT = "differences.json"
"""Of two recordings that differ: where they were made, and every value that differs."""


class References:
    """Files of `record_reference`, each recorded on one thread with as many steps as its cases need."""

    def __init__(self) -> None:
        self._folder = ScratchFolder()
        self._steps: dict[Reference, int] = {}
        self._doubts: dict[Reference, str | None] = {}

    @property
    def path(self) -> str:
        """The folder of the files."""
        return self._folder.name

    def record(self, job: Job, cases: Iterable[Case]) -> None:
        """Record the references that `cases` need and that are not there yet."""
        needed: dict[Reference, int] = {}
        for case in cases:
            if case.consistency == "batch":
                which = case.reference(job)
                needed[which] = max(case.steps, needed.get(which, 0))
        for reference, steps in needed.items():
            if self._steps.get(reference, 0) < steps:
                _record(reference, steps, self.path)
                self._steps[reference] = steps
                self._doubts.pop(reference, None)

    def doubt(self, reference: Reference) -> str | None:
        """Record a reference again; a sentence where the two recordings differ, None where they are equal.

        Recordings that differ are kept in a folder that the sentence names, beside a list of all values that
        differ, the processor and the settings. The second one is made once.
        """
        if reference not in self._doubts:
            self._doubts[reference] = self._compared_with_itself(reference)
        return self._doubts[reference]

    def _compared_with_itself(self, reference: Reference) -> str | None:
        name = reference.file_name
        with ScratchFolder() as folder:
            threads = _record(reference, self._steps[reference], folder)
            files = [Path(self.path, name), Path(folder, name)]
            recordings = [load_file(file) for file in files]
            found = first_difference(*recordings)
            if found is None:
                return None
            kept = Path(tempfile.mkdtemp(prefix="tritonrec-reference-"))
            for file, which in zip(files, ("first", "second"), strict=True):
                shutil.copy(file, kept / f"{which}.safetensors")
        about = {
            "reference": str(reference),
            **environment_of_times(),
            **{name: str(value) for name, value in instructions().items()},
            "torch threads of the process": threads,
            "torch threads of a recording": 1,
            "torch": torch.__config__.show(),
            "differences": all_differences(*recordings),
        }
        (kept / ABOUT).write_text(json.dumps(about, indent=1))
        return (
            f"the reference differs from itself: {found} has other bits in a second recording, so this case "
            f"says nothing of its mode; both recordings, and {ABOUT} about them, are in {kept}"
        )

    def forget(self) -> None:
        """Delete the references that were recorded so far."""
        for reference in self._steps:
            Path(self.path, reference.file_name).unlink(missing_ok=True)
        self._steps.clear()
        self._doubts.clear()

    def cleanup(self) -> None:
        """Remove the folder."""
        self._folder.cleanup()


def _record(reference: Reference, steps: int, folder: str) -> int:
    """`record_reference` on one thread; returns the number of threads before and after."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        record_reference(reference, steps, folder)
    finally:
        torch.set_num_threads(threads)
    return threads


def all_differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, Any]:
    """By tensor, ``STEP/NAME``: positions of all values that differ, and these, as numbers and as bits."""
    found: dict[str, Any] = {}
    for name in sorted({*one, *other}):
        if name not in one or name not in other:
            found[name] = f"only in the {'first' if name in one else 'second'} recording"
            continue
        a, b = one[name], other[name]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            found[name] = f"{tuple(a.shape)} {a.dtype} and {tuple(b.shape)} {b.dtype}"
            continue
        where = (bits_of(a) != bits_of(b)).nonzero().tolist()
        if where:
            found[name] = [
                {"at": at, "values": [each[tuple(at)].item() for each in (a, b)],
                 "bits": [bits_of(each)[tuple(at)].item() for each in (a, b)]}
                for at in where
            ]  # fmt: skip
    return found


def first_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> str | None:
    """The first tensor, ``STEP/NAME``, with other bits in the other recording; None where there is none."""

    def step_and_name(name: str) -> tuple[int, str]:
        step, _, tensor = name.partition("/")
        return int(step), tensor

    for name in sorted({*one, *other}, key=step_and_name):
        if name not in one or name not in other:
            return name
        a, b = one[name], other[name]
        if (a.shape, a.dtype) != (b.shape, b.dtype) or not torch.equal(bits_of(a), bits_of(b)):
            return name
    return None
