"""A configuration to try: one flat record, the case of the contract that it stands for, and its words."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from ...embedding import OptimizerName, TablePolicy
from ...nn import HSTUConfig
from ...pipeline import Consistency, LossScaling, Mode, Precision
from ...pipeline.window import Dedup, Exchanges, ExchangeSums
from ...settings import MOST
from ..cli.words import eviction, precision_tiers
from ..job import Job, LrSchedule, ModelName, Wrapping
from ..streams import SHARDS
from ..verify.cases import OF_REFERENCES, Case, Reference, Stored
from ..verify.tools.replay import replayed
from ..verify.variants import Variant, no_tool

SLOTS = 1 << 10
"""Of the reference's tables, which never grow."""


@dataclass(frozen=True)
class Configuration:
    """Everything that a try chooses; the defaults are the simplest one.

    Args:
        mode, consistency, world_size, micro_batches, clustering, optimizer, steps, delay_seed, restart,
            replicas, nodes, storage: of `Case`. `steps` of a restart are rounded up, so that its halves are
            whole updates.
        users, items, median_length, extreme_ids, data_seed: of a log made by ``zipf``.
        streamed: the log is streamed from shards.
        evict, tiers: a table's policies in the words of `tritonrec train`, empty for none.
        loss_scale: at the start, of precision ``fp16``; it grows after two updates.
        cache_rows: of a cached table. replay: the share of the work that is computed again.
        the others: of `Job`, `HSTUConfig`, `TablePolicy` and `WindowConfig`.
    """

    mode: Mode = "sequential"
    consistency: Consistency = "batch"
    world_size: int = 1
    micro_batches: int = 1
    clustering: bool = False
    optimizer: OptimizerName = "sgd"
    steps: int = 1
    delay_seed: int | None = None
    restart: int = 0
    replicas: int = 1
    nodes: int = 1
    storage: Stored = "host"
    users: int = 8
    items: int = 3
    median_length: int = 1
    extreme_ids: bool = False
    data_seed: int = 0
    streamed: bool = False
    model: ModelName = "hstu"
    batch_size: int = 1
    max_seq_len: int = 2
    num_negatives: int = 1
    heads: int = 1
    head_dim: int = 1
    layers: int = 1
    dropout: float = 0.0
    relative_bias: bool = False
    recompute: tuple[str, ...] = ()
    wrapping: Wrapping = ""
    fused: bool = False
    lr: float = 0.05
    weight_decay: float = 0.0
    lazy_weight_decay: bool = False
    lr_schedule: LrSchedule = "constant"
    lr_warmup: int = 0
    lr_steps: int = 4
    ema: float = 0.0
    seed: int = 0
    slots: int = 64
    chunk_rows: int = 64
    merge: bool = False
    balance: bool = False
    dynamic: bool = False
    evict: str = ""
    admission: int = 1
    admission_window: int = 1000
    tiers: str = ""
    cache_rows: int = 40
    accumulate: int = 1
    dedup: Dedup = "both"
    first_use: bool = False
    taper: float = 1.0
    skip_fetch: bool = False
    depth: int = 0
    max_grad_norm: float = 0.0
    max_grad_value: float = 0.0
    skip_nonfinite: bool = False
    precision: Precision = "float32"
    loss_scale: float = 2.0**16
    exchange_precision: Precision = "float32"
    replay: float = 0.0
    exchange_sums: ExchangeSums = "auto"
    exchanges: Exchanges = "joined"

    @classmethod
    def from_json(cls, text: str) -> Configuration:
        """The simplest configuration with the settings of `text`, a JSON object.

        ValueError for other text, a name that is no setting, or a value of another type.
        """
        try:
            given = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"a configuration is a JSON object, got {text[:60]!r}: {error}") from None
        if not isinstance(given, dict):
            raise ValueError(f"a configuration is a JSON object, got {text[:60]!r}")
        defaults = {each.name: each.default for each in fields(cls)}
        if unknown := sorted(set(given) - set(defaults)):
            raise ValueError(f"a configuration has no setting named {', '.join(unknown)}")
        for name, value in given.items():
            kind = int if name == "delay_seed" else type(defaults[name])
            if kind is float and type(value) is int:
                given[name] = float(value)
            elif kind is tuple and isinstance(value, list) and all(isinstance(one, str) for one in value):
                given[name] = tuple(value)
            elif type(value) is not kind and not (name == "delay_seed" and value is None):
                raise ValueError(f"{name} of a configuration is of type {kind.__name__}, got {value!r}")
            if kind is int and value is not None and not -MOST <= value <= MOST:
                raise ValueError(f"{name} of a configuration is at most {MOST}, got {value}")
        return cls(**given)

    def as_json(self) -> dict[str, Any]:
        """The settings that differ from the simplest configuration."""
        return {
            each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default
        }

    @property
    def command(self) -> str:
        """The command that tries this configuration again."""
        return f"tritonrec fuzz --configuration {shlex.quote(json.dumps(self.as_json()))}"

    @property
    def data(self) -> str:
        """The log, in the words of ``--data``."""
        log = (
            f"zipf:users={self.users},items={self.items},median_length={self.median_length},"
            f"seed={self.data_seed}"
        )
        if self.model in ("grm", "dlrm"):
            log += ",ratings=1"
        if self.extreme_ids:
            log += ",extreme_ids=1"
        return SHARDS + log if self.streamed else log

    @property
    def sizes(self) -> HSTUConfig:
        """Of the dense model."""
        return HSTUConfig(
            dim=self.heads * self.head_dim, layers=self.layers, heads=self.heads, qk_dim=self.head_dim,
            v_dim=self.head_dim, max_seq_len=self.max_seq_len, dropout=self.dropout,
            relative_bias=self.relative_bias, recompute=self.recompute,
        )  # fmt: skip

    @property
    def job(self) -> Job:
        """The job; ValueError for settings that exclude each other."""
        shared = {name: getattr(self, name) for name in _OF_JOB}
        policy = TablePolicy(
            eviction(self.evict), self.admission, precision_tiers(self.tiers), self.admission_window
        )
        dim = self.sizes.dim
        return Job(
            data=self.data, sizes=self.sizes, policy=policy, max_exposed=2, context_dim=3,
            bottom=(dim,), top=(3,), **shared,
        )  # fmt: skip

    @property
    def window(self) -> dict[str, Any]:
        """Settings of `WindowConfig` beside those that a case has."""
        scaling = LossScaling(self.loss_scale, growth_interval=2)
        return {**{name: getattr(self, name) for name in _OF_WINDOW}, "loss_scaling": scaling}

    @property
    def case(self) -> DrawnCase:
        """The case of the contract; ValueError where a setting is refused."""
        shared = {
            each.name: getattr(self, each.name)
            for each in fields(Case)
            if each.name not in ("data", "variant")
        }
        return DrawnCase(**shared, configuration=self)


_OF_JOB = [each.name for each in fields(Job) if each.name in {one.name for one in fields(Configuration)}]
_OF_WINDOW = (
    "accumulate", "dedup", "first_use", "taper", "skip_fetch", "depth", "max_grad_norm", "max_grad_value",
    "skip_nonfinite", "precision", "exchange_precision", "exchange_sums", "exchanges",
)  # fmt: skip


@dataclass(frozen=True)
class DrawnCase(Case):
    """A case with the settings of a configuration in place of a variant's."""

    configuration: Configuration = Configuration()

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = 2 * max(self.configuration.accumulate, 1)
        if self.restart:
            object.__setattr__(self, "steps", -(-self.steps // whole) * whole)

    def job(self, job: Job) -> Job:
        """That of the configuration, whatever the harness's `job`."""
        return replace(self.configuration.job, placement=self.placement(self.configuration.cache_rows))

    def reference(self, job: Job) -> Reference:
        """The run it is compared with, with tables of one feature each that never grow."""
        drawn, window = self.configuration, self.configuration.window
        plain = replace(
            drawn.job, slots=SLOTS, chunk_rows=SLOTS, merge=False, balance=False, wrapping="",
            sizes=replace(drawn.sizes, recompute=()),
        )  # fmt: skip
        shared = tuple((name, window[name]) for name in OF_REFERENCES)
        ranks = self.world_size if drawn.dynamic else 1
        return Reference(plain, self.optimizer, drawn.accumulate, ranks, shared)

    @property
    def max_delay(self) -> float:
        """Seconds; its batches are smaller than those of the contract."""
        return 0.0005

    @property
    def shows(self) -> tuple[str, ...]:
        """Nothing: a small draw may do without an effect."""
        return ()

    def __str__(self) -> str:
        return (
            " ".join(f"{name}={value}" for name, value in self.configuration.as_json().items())
            or "the simplest"
        )

    def as_json(self) -> dict[str, Any]:
        """The settings that differ from the simplest configuration."""
        return self.configuration.as_json()

    @property
    def changes(self) -> Variant:
        """Those of the configuration."""
        share = self.configuration.replay
        tool = partial(replayed, share) if share else no_tool
        return Variant("", window=self.configuration.window, tool=tool)
