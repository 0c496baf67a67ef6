"""Variants of the harness's job: parts of the embedding system switched on, one at a time and together.

A variant changes the case, and its reference only where it changes what training computes: eviction does,
merging tables or dropping repeated keys does not. Those of tools (serving, resilience, Slipstream) stand in
`tools/`, which the core loads by name when a case of theirs, or the whole table, is wanted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from typing import Any

import torch

from ...data import Batch
from ...embedding import Eviction, PrecisionTiers, TablePolicy
from ...nn import RECOMPUTED, HSTUConfig
from ...pipeline import PIPELINED, TWO_BUFFERS, LossScaling, Mode, Trainer
from ..devices import Target
from ..job import Job, Loader
from .jobs import FoldedJob, InBatchJob, PublishedJob, WeightedJob
from .own_code import ConvertedJob
from .state import Comparison

RESTART = "restart"
"""The variant that is saved half way and goes on at another world size."""
IN_BATCH = "in-batch"
"""The variant whose losses are of the whole global batch."""
OWN_LOOP = "hash-embedding"
"""The variant without a trainer, and so without a mode."""
EACH = "exchanges-each"
"""The variant that is a factor of the table."""
CPU_BITS = "cpu-bits"
"""The variant whose reference runs on the CPU's kernels, whatever the case runs on."""
STREAM = "stream"
"""The variant whose batches are streamed from shards, and whose position is in the checkpoint."""


Expected = Callable[[int], Mapping[str, torch.Tensor]]
"""A step's state of the reference."""


@dataclass
class Run:
    """A case on one rank, as its variant's tool gets it.

    Args:
        trainer, job, loader, comparison, expected: of the case. steps: those that are trained.
        batches: of these steps; they can be read once. folder: of all ranks, empty at first and removed at
            the end. memory: see `Stretch`.
        injected: `Injection.tool` of a fault, else None. stack: closed behind the last save.
        due: parts that the tool has to compare after the last step. counts: what the tool counted.
    """

    trainer: Trainer
    job: Job
    loader: Loader
    comparison: Comparison
    expected: Expected
    steps: range
    batches: Iterable[Batch]
    folder: str
    memory: Any
    injected: Any
    stack: ExitStack
    due: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


Tool = Callable[[Run], Iterable[Iterable[Batch]]]
"""What stands around the training of a case, mostly a generator: it gives the batches in stretches, between
which the pipeline is empty, and behind the last one compares what it has made."""


def no_tool(run: Run) -> Iterable[Iterable[Batch]]:
    """All batches in one stretch, and nothing besides."""
    return [run.batches]


@dataclass(frozen=True)
class Variant:
    """Changes to `Job` and `WindowConfig`.

    Args:
        what: in a few words, for tables and help.
        both: changes to the job of the case and of its reference. case: changes to the case's job only.
        reference: changes to the reference's job only. window: changes to the case's `WindowConfig`.
        per_world: the batches depend on the world size, so each has a reference of its own.
        shows: counts that tell what the variant did, of all ranks and steps; one that is zero shows that the
            case proves nothing, and fails it.
        modes: those that can do it. least: the world size and the micro-batches below which it does nothing.
        kind: of the jobs. own_loop: train by `OwnLoop` in place of a trainer.
        tool: what stands around the training, and what it compares.
        on_ranks: runs the case, with the arguments of `run_case` and a timeout, on processes of its own, and
            returns their reports. The table has one case, on the CPU.
        alone: it is not in the table, or has cases of its own there.
    """

    what: str
    both: Mapping[str, Any] = field(default_factory=dict)
    case: Mapping[str, Any] = field(default_factory=dict)
    reference: Mapping[str, Any] = field(default_factory=dict)
    window: Mapping[str, Any] = field(default_factory=dict)
    per_world: bool = False
    shows: tuple[str, ...] = ()
    modes: tuple[Mode, ...] = PIPELINED
    least: tuple[int, int] = (1, 1)
    kind: type[Job] = Job
    own_loop: bool = False
    tool: Tool = no_tool
    on_ranks: Callable[..., list[Any]] | None = None
    alone: bool = False

    def job(self, job: Job, changes: Mapping[str, Any]) -> Job:
        """The harness's `job` with the changes of both runs and of one, on a log with labels if needed."""
        plain = {each.name: getattr(job, each.name) for each in fields(Job)}
        made = self.kind(**{**plain, **self.both, **changes})
        return made if made.model not in ("grm", "dlrm") or made.has_labels else replace(made, data=RATED)


MADE = "zipf:users=150,items=600,median_length=9,seed=3"
"""A log of many keys that come and go, on which a policy acts within a few steps."""
RATED = "zipf:users=120,items=300,ratings=1,seed=7"
"""A log with ratings."""
CRITEO = "criteo:samples=400,scale=0.0001,seed=3"
"""Clicks with all 26 features."""
SMALL: dict[str, Any] = {"batch_size": 9, "num_negatives": 1}
"""So few keys a step that not all of a table is in use at once."""
POLICIES = TablePolicy(
    Eviction("lru", capacity=90, every=2), admission=2, precision=PrecisionTiers(2, every=3)
)


MOVING = LossScaling(2.0**18, growth_interval=2)
"""Too large at the start, so that it falls, and then rises again."""


def _policy(what: str, *shows: str, **policy: Any) -> Variant:
    return Variant(what, {**SMALL, "data": MADE, "policy": TablePolicy(**policy)}, shows=shows)


VARIANTS: dict[str, Variant] = {
    "tiny-table": Variant(
        "tables grow from eight slots, in chunks of 16 rows",
        case={"slots": 8, "chunk_rows": 16},
        reference={"slots": 1 << 16},
        shows=("inserted",),
    ),
    "dedup-none": Variant(
        "repeated keys are sent and read", window={"dedup": "none"}, shows=("exchanged", "read")
    ),
    "dedup-exchange": Variant(
        "dedup before the exchange only", window={"dedup": "exchange"}, shows=("exchanged", "read")
    ),
    "dedup-lookup": Variant(
        "dedup before the lookup only", window={"dedup": "lookup"}, shows=("exchanged", "read")
    ),
    "dedup-both": Variant("dedup at both places", shows=("exchanged", "read")),
    "lru": _policy("least recently used rows are evicted", "evicted", eviction=Eviction("lru", capacity=170)),
    "lfu": _policy(
        "least frequently used rows are evicted", "evicted", eviction=Eviction("lfu", capacity=170, every=2)
    ),
    "ttl": _policy("rows unused for two steps are evicted", "evicted", eviction=Eviction("ttl", ttl=2)),
    "admission": _policy("a key gets a row at its second step", "rejected", "inserted", admission=2),
    "precision-tiers": _policy(
        "seldom used rows in 16 bits", "promoted", "demoted", precision=PrecisionTiers(2, every=2)
    ),
    "policies": _policy("these together", "evicted", "rejected", "promoted", **vars(POLICIES)),
    "merged": Variant(
        "GRM with its tables merged, of 60 and 64 columns",
        {"model": "grm", "context_dim": 60},
        {"merge": True},
        {"merge": False},
        shows=("lookups",),
    ),
    "unmerged": Variant(
        "GRM with a table for each feature", {"model": "grm"}, {"merge": False}, shows=("lookups",)
    ),
    "grm-policies": Variant(
        "GRM, merged, with all policies",
        {"model": "grm", "context_dim": 60, "batch_size": 12, "policy": POLICIES},
        {"merge": True},
        {"merge": False},
        shows=("rejected", "promoted"),
    ),
    "converted": Variant(
        "a SASRec of torch's modules, converted, in place of HSTU, on samples of many lengths",
        {"data": MADE},
        kind=ConvertedJob,
        shows=("lookups",),
    ),
    OWN_LOOP: Variant(
        "hash embeddings in a loop of one's own, without a trainer",
        shows=("inserted",),
        modes=(),
        own_loop=True,
    ),
    "fuxi": Variant("FuXi-alpha in place of HSTU", {"model": "fuxi"}, shows=("lookups",)),
    "fuxi-rms": Variant(
        "FuXi-alpha with the root mean square norm, as published",
        {"model": "fuxi"},
        kind=PublishedJob,
        shows=("lookups",),
    ),
    "grm-product": Variant(
        "GRM whose layers norm the product of attention and gate (MTGRBoost, equation 3)",
        {"model": "grm"},
        kind=PublishedJob,
        shows=("lookups",),
    ),
    "dlrm": Variant("DLRM in place of HSTU, on ratings as clicks", {"model": "dlrm"}, shows=("lookups",)),
    "weighted-bags": Variant(
        "DLRM on bags of ids with weights, some of them empty",
        {"model": "dlrm"},
        kind=WeightedJob,
        shows=("lookups",),
    ),
    IN_BATCH: Variant(
        "two towers with in-batch softmax over the global batch, masked and corrected by log q",
        {"data": MADE},
        kind=InBatchJob,
        shows=("lookups",),
    ),
    "dlrm-criteo": Variant(
        "DLRM on made clicks in Criteo's shape, with policies, merged",
        {
            "model": "dlrm",
            "data": CRITEO,
            "batch_size": 32,
            "policy": TablePolicy(Eviction("lru", capacity=15), 2, PrecisionTiers(2, 3)),
        },
        {"merge": True},
        {"merge": False},
        shows=("evicted", "rejected", "promoted"),
    ),
    "balanced": Variant("a batch's samples dealt to ranks by cost", case={"balance": True}, shows=("found",)),
    "dynamic": Variant(
        "batches cut by tokens, gradients weighted by true counts",
        {"dynamic": True},
        per_world=True,
        shows=("found",),
    ),
    "accumulate": Variant("three batches make one update", window={"accumulate": 3}, shows=("lookups",)),
    "relative-bias": Variant(
        "HSTU with learned biases of position and time",
        {"sizes": HSTUConfig(relative_bias=True)},
        shows=("lookups",),
    ),
    "recompute": Variant(
        "all of a layer computed again in backward, or nothing",
        case={"sizes": HSTUConfig(recompute=RECOMPUTED)},
        reference={"sizes": HSTUConfig(recompute=())},
        shows=("lookups",),
    ),
    "checkpoint": Variant(
        "the dense layers under torch.utils.checkpoint",
        case={"wrapping": "checkpoint"},
        shows=("lookups",),
    ),
    "fsdp": Variant(
        "the dense model sharded by fully_shard, clipped by the norm",
        {"fused": False},
        case={"wrapping": "fully_shard"},
        window={"max_grad_norm": 0.02},
        shows=("lookups",),
    ),
    "early-dense": Variant(
        "dense gradients of the later layers are reduced beside the last backward, in two buckets",
        {"sizes": HSTUConfig(dim=32, qk_dim=16, v_dim=16, layers=3)},
        window={"exchanges": "each"},
        shows=("early",),
        modes=("fwp", "nestpipe"),
        least=(2, 2),
    ),
    "first-use": Variant(
        "rows are sent with their first use, gradients with their last",
        window={"first_use": True},
        shows=("exchanged",),
    ),
    "taper": Variant(
        "small micro-batches at the ends of a window", window={"taper": 0.5}, shows=("lookups",)
    ),
    "skip-fetch": Variant(
        "rows that consecutive batches use stay in the buffers",
        window={"skip_fetch": True},
        shows=("kept", "written"),
        modes=TWO_BUFFERS,
    ),
    "scale": Variant(
        "first use, taper and skipped fetches together, over three accumulated batches, with policies",
        {**SMALL, "data": MADE, "policy": POLICIES},
        window={"first_use": True, "taper": 0.5, "skip_fetch": True, "accumulate": 3},
        shows=("kept", "written", "rejected"),
        modes=TWO_BUFFERS,
    ),
    "weight-decay": Variant(
        "weight decay, and a learning rate that rises and falls",
        {"weight_decay": 0.1, "lr_schedule": "cosine", "lr_warmup": 2, "lr_steps": 8},
        shows=("lookups",),
    ),
    "recipe": Variant(
        "clipping by norm and value, averaged weights, weight decay, warm-up and cosine",
        {"weight_decay": 0.1, "lr_schedule": "cosine", "lr_warmup": 2, "lr_steps": 8, "ema": 0.75},
        window={"max_grad_norm": 0.02, "max_grad_value": 0.01},
        shows=("lookups",),
    ),
    "bf16": Variant("the model in bfloat16", window={"precision": "bf16"}, shows=("lookups",)),
    "fp16": Variant(
        "the model in float16: the loss scale falls after overflows, and rises",
        window={"precision": "fp16", "loss_scaling": MOVING},
        shows=("skipped",),
    ),
    "exchanges-once": Variant(
        "a window's rows come in one exchange, its gradients leave in one",
        window={"exchanges": "once"},
        shows=("exchanged",),
    ),
    EACH: Variant(
        "each micro-batch has exchanges of its own",
        window={"exchanges": "each"},
        shows=("exchanged",),
        alone=True,
    ),
    "exchange-bf16": Variant(
        "rows are exchanged in bfloat16", window={"exchange_precision": "bf16"}, shows=("exchanged",)
    ),
    "packed-sums": Variant(
        "exact sums are sent in the bytes they need, on any device",
        window={"exchange_sums": "packed"},
        shows=("exchanged",),
    ),
    "whole-sums": Variant(
        "exact sums are sent whole, 8 bytes a value, on any device",
        window={"exchange_sums": "whole"},
        shows=("exchanged",),
    ),
    "mixed": Variant(
        "float16 with clipping, rows exchanged in float16, first use and kept rows, with policies",
        {**SMALL, "data": MADE, "policy": POLICIES},
        window={
            "precision": "fp16",
            "loss_scaling": MOVING,
            "exchange_precision": "fp16",
            "max_grad_norm": 0.02,
            "first_use": True,
            "skip_fetch": True,
        },
        shows=("skipped", "kept"),
        modes=TWO_BUFFERS,
    ),
    "lazy-decay": Variant(
        "rows make up for the decay that they have missed, at a falling learning rate",
        {
            **SMALL,
            "data": MADE,
            "lr": 0.02,
            "weight_decay": 0.5,
            "lazy_weight_decay": True,
            "lr_schedule": "linear",
            "lr_steps": 9,
            "policy": TablePolicy(Eviction("lru", capacity=120), admission=2),
        },
        shows=("evicted", "rejected"),
    ),
    STREAM: Variant(
        "batches streamed from Parquet shards, of which a rank reads its own",
        {"batch_size": 12, "num_negatives": 1, "data": f"shards:{MADE}"},
        shows=("shard_bytes",),
    ),
    "stream-dynamic": Variant(
        "a stream cut by tokens",
        {"batch_size": 12, "num_negatives": 1, "data": f"shards:{MADE}", "dynamic": True},
        per_world=True,
        shows=("shard_bytes",),
    ),
    "stream-grm": Variant(
        "GRM on windows streamed from Parquet shards",
        {"model": "grm", "batch_size": 12, "data": f"shards:{RATED}"},
        shows=("shard_bytes",),
    ),
    "stream-clicks": Variant(
        "DLRM on clicks in Criteo's format streamed from Parquet shards",
        {"model": "dlrm", "batch_size": 12, "data": f"shards:{CRITEO}"},
        shows=("shard_bytes",),
    ),
    RESTART: Variant(
        "eviction, admission and precision tiers across a restart",
        {**SMALL, "policy": POLICIES},
        shows=("rejected",),
        alone=True,
    ),
    CPU_BITS: Variant(
        "a model without sums of floats of its own, compared with the CPU's kernels",
        reference={"target": Target("cpu")},
        kind=FoldedJob,
        shows=("inserted", "exchanged"),
        alone=True,
    ),
}


_OF_TOOLS: dict[str, dict[str, Variant]] = {}


def tools() -> Any:
    """The package of tools, which adds their variants and faults as it is loaded."""
    return import_module(f"{__package__}.tools")


def add_variants(added: Mapping[str, Variant], before: str) -> None:
    """Those of a tool, put before the core's of that name: mode and N of a table's case go by its place."""
    _OF_TOOLS.setdefault(before, {}).update(added)


def every_variant() -> dict[str, Variant]:
    """Those of the core and of tools, in the order of the table."""
    tools()
    every: dict[str, Variant] = {}
    for name, each in VARIANTS.items():
        every |= {**_OF_TOOLS.get(name, {}), name: each}
    return every


def variant_of(name: str) -> Variant:
    """The variant of that name, of the core or of a tool; one that changes nothing for an empty name."""
    if not name:
        return Variant("")
    return VARIANTS[name] if name in VARIANTS else every_variant()[name]
