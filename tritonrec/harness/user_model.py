"""`tritonrec.harness.verify`: the contract table for somebody's own model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .. import ops
from ..data import JaggedBatch
from ..distributed import Communicators
from ..embedding import DenseOptimizer, DynamicTable, OptimizerName, RowOptimizer
from ..nn import detach_grids
from ..pipeline import PIPELINED, StageFailedError, Trainer, WindowConfig
from .cases import Case
from .state import Comparison, Difference, dense_state, loss_state, table_state


@dataclass(frozen=True)
class ModelReport:
    """Outcome for one's own model.

    `cases` pairs each case with its first difference or error, None where all bits agree. `not_invariant`
    names the first module, in the order of execution, one of whose rows depends on which other samples are
    in the batch; None if there is none.
    """

    cases: list[tuple[Case, Difference | str | None]]
    not_invariant: str | None

    @property
    def passed(self) -> bool:
        return (
            bool(self.cases) and self.not_invariant is None and all(found is None for _, found in self.cases)
        )

    def __str__(self) -> str:
        lines = [f"{case}: {'identical' if found is None else found}" for case, found in self.cases]
        if self.not_invariant:
            lines.append(f"first module that is not batch-invariant: {self.not_invariant}")
        return "\n".join(lines)


def verify(
    build_model: Callable[[], torch.nn.Module],
    batches: Sequence[JaggedBatch],
    *,
    dim: int,
    micro_batches: Sequence[int] = (1, 2, 3),
    modes: Sequence[str] = PIPELINED,
    optimizer: OptimizerName = "adam",
    lr: float = 1e-3,
    seed: int = 0,
) -> ModelReport:
    """Train your model synchronously and in every pipelined mode, and compare all bits after every step.

    Args:
        build_model: makes the model, with the same parameters each time it is called. The model is called as
            ``model(batch, rows, seed)``: a `JaggedBatch`, the embedding rows (occurrences, dim) float32 of
            ``batch.occurrence_keys()``, and the step's dropout seed; it returns one loss per sample, (B,).
        batches: global batches of consecutive steps, ``batches[i].step == i``, each with two samples or more.
        dim: embedding dimension. micro_batches: values of N. modes: pipelined modes to run.
        optimizer, lr, seed: of rows and dense parameters.

    Runs on one rank. ``print`` the report, or look at its fields.
    """
    if not batches:
        raise ValueError("verify needs at least one batch")
    for index, batch in enumerate(batches):
        batch.validate()
        if batch.step != index:
            raise ValueError(f"batches[{index}].step must be {index}, got {batch.step}")
    rule = RowOptimizer(optimizer, lr)

    def fresh() -> tuple[torch.nn.Module, DynamicTable, DenseOptimizer]:
        model = build_model()
        table = DynamicTable(dim, rule.row_width(dim), seed=seed)
        return model, table, DenseOptimizer(model.named_parameters(), rule)

    def run(mode, count: int) -> list[dict[str, torch.Tensor]]:
        model, table, dense = fresh()
        states = []
        local = Communicators.local()
        with Trainer(model, table, rule, dense, local, mode, WindowConfig(count, seed=seed)) as trainer:
            for batch in batches:
                result = trainer.step(batch)
                losses = loss_state(result.sample_ids, result.losses)
                states.append({**losses, **dense_state(dense), **table_state(table)})
        return states

    not_invariant = first_not_invariant(build_model(), batches[0], dim, seed)
    cases: list[tuple[Case, Difference | str | None]] = []
    expected: list[dict[str, torch.Tensor]] = []
    for mode, count in [("sync", 1), *((mode, count) for mode in modes for count in micro_batches)]:
        case = Case(mode, "batch", 1, count, False, optimizer, len(batches))  # type: ignore[arg-type]
        try:
            states = run(mode, count)
        except (StageFailedError, TypeError) as error:
            cases.append((case, str(error)))
            continue
        if mode == "sync":
            expected = states
            continue
        if not expected:
            break
        comparison = Comparison(fresh()[1], rank=0, world_size=1)
        for step, (reference, got) in enumerate(zip(expected, states, strict=True)):
            comparison.compare(step, reference, got, final=True)
        cases.append((case, comparison.first))
    return ModelReport(cases, not_invariant)


def first_not_invariant(model: torch.nn.Module, batch: JaggedBatch, dim: int, seed: int = 0) -> str | None:
    """Name of the first module with an output row that changes when its sample is computed alone.

    Looks at float outputs with one row per token or per sample; other outputs are passed over.
    """
    detach_grids(model)
    rows = ops.initial_rows(seed, 0, batch.occurrence_keys(), dim, 0.5)
    together = _outputs(model, batch, rows, seed)
    tokens, samples = batch.num_tokens, batch.num_samples
    for index in range(samples):
        start, end = int(batch.offsets[index]), int(batch.offsets[index + 1])
        if start == end:
            continue
        negatives = batch.num_negatives
        mine = torch.cat([
            torch.arange(start, end), tokens + torch.arange(start, end),
            2 * tokens + torch.arange(start * negatives, end * negatives),
        ])  # fmt: skip
        alone = _outputs(model, batch.select(torch.tensor([index])), rows[mine], seed)
        for (name, whole), (_, part) in zip(together, alone, strict=True):
            if whole.shape[:1] == (tokens,) and part.shape[:1] == (end - start,):
                same = torch.equal(whole[start:end], part)
            elif whole.shape[:1] == (samples,) and part.shape[:1] == (1,):
                same = torch.equal(whole[index : index + 1], part)
            else:
                continue
            if not same:
                return name
    return None


def _outputs(
    model: torch.nn.Module, batch: JaggedBatch, rows: torch.Tensor, seed: int
) -> list[tuple[str, torch.Tensor]]:
    """(module name, output) in the order of execution; the model itself comes last."""
    outputs: list[tuple[str, torch.Tensor]] = []

    def record(name: str):
        def hook(module, args, output) -> None:
            if isinstance(output, torch.Tensor) and output.is_floating_point() and output.dim():
                outputs.append((name or type(model).__name__, output.detach()))

        return hook

    handles = [module.register_forward_hook(record(name)) for name, module in model.named_modules()]
    try:
        with torch.no_grad():
            model(batch, rows, seed)
    finally:
        for handle in handles:
            handle.remove()
    return outputs
