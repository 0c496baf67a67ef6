"""`tritonrec.verify`: the contract table for somebody's own model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from ...data import Batch
from ...distributed import Communicators
from ...embedding import FeatureConfig, HashTableCollection, OptimizerName, RowOptimizer
from ...pipeline import PIPELINED, Consistency, Mode, Precision, Trainer, WindowConfig
from ...pipeline.diagnosis import Diagnosis, diagnose
from ..job import dense_optimizer
from .cases import Case
from .run_case import compare_run
from .state import Comparison, Difference, State, dense_state, earliest, loss_state, table_state
from .thread_ranks import run_ranks


@dataclass(frozen=True)
class ModelReport:
    """Outcome for one's own model.

    `cases` pairs each case with its first difference or error, None where all bits agree. `not_invariant`
    names the first module, in the order of execution, to blame for bits that depend on which samples are
    together, and `reason` says why; None if there is none. `error` is what the model raised, and where; then
    the only case is the reference.
    """

    cases: list[tuple[Case, Difference | str | None]]
    not_invariant: str | None
    reason: str | None = None
    error: str | None = None

    @property
    def passed(self) -> bool:
        """Whether every case is identical and nothing was found."""
        if self.error is not None or self.not_invariant is not None:
            return False
        return bool(self.cases) and all(found is None for _, found in self.cases)

    def __str__(self) -> str:
        lines = [f"{case}: {'identical' if found is None else found}" for case, found in self.cases]
        if self.not_invariant:
            lines.append(f"first module that is not batch-invariant: {self.not_invariant}")
            lines.append(f"reason: {self.reason}")
        return "\n".join(lines)


def verify(
    build_model: Callable[[], torch.nn.Module],
    batches: Sequence[Batch],
    features: Sequence[FeatureConfig],
    *,
    consistency: Consistency = "batch",
    world_sizes: Sequence[int] = (1,),
    micro_batches: Sequence[int] = (1, 2, 3),
    modes: Sequence[str] = PIPELINED,
    optimizer: OptimizerName = "adam",
    lr: float = 1e-3,
    seed: int = 0,
    precision: Precision = "float32",
) -> ModelReport:
    """Train your model in every pipelined mode and compare all bits with a reference run after every step.

    Args:
        build_model: makes the model, with the same parameters each time it is called. The model is called as
            ``model(batch, rows, seed)``: a batch, for each feature the rows (n, dim) float32 of what
            ``batch.lookups()`` asks for, and the step's dropout seed; it returns one loss per sample, (B,).
        batches: global batches of consecutive steps, ``batches[i].step == i``, each with two samples or more.
        features: what the model looks up; a `JaggedBatch` has the feature ``item``.
        consistency: "batch": the reference is synchronous training of the global batch. "window": the same
            micro-batches on the same ranks, one stage after another; any model can pass.
        world_sizes: numbers of ranks, which are threads here; each gets an even share of every batch.
        micro_batches: values of N. modes: pipelined modes to run.
        optimizer, lr, seed: of rows and dense parameters.
        precision: of the model's arithmetic (`WindowConfig.precision`), in the reference too.

    An error of the model ends in the report, with the module that raised it. ``print`` the report, or look at
    its fields.
    """
    if not batches:
        raise ValueError("verify needs at least one batch")
    for index, batch in enumerate(batches):
        batch.validate()
        if batch.step != index:
            raise ValueError(f"batches[{index}].step must be {index}, got {batch.step}")
    if consistency not in ("batch", "window"):
        raise ValueError(f"consistency must be 'batch' or 'window', got {consistency!r}")
    runs = _Runs(build_model, batches, features, consistency, optimizer, lr, seed, precision)
    cut = consistency == "batch"
    found = diagnose(build_model(), batches[0], features, seed, cut, precision)
    if found.error:
        reference: Mode = "reference" if consistency == "batch" else "sequential"
        return ModelReport([(runs.case(reference, 1, 1), found.error)], None, error=found.error)
    cases = runs.cases(modes, world_sizes, micro_batches)
    if any(difference is not None for _, difference in cases):
        for batch in batches[1:]:  # the first one may have samples that hide it, such as all of one length
            if found.module is not None or found.error is not None:
                break
            found = diagnose(build_model(), batch, features, seed, cut, precision)
    if consistency == "window" and all(difference is None for _, difference in cases):
        # draws in the order of micro-batches are the same in every mode
        found = Diagnosis()
    return ModelReport(cases, found.module, found.reason, found.error)


@dataclass(frozen=True)
class _Runs:
    """The arguments of `verify` that all of its runs share."""

    build_model: Callable[[], torch.nn.Module]
    batches: Sequence[Batch]
    features: Sequence[FeatureConfig]
    consistency: Consistency
    optimizer: OptimizerName
    lr: float
    seed: int
    precision: Precision

    def cases(
        self, modes: Sequence[str], world_sizes: Sequence[int], micro_batches: Sequence[int]
    ) -> list[tuple[Case, Difference | str | None]]:
        """Each case with its first difference or error; only the reference where that fails."""
        results: list[tuple[Case, Difference | str | None]] = []
        expected: list[State] = []
        if self.consistency == "batch":
            try:
                (expected,) = self._states("reference", 1, 1)
            except Exception as error:
                return [(self.case("reference", 1, 1), _message(error))]
        for world_size, count in product(world_sizes, micro_batches):
            of_rank = [expected] * world_size
            if self.consistency == "window":
                try:
                    of_rank = self._states("sequential", world_size, count)
                except Exception as error:
                    results.append((self.case("sequential", world_size, count), _message(error)))
                    continue
            for mode in modes:
                case = self.case(mode, world_size, count)  # type: ignore[arg-type]
                try:
                    results.append((case, self._compare(case, of_rank)))
                except Exception as error:
                    results.append((case, _message(error)))
        order = {mode: place for place, mode in enumerate(modes)}
        return sorted(results, key=lambda result: (order.get(result[0].mode, -1), result[0].world_size))

    def case(self, mode: Mode, world_size: int, count: int) -> Case:
        steps = len(self.batches)
        return Case(mode, self.consistency, world_size, count, False, self.optimizer, steps)

    def _share(self, rank: int, world_size: int) -> list[Batch]:
        """Every world_size-th sample of each batch."""
        if world_size == 1:
            return list(self.batches)
        return [
            batch.select(torch.arange(rank, batch.num_samples, world_size, dtype=torch.int64))
            for batch in self.batches
        ]

    def _models(self, world_size: int) -> list[torch.nn.Module]:
        """Built one after another, since ranks are threads and torch's generator is one."""
        return [self.build_model() for _ in range(world_size)]

    def _trainer(
        self, communicators: Communicators, models: list[torch.nn.Module], mode: Mode, count: int
    ) -> Trainer:
        model, rule = models[communicators.rank], RowOptimizer(self.optimizer, self.lr)
        tables = HashTableCollection(self.features, rule, seed=self.seed)
        dense = dense_optimizer(model.parameters(), self.optimizer, self.lr, fused=False)
        window = WindowConfig(count, consistency=self.consistency, precision=self.precision, seed=self.seed)
        trainer = Trainer(model, tables, dense, communicators, mode, window)
        trainer.guard.active = False  # it would refuse what is compared here
        return trainer

    def _states(self, mode: Mode, world_size: int, count: int) -> list[list[State]]:
        """For each rank the state after each step of a run without overlap."""
        models = self._models(world_size)
        torch.manual_seed(self.seed)

        def on_rank(communicators: Communicators) -> list[State]:
            states = []
            with self._trainer(communicators, models, mode, count) as trainer:
                owner = trainer.reference or trainer.program
                share = self._share(communicators.rank, world_size)
                for result in trainer.run(share):
                    losses = loss_state(result.sample_ids, result.losses)
                    states.append({**losses, **dense_state(owner.dense), **table_state(owner.tables)})
            return states

        return run_ranks(world_size, on_rank)

    def _compare(self, case: Case, expected: list[list[State]]) -> Difference | None:
        models = self._models(case.world_size)
        torch.manual_seed(self.seed)

        def on_rank(communicators: Communicators) -> Difference | None:
            rank, world_size = communicators.rank, communicators.world_size
            with self._trainer(communicators, models, case.mode, case.micro_batches) as trainer:
                comparison = Comparison(trainer.program.tables, rank, world_size)
                share = self._share(rank, world_size)
                compare_run(trainer, [share], comparison, expected[rank].__getitem__, share[-1].step)
            return comparison.first

        return earliest(run_ranks(case.world_size, on_rank))


def _message(error: Exception) -> str:
    """A model may raise anything; what it said, without the lines that torch adds."""
    return str(error) if str(error) else type(error).__name__
