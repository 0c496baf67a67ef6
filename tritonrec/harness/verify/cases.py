"""The contract table: which modes are compared with which reference, under which conditions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import combinations, product
from random import Random
from tempfile import gettempdir
from typing import Any, Literal

from ...distributed.launch import Mesh
from ...embedding import OptimizerName, Placement, Storage
from ...pipeline import PIPELINED, Consistency, Mode, WindowConfig
from ...settings import with_values
from ..job import Job
from .variants import CPU_BITS, EACH, OWN_LOOP, RESTART, STREAM, VARIANTS, Variant, every_variant, variant_of

WORLD_SIZES = (1, 2, 4)
MICRO_BATCHES = (1, 2, 3, 4, 8)
OPTIMIZERS: tuple[OptimizerName, ...] = ("sgd", "rowwise_adagrad", "adam")
"""In every combination; `rule_cases` has the others."""
HOSTILE = "zipf:users=35,items=300,extreme_ids=1,seed=11"
"""A log that a tame one does not replace: both ends of int64 and negative ids, and a last batch of three
samples, so that ranks and micro-batches stay empty."""
VARIANT_STEPS = 6
"""Fewer would show nothing: rows have to come, go unused, be evicted and return."""
CONSISTENCIES: tuple[Consistency, ...] = ("window", "batch")
Stored = Literal[Storage, "cached-disk"]
"""Where tables are; the last one: cached before a disk."""
STORAGES: tuple[Stored, ...] = ("host", "device", "cached")
"""With the kernels of a device; `storage_cases` has those on disk."""
OF_REFERENCES = (
    "max_grad_norm", "max_grad_value", "precision", "loss_scaling", "exchange_precision"
)  # fmt: skip
"""Fields of `WindowConfig` that change what training computes."""
CACHE_ROWS = 40
"""Of a cached table: fewer than a batch's rows, so that rows also bypass the cache and leave it."""
DISK: tuple[Stored, ...] = ("disk", "cached-disk")
DISK_MEMORY = "6KiB"
"""Of a table on disk: as much. Its keys lie there as well."""
ON_DISK = ("lru", "lfu", "ttl", "admission", "precision-tiers", "policies", "merged")
"""Policies of tables on disk, in every mode with a restart in another place and at another world size; the
two places on disk take turns."""


@dataclass(frozen=True)
class Reference:
    """A run of `ReferenceTrainer` with `accumulate` batches an update, each the batches of `ranks` ranks.

    `window` are limits of gradients and precisions, as (name, value) of `WindowConfig`.
    """

    job: Job
    optimizer: OptimizerName
    accumulate: int = 1
    ranks: int = 1
    window: tuple[tuple[str, Any], ...] = ()

    @property
    def file_name(self) -> str:
        """The same for equal references, in every process."""
        return f"synchronous-{sha256(repr(self).encode()).hexdigest()[:16]}.safetensors"


@dataclass(frozen=True)
class Case:
    """One run that must equal its reference.

    That is `ReferenceTrainer` for ``"batch"``, the same cut run sequentially for ``"window"``.

    `delay_seed`, if given, seeds random waits before every task of every rank. `data` names another log
    than the job's, `variant` an entry of `VARIANTS`; where it accumulates, `steps` are rounded up to
    whole updates. With `restart` the run is saved half way, and goes on at that world size in fresh
    tables and with fresh optimizers. `replicas` ranks hold the same part of the tables (2D sparse
    parallelism), and lookups go over `nodes` in two steps, before a restart; after it there is one copy, and
    one step. `storage` is where the tables are, those of
    the reference are in host memory; after a restart they are in another one.
    """

    mode: Mode
    consistency: Consistency
    world_size: int
    micro_batches: int
    clustering: bool
    optimizer: OptimizerName
    steps: int
    delay_seed: int | None = None
    data: str = ""
    variant: str = ""
    restart: int = 0
    replicas: int = 1
    storage: Stored = "host"
    nodes: int = 1

    def __post_init__(self) -> None:
        # A last update of fewer batches would have to be the reference's last one too, and others share that.
        accumulate = self.changes.window.get("accumulate", 1)
        object.__setattr__(self, "steps", -(-self.steps // accumulate) * accumulate)

    def job(self, job: Job) -> Job:
        """The job of the case, where the harness has `job`."""
        made = self.changes.job(job.on(self.data), self.changes.case)
        return replace(made, placement=self.placement(CACHE_ROWS))

    def placement(self, cache_rows: int) -> Placement:
        """Of its tables; `cache_rows` of cached ones."""
        if self.storage == "disk" or self.storage == "cached-disk":
            storage: Storage = "disk" if self.storage == "disk" else "cached"
            on_disk = Placement(storage, cache_rows=cache_rows, path=gettempdir(), memory=DISK_MEMORY)
            return on_disk if storage == "cached" else replace(on_disk, index_memory="1KiB")
        return Placement(self.storage, cache_rows=cache_rows)

    def resumed(self) -> Case:
        """The case after its restart: with tables of a device or on disk in another place there."""
        after: dict[Stored, Stored] = {
            "device": "cached", "cached": "device", "disk": "host", "cached-disk": "disk"
        }  # fmt: skip
        return replace(self, storage=after.get(self.storage, self.storage))

    def window(self, seed: int) -> WindowConfig:
        """How it cuts its batches."""
        # as on several machines, where micro-batches share exchanges in every way
        window = {"exchanges": "joined", **self.changes.window}
        plain = WindowConfig(self.micro_batches, self.consistency, self.clustering, seed=seed)
        return with_values(plain, window)

    def reference(self, job: Job) -> Reference:
        """The run it is compared with."""
        changes, window = self.changes, self.changes.window
        ranks = self.world_size if changes.per_world else 1
        shared = tuple((name, value) for name, value in window.items() if name in OF_REFERENCES)
        own = replace(changes.job(job.on(self.data), changes.reference), placement=Placement("host"))
        return Reference(own, self.optimizer, window.get("accumulate", 1), ranks, shared)

    @property
    def shows(self) -> tuple[str, ...]:
        """Counts that tell what the variant did, a cache, a disk, and relays of several ranks."""
        cached = ("cached",) * self.storage.startswith("cached") + ("disk_read",) * (self.storage in DISK)
        return *self.changes.shows, *cached, *("node_bytes",) * (1 < self.nodes < self.world_size)

    @property
    def mesh(self) -> Mesh:
        """The ranks that it runs on."""
        return self.world_size, self.replicas, self.nodes

    @property
    def max_delay(self) -> float:
        """Seconds; longer than a stage of the harness's small job, so that random waits reorder the lanes."""
        return 0.004

    @property
    def changes(self) -> Variant:
        """What its variant changes."""
        return variant_of(self.variant)

    def __str__(self) -> str:
        return (
            f"{self.mode} {self.consistency} world_size={self.world_size} "
            f"{f'replicas={self.replicas} ' if self.replicas > 1 else ''}"
            f"{f'nodes={self.nodes} ' if self.nodes > 1 else ''}N={self.micro_batches} "
            f"{f'storage={self.storage} ' if self.storage != 'host' else ''}"
            f"clustering={'on' if self.clustering else 'off'} {self.optimizer} steps={self.steps}"
            f"{' on ' + self.data if self.data else ''}{' ' + self.variant if self.variant else ''}"
            f"{f' restarted at world_size={self.restart}' if self.restart else ''}"
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def simpler(self) -> Iterable[Case]:
        """Cases with one thing made simpler, in the order in which they are worth trying."""
        if self.restart:
            yield replace(self, restart=0)
        if self.variant:
            yield replace(self, variant="")
        if self.storage != "host":
            yield replace(self, storage="host")
        if self.replicas > 1 or self.nodes > 1:
            yield replace(self, replicas=1, nodes=1)
        elif self.world_size > 1 and not self.changes.on_ranks:
            yield replace(self, world_size=1)
            yield replace(self, world_size=self.world_size // 2)
        if self.micro_batches > 1:
            yield replace(self, micro_batches=1)
            yield replace(self, micro_batches=self.micro_batches // 2)
        if self.clustering:
            yield replace(self, clustering=False)
        if self.optimizer != "sgd":
            yield replace(self, optimizer="sgd")
        if self.delay_seed is not None:
            yield replace(self, delay_seed=None)


def small_table(
    modes: Iterable[Mode],
    world_sizes: Iterable[int],
    micro_batches: Iterable[int],
    steps: int | None = None,
) -> list[Case]:
    """Cases for an implementation on which a step takes long: modes x world sizes x micro-batches x storages
    at ``"batch"``, with the other factors dealt round robin. Each twice: the job, whose reference runs on the
    same implementation, and `CPU_BITS`, whose reference runs on the CPU's kernels. And all policies where
    tables are on the device.
    """
    modes, world_sizes, micro_batches = tuple(modes), tuple(world_sizes), tuple(micro_batches)
    every = [*product(modes, world_sizes, micro_batches, STORAGES)]
    cases = [
        Case(
            mode, "batch", ranks, count, index % 2 == 1, OPTIMIZERS[-1 - index % 4 % 3], steps or 4,
            storage=storage, variant=variant,
        )
        for variant in ("", CPU_BITS)
        for index, (mode, ranks, count, storage) in enumerate(every)
    ]  # fmt: skip
    sizes = max(world_sizes), max(micro_batches)
    together = Case(modes[-1], "batch", *sizes, True, "adam", steps or VARIANT_STEPS, variant="policies")
    return cases + [replace(together, storage=storage) for storage in STORAGES[1:]]


def contract_table(
    size: str = "default",
    modes: Iterable[Mode] = PIPELINED,
    world_sizes: Iterable[int] = WORLD_SIZES,
    micro_batches: Iterable[int] = MICRO_BATCHES,
    steps: int | None = None,
) -> list[Case]:
    """Cases of a run of `tritonrec verify`.

    ``"full"`` is the whole product. ``"default"`` covers every triple of three factors' values, and every
    mode, world size and N with an exchange for each micro-batch, as NestPipe has them; it adds the longest
    case: thirty steps at the largest world size and window. ``"quick"`` covers every value of every
    factor, and every mode at both levels. Each adds cases on `HOSTILE`, and `extra_cases`. The choice is
    deterministic.
    """
    factors = (
        tuple(modes),
        CONSISTENCIES,
        tuple(world_sizes),
        tuple(micro_batches),
        (False, True),
        OPTIMIZERS,
        ("", EACH),
    )
    length = steps or {"quick": 3}.get(size, 6)
    everything = [
        Case(mode, level, ranks, count, clustered, rule, length, index if index % 2 else None, "", sharing)
        for index, (mode, level, ranks, count, clustered, rule, sharing) in enumerate(product(*factors))
        if not sharing or ranks > 1  # one rank sends nothing
    ]
    if size == "full":
        chosen = everything
    elif size == "quick":
        chosen = _cover(everything, lambda case: {*enumerate(_values(case)), (case.mode, case.consistency)})
    elif size == "default":
        chosen = _cover(everything, _triples)
        longest = Case(
            factors[0][-1],
            "batch",
            max(factors[2]),
            max(factors[3]),
            True,
            "adam",
            steps or 30,
            delay_seed=None,
        )
        chosen.append(longest)
    else:
        raise ValueError(f"size must be quick, default or full, got {size!r}")
    ranks, count = max(factors[2]), max(factors[3])
    for mode in factors[0][-1:] if size == "quick" else factors[0]:
        for consistency in CONSISTENCIES:
            hostile = Case(mode, consistency, ranks, count, True, "adam", steps or 6, 7, HOSTILE)
            chosen += [
                hostile,
                replace(hostile, world_size=min(factors[2]), clustering=False, delay_seed=None),
            ]
    chosen += extra_cases(size, factors[0], factors[2], factors[3], steps)
    order = {mode: place for place, mode in enumerate(("sequential", *factors[0]))}

    def place(c: Case) -> tuple[Any, ...]:
        if c.replicas > 1 or c.nodes > 1:
            return 3, c.nodes, c.variant, c.world_size, c.replicas, order[c.mode]
        if c.storage != "host":
            return 4, c.storage, c.restart, c.variant, order[c.mode]
        if c.restart:
            return 2, c.world_size, c.restart
        plain = (c.consistency, c.world_size, c.micro_batches, c.steps)
        factor = c.variant in ("", EACH)
        return (0, order[c.mode], *plain) if factor else (1, c.variant, order[c.mode], *plain)

    return sorted(chosen, key=place)


def extra_cases(
    size: str,
    modes: Sequence[Mode],
    world_sizes: Sequence[int],
    micro_batches: Sequence[int],
    steps: int | None,
) -> list[Case]:
    """Every variant, restarts from every world size up to the largest at every other, and what loses a rank.

    ``"full"`` runs each variant in every mode and world size, and at both levels; the others run it once,
    with modes and micro-batches dealt round robin; ``"quick"`` restarts once. At least `VARIANT_STEPS` steps.
    """
    length, largest = max(steps or 0, VARIANT_STEPS), max(world_sizes)
    variants = {
        name: each
        for name, each in every_variant().items()
        if largest >= each.least[0] and max(micro_batches) >= each.least[1]
    }

    def case(index: int, **changes: Any) -> Case:
        variant = variants[changes["variant"]]
        able = [mode for mode in modes if mode in variant.modes]
        counts = [count for count in micro_batches if count >= variant.least[1]]
        mode, count = able[-1 - index % len(able)], counts[-1 - index % len(counts)]
        plain = Case(mode, "batch", largest, count, index % 3 == 1, "adam", length, delay_seed=index)
        return replace(plain, **changes)

    if size == "full":
        wide = product(enumerate(variants), modes, world_sizes, CONSISTENCIES)
        cases = [
            case(index, variant=name, mode=mode, world_size=ranks, consistency=consistency)
            for (index, name), mode, ranks, consistency in wide
            if not variants[name].alone and mode in variants[name].modes and ranks >= variants[name].least[0]
        ]
    else:
        cases = [
            case(index, variant=name)
            for index, (name, each) in enumerate(variants.items())
            if not each.alone and not set(modes).isdisjoint(each.modes)
        ]
    cases += loop_cases(size, world_sizes, micro_batches, length)
    if size != "quick":
        cases += rule_cases(modes, largest, length)
    cases += storage_cases(size, modes, largest, micro_batches, length)
    cases += replica_cases(size, modes, largest, micro_batches, length)
    cases += node_cases(size, modes, largest, micro_batches, length)
    every = range(1, largest + 1)
    pairs = [(largest, 1)] if size == "quick" else [*product(every, every)]
    if size != "quick":
        for name in ("fp16", "packed-sums"):
            cases.append(case(0, world_size=largest, restart=1, variant=name, clustering=False))
    for index, (before, after) in enumerate(pairs):
        cases.append(case(index, world_size=before, restart=after, variant=RESTART, clustering=False))
    if largest > 1:
        cases.append(case(0, restart=largest - 1, variant=STREAM, clustering=False))
        cases += [
            case(0, world_size=min(largest, 3), variant=name, clustering=False)
            for name, each in variants.items()
            if each.on_ranks
        ]
    return cases


def loop_cases(size: str, world_sizes: Sequence[int], micro_batches: Sequence[int], steps: int) -> list[Case]:
    """Loops of one's own: every world size with an N, and `HOSTILE`; ``"quick"`` runs the last one."""
    cases = [
        Case(
            "sequential", "batch", ranks, micro_batches[index % len(micro_batches)], False,
            OPTIMIZERS[-1 - index % 3], steps, variant=OWN_LOOP,
        )
        for index, ranks in enumerate(world_sizes)
    ]  # fmt: skip
    cases.append(replace(cases[-1], micro_batches=max(micro_batches), data=HOSTILE))
    return cases[-1:] if size == "quick" else cases


def rule_cases(modes: Sequence[Mode], largest: int, steps: int) -> list[Case]:
    """The rules that `OPTIMIZERS` leaves out, once each, with weight decay: in the last mode on two ranks."""
    variants: dict[OptimizerName, str] = {
        "momentum_sgd": "weight-decay",
        "adagrad": "weight-decay",
        "adamw": "weight-decay",
        "rowwise_adam": "lazy-decay", "rowwise_adagradw": "lazy-decay", "lars_sgd": "weight-decay",
        "lamb": "weight-decay", "rowwise_lamb": "lazy-decay", "ftrl": "weight-decay",
    }  # fmt: skip
    return [
        Case(modes[-1], "batch", min(largest, 2), 4, True, rule, steps, 7, variant=variant)
        for rule, variant in variants.items()
    ]


def storage_cases(
    size: str, modes: Sequence[Mode], largest: int, micro_batches: Sequence[int], steps: int
) -> list[Case]:
    """Tables in device memory, cached there, on disk, and both: every mode, all policies, and a restart
    elsewhere.

    The device is that of the job; on the CPU the same tables and stages run, with its kernels. ``"quick"``
    runs a case of each.
    """
    cases = []
    for storage in (*STORAGES[1:], *DISK):
        plain = Case(modes[-1], "batch", largest, max(micro_batches), True, "adam", steps, 3, storage=storage)
        variants = [name for name in ("scale", "policies") if modes[-1] in VARIANTS[name].modes]
        cases.append(replace(plain, variant=variants[0], steps=2 * steps))  # updates of three steps
        if size == "quick":
            continue
        cases += [replace(plain, mode=mode, consistency="window") for mode in modes]
        cases += [
            replace(plain, variant=name)
            for name in (*variants[1:], "first-use", "dedup-none", "merged", "exchange-bf16")
        ]
        cases.append(replace(plain, variant=RESTART, restart=1, clustering=False))
    if size != "quick":
        count = min(micro_batches, key=lambda count: abs(count - 2))
        small = Case("sequential", "batch", min(largest, 2), count, False, "adam", steps, restart=1)
        pairs = product(enumerate(("sequential", *modes)), enumerate(ON_DISK))
        cases += [
            replace(small, mode=mode, variant=policy, storage=DISK[(first + second) % 2])
            for (first, mode), (second, policy) in pairs
        ]
    return cases


def replica_cases(
    size: str, modes: Sequence[Mode], largest: int, micro_batches: Sequence[int], steps: int
) -> list[Case]:
    """2D sparse parallelism: every grouping of the largest world size and of twice as many ranks.

    Each in the last mode and without any overlap; ``"quick"`` runs one grouping. Then cases with all
    switches and policies, one with packed sums, and one that goes on at another world size, with one copy of
    the tables.
    """
    if largest < 2:
        return []
    ranks = [(world, replicas) for world in (largest, 2 * largest) for replicas in range(2, world + 1)]
    meshes = [(world, replicas) for world, replicas in ranks if world % replicas == 0]
    optimizers = OPTIMIZERS[::-1]
    cases = [
        Case(
            mode, "batch", world, micro_batches[index % len(micro_batches)], True,
            optimizers[index % 3], steps, index if mode in PIPELINED else None, replicas=replicas,
        )
        for index, (world, replicas) in enumerate(meshes[:1] if size == "quick" else meshes)
        for mode in (modes[-1], "sequential")
    ]  # fmt: skip
    if "nestpipe" in modes:
        both = Case("nestpipe", "batch", 2 * (largest // 2), max(micro_batches), True, "adam", steps, 5)
        cases.append(replace(both, variant="scale", replicas=2))
        if size != "quick":
            cases.append(replace(both, variant="scale", world_size=2 * largest, replicas=largest))
            cases.append(replace(both, variant="packed-sums", replicas=2))
        cases.append(replace(both, variant=RESTART, replicas=2, restart=1))
    return cases


def node_cases(
    size: str, modes: Sequence[Mode], largest: int, micro_batches: Sequence[int], steps: int
) -> list[Case]:
    """Lookups in two steps: the largest world size on nodes of two ranks and of one, and twice as many ranks.

    Each in the last mode and without any overlap; ``"quick"`` runs one. Then cases with all switches, without
    dedup at the owner, with packed sums and rows in 16 bits, with tables on the device, and one that goes on
    at another world size in one step.
    """
    if largest < 4 or largest % 2:
        return []
    cuts = [(largest, largest // 2), (largest, largest), (2 * largest, 2), (2 * largest, largest)]
    optimizers = OPTIMIZERS[::-1]
    cases = [
        Case(
            mode, "batch", world, micro_batches[index % len(micro_batches)], True,
            optimizers[index % 3], steps, index if mode in PIPELINED else None, nodes=nodes,
        )
        for index, (world, nodes) in enumerate(cuts[:1] if size == "quick" else cuts)
        for mode in (modes[-1], "sequential")
    ]  # fmt: skip
    if "nestpipe" in modes:
        both = Case("nestpipe", "batch", largest, max(micro_batches), True, "adam", steps, 5, nodes=2)
        cases.append(replace(both, variant="scale"))
        if size != "quick":
            cases.append(replace(both, variant="scale", world_size=2 * largest))
            names = ("dedup-exchange", "packed-sums", "exchange-bf16", EACH, "accumulate")
            cases += [replace(both, variant=name) for name in names]
            cases += [replace(both, storage=storage) for storage in ("device", "cached")]
        cases.append(replace(both, variant=RESTART, restart=1))
    return cases


def _values(case: Case) -> tuple[Any, ...]:
    return (
        case.mode,
        case.consistency,
        case.world_size,
        case.micro_batches,
        case.clustering,
        case.optimizer,
        case.variant,
        case.delay_seed is not None,
    )


def _triples(case: Case) -> set[tuple[Any, ...]]:
    values = set(combinations(enumerate(_values(case)), 3))
    # the paper's own form, in every mode and window and at every world size
    return values | ({(case.mode, case.world_size, case.micro_batches)} if case.variant == EACH else set())


def _cover(cases: list[Case], covers) -> list[Case]:
    """A few cases that together cover whatever any case covers; greedy, the same every time."""
    candidates = cases[:]
    Random(0).shuffle(candidates)
    open_ = set().union(*(covers(case) for case in candidates))
    chosen = []
    while open_:
        best = max(candidates, key=lambda case: len(covers(case) & open_))
        chosen.append(best)
        open_ -= covers(best)
    return chosen
