"""The dense part of an exported DLRM as ONNX, for serving systems without torch.

ONNX has no op whose sums keep their order, so scores are near those of the trainer and not equal to them:
onnxruntime computes them here on drawn inputs, and the largest difference is the result. Models of sequences
are refused: their rows are jagged, and ONNX has neither `hstu_attention` nor sizes that depend on offsets.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from ..files import atomic_write
from ..files.places import Place, place_of
from ..optional import require
from .manifest import checked_file, local_copy, read_manifest
from .programs import CLICK, load_program

LARGEST_ERROR = 1e-5
"""Of a logit, over the largest of its batch."""

SIZES = (1, 2, 37, 256)
"""Samples of the batches that are compared."""


def to_onnx(exported: Place | str, path: str | os.PathLike[str]) -> float:
    """Write the dense part of an export to a file; its inputs are those of `ClickScorer`.

    Tables stay where they are: a server looks rows up in the export's files, and gives them to the graph.

    Returns the largest error of a logit over the largest of its batch, by onnxruntime on the CPU.

    Raises ValueError for an export without a DLRM, and for an error above `LARGEST_ERROR`; then nothing is
    written. `MissingPackageError` without onnxruntime and onnxscript.
    """
    for package in ("onnxscript", "onnxruntime"):
        require(package, "an export to ONNX")
    import onnxruntime

    folder = place_of(exported)
    dense = read_manifest(folder)["dense"]
    if dense is None or dense["kind"] != CLICK:
        kind = "tables alone" if dense is None else f"a model of kind {dense['kind']}"
        raise ValueError(f"{folder} has {kind}, and ONNX can hold the dense part of a DLRM: use dense.pt2")
    with local_copy(folder, dense["program"]) as here:
        program = load_program(checked_file(here, dense["program"]))
    ours = torch.ops.tritonrec
    plain = program.run_decompositions(
        {ours.linear.default: _linear, ours.dot_interaction.default: _dot_interaction}
    )
    with atomic_write(path) as file:
        made = torch.onnx.export(plain, dynamo=True, verbose=False, external_data=False)
        assert made is not None
        made.save(file)
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        error = max(_error(session, program, size) for size in SIZES)
        if not error <= LARGEST_ERROR:
            raise ValueError(
                f"logits of onnxruntime are {error:.1e} of the largest off, above {LARGEST_ERROR}"
            )
    return error


def _error(session: Any, program: torch.export.ExportedProgram, size: int) -> float:
    """The largest difference of logits over the largest logit, for a drawn batch of `size` samples."""
    draw, names = torch.Generator().manual_seed(size), program.graph_signature.user_inputs
    shapes = [each.meta["val"].shape[1:] for each in program.graph.nodes if each.name in names]
    given = [
        torch.randn(size, *map(int, shape), generator=draw, dtype=torch.float32, device="cpu")
        for shape in shapes
    ]
    with torch.no_grad():
        want = program.module()(*given)
    feed = {each.name: values.numpy() for each, values in zip(session.get_inputs(), given, strict=True)}
    found = torch.from_numpy(session.run(None, feed)[0])
    return float((found - want).abs().max() / want.abs().max())


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, *_rest: Any) -> Tensor:
    """`ops.linear` in torch's own ops, which ONNX has."""
    found = x @ weight.t()
    return found if bias is None else found + bias


def _dot_interaction(vectors: Tensor, *_rest: Any) -> Tensor:
    """`ops.dot_interaction` (B, F, d) -> (B, F * (F - 1) / 2) likewise."""
    count = vectors.shape[1]
    left, right = torch.tril_indices(count, count, -1)
    return (vectors @ vectors.transpose(1, 2)).flatten(1)[:, left * count + right]
