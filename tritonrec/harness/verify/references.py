"""References on disk. One that a run differs from is recorded again: only equal recordings are a proof."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ...files import ScratchFolder, save_json
from ..environment import environment_of_times
from ..job import Job
from .cases import Case, Reference
from .run_case import record_reference
from .state import bits_of


class References:
    """Files of `record_reference`, each recorded with as many steps as its cases need; one at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
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
        with self._lock:
            for reference, steps in needed.items():
                if self._steps.get(reference, 0) < steps:
                    record_reference(reference, steps, self.path)
                    self._steps[reference] = steps
                    self._doubts.pop(reference, None)

    def doubt(self, reference: Reference) -> str | None:
        """Record a reference again; a sentence where the two recordings differ, None where they are equal.

        Recordings that differ are kept in a folder that the sentence names, with all that differs and the
        machine in ``about.json``. The second one is made once.
        """
        with self._lock:
            if reference not in self._doubts:
                self._doubts[reference] = self._compared_with_itself(reference)
            return self._doubts[reference]

    def _compared_with_itself(self, reference: Reference) -> str | None:
        name = reference.file_name
        with ScratchFolder() as folder:
            record_reference(reference, self._steps[reference], folder)
            files = [Path(self.path, name), Path(folder, name)]
            found = list(differences(*map(load_file, files)))
            if not found:
                return None
            kept = Path(tempfile.mkdtemp(prefix="tritonrec-reference-"))
            for file, which in zip(files, ("first", "second"), strict=True):
                shutil.copy(file, kept / f"{which}.safetensors")
            about = {"environment": _environment(), "reference": repr(reference), "differences": found}
            save_json(about, kept / "about.json")
        return (
            f"the reference differs from itself: {found[0]['tensor']} has other bits in a second recording, "
            f"so this case says nothing of its mode; both recordings are in {kept}"
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


def _environment() -> dict[str, Any]:
    """Of a process whose recordings differ."""
    capability, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    return {**environment_of_times(), "capability": capability, "threads_outside": threads}


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> Iterator[dict[str, Any]]:
    """The tensors, ``STEP/NAME``, with other bits in the other recording, by step.

    `at` has the samples or ids whose values differ, or the indices in other tensors; `of` their number, and
    `values` the first two.
    """

    def step_and_name(name: str) -> tuple[int, str]:
        step, _, tensor = name.partition("/")
        return int(step), tensor

    for name in sorted({*one, *other}, key=step_and_name):
        pair = one.get(name), other.get(name)
        a, b = pair
        if a is None or b is None or (a.shape, a.dtype) != (b.shape, b.dtype):
            kinds = ["missing" if each is None else f"{each.dtype} {tuple(each.shape)}" for each in pair]
            yield {"tensor": name, "values": kinds}
            continue
        places = (bits_of(a) != bits_of(b)).nonzero()
        if not len(places):
            continue
        first, labels = tuple(places[0].tolist()), one.get(f"{name.rpartition('/')[0]}/ids")
        by_label = name.endswith(("/values", "/rows")) and labels is not None and len(labels) == len(a)
        at = labels[places[:, 0].unique()] if by_label and labels is not None else places
        yield {
            "tensor": name,
            "of": a.numel(),
            "at": at.tolist(),
            "values": [a[first].item(), b[first].item()],
        }
