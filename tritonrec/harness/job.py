"""The training job that the harness runs: its data, its model, its tables; the same on every rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from threading import Lock
from typing import Any, Literal

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ..data import (
    ClickLoader,
    ClickLog,
    ClickStream,
    DynamicBatchLoader,
    DynamicStream,
    ImpressionLoader,
    ImpressionStream,
    Interactions,
    NextItemLoader,
    NextItemStream,
    Split,
    Vocabulary,
    clicks_from_ratings,
    load,
    load_interactions,
)  # fmt: skip
from ..data.grouped import words_of
from ..data.log_format import LogFormat, described
from ..data.sources import source_of
from ..embedding import (
    FeatureConfig,
    HashTableCollection,
    OptimizerName,
    Placement,
    RowOptimizer,
    Schedule,
    StepDecay,
    TablePolicy,
    WarmupCosine,
    WarmupLinear,
)  # fmt: skip
from ..nn import (
    DLRM,
    GRM,
    HSTU,
    DLRMConfig,
    FuXi,
    FuXiConfig,
    GRMConfig,
    HSTUConfig,
    LayerConfig,
    SASRec,
    SASRecConfig,
)  # fmt: skip
from ..settings import MOST, seed_setting, setting
from .devices import Target
from .streams import SHARDS, clicks, grouped, known_words, sequences, windows

Wrapping = Literal["", "fully_shard", "checkpoint"]
LrSchedule = Literal["constant", "linear", "cosine", "step"]
ModelName = Literal["hstu", "fuxi", "sasrec", "grm", "dlrm"]
NEXT_ITEM_MODELS: tuple[ModelName, ...] = ("hstu", "fuxi", "sasrec")
"""Models that predict the next item."""
DATA_HELP = (
    "ml-100k, zipf, zipf:users=N,items=N, a path, csv:PATH, json:PATH, parquet:PATH, or a published log as "
    "movielens-1m:PATH (docs/data.md); settings of its format behind a ?, as PATH?user=uid&time_unit=ms. For "
    "dlrm also clicks:PATH, criteo-tsv:PATH, criteo-parquet:PATH, avazu-csv:PATH, ali-ccp:PATH, criteo or "
    "criteo:samples=N, and avazu."
)
Epochs = NextItemLoader | NextItemStream | ImpressionLoader | ImpressionStream | ClickLoader | ClickStream
Streamed = NextItemStream | ImpressionStream | ClickStream
Loader = Epochs | DynamicBatchLoader | DynamicStream


@dataclass(frozen=True)
class Job:
    """A training job, as plain values that processes can exchange.

    Args:
        data: a word for `tritonrec.data.load`.
        model: those of `NEXT_ITEM_MODELS` predict the next item, ``grm`` click and conversion of shown items,
            ``dlrm`` the click of one impression.
        batch_size: samples of the global batch. max_seq_len: tokens per sample at most, for GRM of history.
        num_negatives: sampled items per token. max_exposed: shown items per sample of GRM.
        sizes: sizes and dropout of the dense model. context_dim: of rows of GRM's contextual features.
        bottom, top: hidden widths of the MLPs of DLRM, which takes ``sizes.dim`` and no other size.
        lr, eps, weight_decay, lazy_weight_decay: of rows and dense parameters; see `RowOptimizer`.
        lr_schedule, lr_warmup, lr_steps: see `embedding.learning_rate`.
        ema: decay of the averaged dense model, which is evaluated in its place; 0 for none.
        seed: of everything drawn.
        slots: slots of a key structure at the start; small, so that growth is exercised.
        chunk_rows: rows of a value chunk.
        merge: keep tables of near dimensions in one.
        policy: eviction, admission and precision tiers, of every table.
        balance: deal the samples of a batch to ranks by their cost.
        stream: a log in files is written once as shards, which are streamed; else it is read whole.
        dynamic: cut batches by tokens instead of samples (MTGRBoost, Algorithm 1); they depend on the world
            size then.
        slipstream: a `SlipstreamConfig`, of `verify`'s cases only: dropped inputs are trained on no more.
        wrapping: of `verify`'s cases only: what of torch is around the layers of the dense model: FSDP2's
            `fully_shard`, or `torch.utils.checkpoint.checkpoint`.
        fused: the dense optimizer is a fused one.
        split: see `Split.parse`; of a log of clicks the last tenth is for test by default.
        words: directory of a checkpoint whose vocabularies the log extends.
        placement: of the tables; their device is the target's.
        target: what it computes on, in `verify` and `train`; inside of `devices.kernels_of`.
        format: of a log in files; settings behind the path in `data` win.
    """

    data: str = setting("ml-100k", DATA_HELP)
    model: ModelName = setting(
        "hstu", "hstu, fuxi, sasrec: the next item. grm: clicks and conversions. dlrm: a click."
    )
    batch_size: int = setting(32, "Samples of the global batch.", 1, 2**24)
    max_seq_len: int = setting(50, "Tokens per sample at most; grm: of history.", 1, 2**20)
    num_negatives: int = setting(8, "Sampled items per token; grm has none.", 1, 2**20, option="negatives")
    max_exposed: int = setting(8, "grm: items shown per sample.", 1, 2**20)
    sizes: HSTUConfig = field(default_factory=HSTUConfig)
    context_dim: int = 16
    bottom: tuple[int, ...] = setting((64, 32), "dlrm: hidden widths of the bottom MLP.")
    top: tuple[int, ...] = setting((64, 32), "dlrm: hidden widths of the top MLP.")
    lr: float = setting(1e-3, "Learning rate.", 0, 1e6)
    eps: float = 1e-8
    weight_decay: float = setting(0.0, "Weight decay of the rule.", 0, 1e6)
    lazy_weight_decay: bool = setting(
        False, "A row makes up for the decay it has missed when it is updated; decoupled for every rule."
    )
    lr_schedule: LrSchedule = setting("constant", "The learning rate over the updates.")
    lr_warmup: int = setting(0, "linear, cosine: updates in which the learning rate rises.", 0, MOST)
    lr_steps: int = setting(
        10_000, "linear, cosine: updates to a rate of 0. step: updates to each tenth of it.", 1, MOST
    )
    ema: float = setting(
        0.0, "Decay of the dense model's average over updates, which is evaluated; 0: none.", 0, 1
    )
    seed: int = seed_setting()
    slots: int = 64
    chunk_rows: int = 65536
    merge: bool = setting(True, "Keep tables of near dimensions in one.")
    policy: TablePolicy = field(default_factory=TablePolicy)
    balance: bool = setting(False, "Deal a batch's samples to ranks by cost; no bit changes.")
    stream: bool = setting(True, "Stream a log in files, and do not read it whole.")
    dynamic: bool = setting(False, "Cut batches by tokens instead of samples.")
    slipstream: Any = None
    wrapping: Wrapping = ""
    fused: bool = True
    split: str = setting(
        "leave-one-out",
        "Parts of the log: leave-one-out, maybe with :validation behind it; ratio:0.8,0.1,0.1 of training, "
        "validation and test; time:TEST or time:VALIDATION,TEST, timestamps.",
    )
    words: str = ""
    placement: Placement = field(default_factory=Placement)
    target: Target = field(default_factory=Target)
    format: LogFormat = field(default_factory=LogFormat)

    @property
    def source(self) -> str:
        """The data with their format."""
        return described(self.data, self.format)

    @property
    def has_labels(self) -> bool:
        """Whether the log tells what was liked, as GRM and DLRM need it."""
        if self.data.startswith((*CLICKS, SHARDS)):
            return True
        found = source_of(self.source)
        if found is not None and found.is_clicks:
            return True
        log = _interactions(self.source, self.words)
        return log.rating is not None or bool(log.feedback)

    @property
    def is_streamed(self) -> bool:
        """Whether the data are shards of sequences."""
        return sequences(self.source) is not None

    def loader(self, rank: int = 0, world_size: int = 1) -> Loader:
        """Batches of one rank."""
        loader = self.epochs(rank, world_size)
        if not self.dynamic:
            return loader
        if isinstance(loader, NextItemStream):
            tokens = min(int(loader.popularity.sum()) / loader.num_samples, self.max_seq_len)
            return DynamicStream(loader, max(int(tokens * self.batch_size / world_size), 1))
        if isinstance(loader, (ClickStream, ImpressionStream)):
            raise ValueError(
                f"dynamic cuts streams of {', '.join(NEXT_ITEM_MODELS)}: choose --no-stream for this model"
            )
        return DynamicBatchLoader(loader)

    def epochs(self, rank: int = 0, world_size: int = 1) -> Epochs:
        """The loader of samples and of those held out for evaluation."""
        shard, split = (self.seed, rank, world_size, self.balance), Split.parse(self.split)
        if (stream := self._streamed(rank, world_size)) is not None:
            if self.balance:
                raise ValueError(
                    "balance deals samples by their lengths, and a rank streams its own part only: choose "
                    "dynamic, or --no-stream for a log that can be read whole"
                )
            return stream
        if self.model == "dlrm":
            return ClickLoader(_clicks(self.source, self.words, split)[0], self.batch_size, *shard)
        log = _interactions(self.source, self.words)
        if self.model == "grm":
            exposed = self.max_exposed
            return ImpressionLoader(log, self.batch_size, self.max_seq_len, exposed, *shard, split=split)
        negatives = self.num_negatives
        return NextItemLoader(log, self.batch_size, self.max_seq_len, negatives, *shard, split=split)

    def vocabularies(self) -> dict[str, Vocabulary]:
        """Of the log's words by column; {} where its ids are numbers."""
        if self.model == "dlrm":
            split = Split.parse(self.split)
            if (clicks := self._streamed(0, 1)) is None:
                return _clicks(self.source, self.words, split)[1]
            assert isinstance(clicks, ClickStream)
            return words_of(clicks.whole.root, clicks.whole.filesystem) if self._has_words else {}
        stream = self._streamed(0, 1)
        if stream is not None:
            return words_of(stream.rows.root, stream.rows.filesystem)
        return _interactions(self.source, self.words).words

    @property
    def _has_words(self) -> bool:
        source = None if self.data.startswith(SHARDS) else source_of(self.source)
        return source is not None and source.format.ids == "words"

    def _streamed(self, rank: int, world_size: int) -> Streamed | None:
        """The stream of the data; None for data that is read whole."""
        shard, split = (self.seed, rank, world_size), Split.parse(self.split)
        if self.model in NEXT_ITEM_MODELS:
            rows = grouped(self.source, self.words) if self.stream else sequences(self.source)
            sizes = (self.batch_size, self.max_seq_len, self.num_negatives)
            return None if rows is None else NextItemStream(rows, *sizes, *shard, split=split)
        if not (self.stream or self.data.startswith(SHARDS)):
            return None
        if self.model == "dlrm":
            found = clicks(self.source, self.words)
            if found is None:
                return None
            return ClickStream(found[0], self.batch_size, *shard, columns=found[1], split=split)
        folder = windows(self.source, self.max_seq_len, self.max_exposed, split, self.words)
        return None if folder is None else ImpressionStream(folder, self.batch_size, *shard)

    def build(
        self, optimizer: OptimizerName, wrap: Callable[[torch.nn.Module], object] = lambda model: None
    ) -> tuple[torch.nn.Module, HashTableCollection, torch.optim.Optimizer | None]:
        """A fresh model, an empty shard of its tables, and the dense parameters' optimizer.

        `wrap` changes the model before its parameters are given to the optimizer.
        """
        with _GENERATOR, torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = self._model().to(self.target.device)
        wrap(model)
        parameters = model.parameters()
        dense = dense_optimizer(parameters, optimizer, self.lr, self.eps, self.weight_decay, self.fused)
        return model, self.tables(optimizer), dense

    def recipe(self, model: torch.nn.Module, dense: torch.optim.Optimizer | None) -> dict[str, Any]:
        """The learning rate's schedule and the averaged model, as `Trainer` takes them."""
        rate, scheduler, average = self.learning_rate, None, None
        if callable(rate) and dense is not None:
            scheduler = torch.optim.lr_scheduler.LambdaLR(dense, lambda done: rate(done + 1) / self.lr)
        if self.ema:
            average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(self.ema))
        return {"scheduler": scheduler, "average": average}

    def _model(self) -> torch.nn.Module:
        sizes = self.sizes
        if self.model == "hstu":
            return HSTU(sizes)
        if self.model == "dlrm":
            clicks = self._click_loader()
            return DLRM(DLRMConfig(clicks.features, clicks.num_dense, sizes.dim, self.bottom, self.top))
        shared = {each.name: getattr(sizes, each.name) for each in fields(LayerConfig)}
        if self.model == "fuxi":
            return FuXi(FuXiConfig(**shared, temperature=sizes.temperature))
        if self.model == "sasrec":
            return SASRec(SASRecConfig(**shared, temperature=sizes.temperature))
        loader = self._impressions()
        context = loader.context
        return GRM(
            GRMConfig(
                **{**shared, "max_seq_len": self.max_seq_len + self.max_exposed + len(context)},
                context_dim=self.context_dim,
                context=context,
                tasks=loader.tasks,
                relative_bias=sizes.relative_bias,
                genres=loader.has_genres,
            )
        )

    def _impressions(self) -> ImpressionLoader | ImpressionStream:
        loader = self.epochs()
        assert isinstance(loader, (ImpressionLoader, ImpressionStream))
        return loader

    def _click_loader(self) -> ClickLoader | ClickStream:
        loader = self.epochs()
        assert isinstance(loader, (ClickLoader, ClickStream))
        return loader

    def tables(self, optimizer: OptimizerName) -> HashTableCollection:
        """Empty tables of the model's features."""
        return HashTableCollection(
            self.features(), self.rule(optimizer), merge=self.merge, seed=self.seed, slots=self.slots,
            chunk_rows=self.chunk_rows, placement=replace(self.placement, device=self.target.device),
        )  # fmt: skip

    def features(self) -> list[FeatureConfig]:
        """The features that the model looks up."""
        dim, policy = self.sizes.dim, self.policy
        if self.model == "dlrm":
            return [FeatureConfig(name, dim, policy=policy) for name in self._click_loader().features]
        features = [FeatureConfig("item", dim, policy=policy)]
        if self.model == "grm":
            loader = self._impressions()
            features += [FeatureConfig("action", dim, policy=policy)]
            if loader.has_genres:
                features += [FeatureConfig("genre", dim, pooling="mean", policy=policy)]
            features += [FeatureConfig(name, self.context_dim, policy=policy) for name in loader.context]
        return features

    def rule(self, optimizer: OptimizerName) -> RowOptimizer:
        """The update rule of rows."""
        return RowOptimizer(
            optimizer, self.learning_rate, self.eps,
            weight_decay=self.weight_decay, lazy_weight_decay=self.lazy_weight_decay,
        )  # fmt: skip

    @property
    def learning_rate(self) -> float | Schedule:
        """Of rows and dense parameters, by the number of the update; ValueError unless `lr` is positive."""
        if not self.lr > 0:
            raise ValueError(f"learning rate must be positive, got {self.lr}")
        if self.lr_schedule == "constant":
            return self.lr
        if self.lr_schedule == "step":
            return StepDecay(self.lr, self.lr_steps)
        kind = WarmupLinear if self.lr_schedule == "linear" else WarmupCosine
        return kind(self.lr, self.lr_warmup, self.lr_steps)

    def on(self, data: str) -> Job:
        """The same job on another log, in its own format; itself for an empty name."""
        return replace(self, data=data, format=LogFormat()) if data else self

    def as_json(self) -> dict[str, Any]:
        """The settings as JSON holds them, with lists for tuples."""
        settings = json.loads(json.dumps(asdict(self)))
        settings["format"] = {name: settings["format"][name] for name in self.format.changes()}
        settings["policy"]["heat"] = settings["policy"].pop("precision")  # its name in every checkpoint
        del settings["words"]
        return settings


def dense_optimizer(
    parameters: Iterable[torch.nn.Parameter],
    name: OptimizerName,
    lr: float,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    fused: bool = True,
) -> torch.optim.Optimizer | None:
    """torch's optimizer nearest to the rule of rows, whose row-wise forms it lacks; None for no parameters.

    A `fused` one updates all parameters in one call, where torch has it: Adagrad's runs on the CPU alone.
    """
    parameters = list(parameters)
    if not parameters:
        return None
    adagrad = name == "ftrl" or "adagrad" in name
    if adagrad and any(each.device.type != "cpu" for each in parameters):
        fused = False
    options: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "fused": fused}
    if name.endswith("sgd"):
        return torch.optim.SGD(parameters, momentum=0.0 if name == "sgd" else 0.9, **options)
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.Adam if name == "adam" else torch.optim.AdamW
    return (torch.optim.Adagrad if adagrad else kind)(parameters, eps=eps, **options)


CLICKS = ("criteo", "avazu")
"""How the words for clicks that are drawn begin."""


_GENERATOR = Lock()
"""torch's own, which ranks that are threads share."""


@lru_cache(maxsize=4)
def _interactions(spec: str, words: str) -> Interactions:
    return load_interactions(spec, words=known_words(words))


@lru_cache(maxsize=4)
def _clicks(spec: str, words: str, split: Split) -> tuple[ClickLog, dict[str, Vocabulary]]:
    """The log in the parts of a split, and the vocabularies of its words."""
    known = known_words(words)
    log = load(spec, words=known)
    clicks = clicks_from_ratings(log, split=split) if isinstance(log, Interactions) else log.divided(split)
    return clicks, known
