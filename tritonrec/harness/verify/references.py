"""References on disk. One that a run differs from is recorded again: only equal recordings are a proof."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file

from ...files import ScratchFolder
from ..job import Job
from .cases import Case, Reference
from .run_case import record_reference
from .state import bits_of


class References:
    """Files of `record_reference`, each recorded with as many steps as its cases need."""

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
                record_reference(reference, steps, self.path)
                self._steps[reference] = steps
                self._doubts.pop(reference, None)

    def doubt(self, reference: Reference) -> str | None:
        """Record a reference again; a sentence where the two recordings differ, None where they are equal.

        Recordings that differ are kept in a folder that the sentence names. The second one is made once.
        """
        if reference not in self._doubts:
            self._doubts[reference] = self._compared_with_itself(reference)
        return self._doubts[reference]

    def _compared_with_itself(self, reference: Reference) -> str | None:
        name = reference.file_name
        with ScratchFolder() as folder:
            record_reference(reference, self._steps[reference], folder)
            files = [Path(self.path, name), Path(folder, name)]
            found = first_difference(*map(load_file, files))
            if found is None:
                return None
            kept = Path(tempfile.mkdtemp(prefix="tritonrec-reference-"))
            for file, which in zip(files, ("first", "second"), strict=True):
                shutil.copy(file, kept / f"{which}.safetensors")
        return (
            f"the reference differs from itself: {found} has other bits in a second recording, so this case "
            f"says nothing of its mode; both recordings are in {kept}"
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
