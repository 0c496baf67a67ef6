"""`tritonrec.verify`: the contract table for somebody's own model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from ...data import Batch
from ...distributed import Communicators
from ...embedding import FeatureConfig, HashTableCollection, OptimizerName, RowOptimizer
from ...pipeline import PIPELINED, StageFailedError, Trainer, WindowConfig
from ..job import dense_optimizer
from .cases import Case
from .run_case import compare_run
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
    batches: Sequence[Batch],
    features: Sequence[FeatureConfig],
    *,
    micro_batches: Sequence[int] = (1, 2, 3),
    modes: Sequence[str] = PIPELINED,
    optimizer: OptimizerName = "adam",
    lr: float = 1e-3,
    seed: int = 0,
) -> ModelReport:
    """Train your model synchronously and in every pipelined mode, and compare all bits after every step.

    Args:
        build_model: makes the model, with the same parameters each time it is called. The model is called as
            ``model(batch, rows, seed)``: a batch, for each feature the rows (n, dim) float32 of what
            ``batch.lookups()`` asks for, and the step's dropout seed; it returns one loss per sample, (B,).
        batches: global batches of consecutive steps, ``batches[i].step == i``, each with two samples or more.
        features: what the model looks up; a `JaggedBatch` has the feature ``item``.
        micro_batches: values of N. modes: pipelined modes to run.
        optimizer, lr, seed: of rows and dense parameters.

    Runs on one rank, with as many batches in flight as each mode has. ``print`` the report, or look at its
    fields.
    """
    if not batches:
        raise ValueError("verify needs at least one batch")
    for index, batch in enumerate(batches):
        batch.validate()
        if batch.step != index:
            raise ValueError(f"batches[{index}].step must be {index}, got {batch.step}")
    rule = RowOptimizer(optimizer, lr)
    local = Communicators.local()

    def trainer(mode, count: int) -> Trainer:
        model = build_model()
        tables = HashTableCollection(features, rule, seed=seed)
        return Trainer(
            model,
            tables,
            dense_optimizer(model.parameters(), optimizer, lr, fused=False),
            local,
            mode,
            WindowConfig(count, seed=seed),
        )

    not_invariant = first_not_invariant(build_model(), batches[0], features, seed)
    cases: list[tuple[Case, Difference | str | None]] = []
    expected: list[dict[str, torch.Tensor]] = []
    case = Case("reference", "batch", 1, 1, False, optimizer, len(batches))
    try:
        with trainer("reference", 1) as reference:
            for result in reference.run(batches):
                losses = loss_state(result.sample_ids, result.losses)
                expected.append({**losses, **dense_state(reference.dense), **table_state(reference.tables)})
    except (TypeError, ValueError) as error:
        return ModelReport([(case, str(error))], not_invariant)
    for mode, count in product(modes, micro_batches):
        case = Case(mode, "batch", 1, count, False, optimizer, len(batches))  # type: ignore[arg-type]
        try:
            with trainer(mode, count) as running:
                comparison = Comparison(running.program.tables, rank=0, world_size=1)
                compare_run(running, [batches], comparison, expected.__getitem__, batches[-1].step)
            cases.append((case, comparison.first))
        except (StageFailedError, TypeError, ValueError) as error:
            cases.append((case, str(error)))
    return ModelReport(cases, not_invariant)


def first_not_invariant(
    model: torch.nn.Module, batch: Batch, features: Sequence[FeatureConfig], seed: int = 0
) -> str | None:
    """Name of the first module with an output row that changes when its sample is computed alone.

    Looks at float outputs whose rows are those of the samples alone, in any order; others are passed over.
    """
    tables = HashTableCollection([replace(feature, scale=0.5) for feature in features], seed=seed)

    def outputs(of: Batch) -> list[tuple[str, torch.Tensor]]:
        return _outputs(model, of, tables.peek(of.lookups()), seed)

    together = outputs(batch)
    alone = [
        outputs(batch.select(torch.tensor([index], dtype=torch.int64))) for index in range(batch.num_samples)
    ]
    for place, (name, whole) in enumerate(together):
        parts = [each[place][1] for each in alone if len(each) == len(together)]
        if len(parts) == batch.num_samples and sum(len(part) for part in parts) == len(whole):
            rows = torch.cat(parts)
            if not torch.equal(_bits(rows), _bits(whole)) and _sorted_rows(rows) != _sorted_rows(whole):
                return name
    return None


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.float().contiguous().view(torch.int32)


def _sorted_rows(values: torch.Tensor) -> list[bytes]:
    return sorted(row.numpy().tobytes() for row in _bits(values))


def _outputs(
    model: torch.nn.Module, batch: Batch, rows: dict[str, torch.Tensor], seed: int
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
