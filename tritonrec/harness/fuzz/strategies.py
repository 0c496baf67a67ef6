"""How configurations are drawn: by Hypothesis, which makes one that fails the smallest that still does."""

from __future__ import annotations

from typing import Any, get_args

from hypothesis import strategies as st

from ...embedding import OptimizerName
from ...nn import RECOMPUTED
from ...pipeline import Consistency, Mode, Precision
from ...pipeline.modes import STAGED
from ...pipeline.window import Dedup, ExchangeSums
from ..job import NEXT_ITEM_MODELS, LrSchedule, ModelName
from ..verify.cases import Stored
from .configuration import Configuration

RANKS = 4
MESHES = [
    (world, replicas)
    for world in range(1, RANKS + 1)
    for replicas in range(1, world + 1)
    if world % replicas == 0
]


SIMPLEST = Configuration()


def _words(name: str, literal: Any) -> st.SearchStrategy[Any]:
    """Values of a setting, the default first, to which Hypothesis shrinks."""
    return st.sampled_from(sorted(get_args(literal), key=lambda word: word != getattr(SIMPLEST, name)))


def _seldom(strategy: st.SearchStrategy[Any], usual: Any, share: int = 3) -> st.SearchStrategy[Any]:
    """`usual` most times, one in `share` a draw of `strategy`."""
    return st.integers(0, share - 1).flatmap(lambda way: strategy if way == share - 1 else st.just(usual))


def _evictions() -> st.SearchStrategy[str]:
    words = st.tuples(st.sampled_from(("lru", "lfu", "ttl")), st.integers(1, 40), st.integers(1, 4))
    return words.map(
        lambda drawn: f"{drawn[0]}:{drawn[1] if drawn[0] != 'ttl' else 1 + drawn[1] % 4}:{drawn[2]}"
    )


@st.composite
def configurations(draw: st.DrawFn, mode: Mode | None = None) -> Configuration:
    """A configuration. Many exclude themselves; the public checks tell.

    Every setting is drawn, also one that another leaves without effect: draws of one kind shrink best.
    """
    world_size, replicas = draw(st.sampled_from(MESHES))
    nodes = draw(_seldom(st.sampled_from([each for each in (2, 3, 4) if world_size % each == 0] or [1]), 1))
    consistency = draw(_words("consistency", Consistency))
    dynamic = draw(_seldom(st.just(True), False, 6))
    # The cut of another world size has other bits at "window" consistency, and other batches if `dynamic`.
    comparable = replicas == 1 or consistency == "batch"
    restarts = [world_size] if dynamic or consistency == "window" else list(range(1, RANKS + 1))
    model = draw(_words("model", ModelName))
    extreme_ids = draw(st.booleans())
    return Configuration(
        mode=draw(st.sampled_from(STAGED)) if mode is None else mode,
        consistency=consistency,
        world_size=world_size,
        replicas=replicas,
        nodes=nodes,
        micro_batches=draw(st.sampled_from((1, 2, 3, 4, 5, 8))),
        clustering=draw(st.booleans()),
        optimizer=draw(_words("optimizer", OptimizerName)),
        steps=draw(st.integers(1, 6)),
        delay_seed=draw(st.none() | st.integers(0, 1000)),
        restart=draw(_seldom(st.sampled_from(restarts), 0)) * comparable,
        storage=draw(_words("storage", Stored)),
        users=draw(st.integers(8, 60)),
        items=draw(st.integers(3, 300)),
        median_length=draw(st.integers(1, 9)),
        extreme_ids=extreme_ids,
        data_seed=draw(st.integers(0, 9)),
        streamed=draw(_seldom(st.just(True), False, 6)) and model in NEXT_ITEM_MODELS,
        model=model,
        batch_size=draw(st.integers(1, 40)),
        max_seq_len=draw(st.integers(2, 12)),
        num_negatives=draw(st.integers(1, 3)),
        heads=draw(st.integers(1, 3)),
        head_dim=draw(st.integers(1, 5)),
        layers=draw(st.integers(1, 2)),
        dropout=draw(st.sampled_from((0.0, 0.2, 0.5))),
        relative_bias=draw(st.booleans()),
        recompute=tuple(draw(st.lists(st.sampled_from(RECOMPUTED), unique=True, max_size=len(RECOMPUTED)))),
        wrapping=draw(_seldom(st.just("checkpoint"), "", 6)) * (model != "dlrm"),
        fused=draw(st.booleans()),
        lr=draw(st.sampled_from((0.05, 0.001, 0.3))),
        weight_decay=draw(_seldom(st.sampled_from((0.1, 0.5)), 0.0)),
        lazy_weight_decay=draw(_seldom(st.just(True), False, 6)),
        lr_schedule=draw(_words("lr_schedule", LrSchedule)),
        lr_warmup=draw(_seldom(st.integers(1, 3), 0)),
        lr_steps=draw(st.integers(4, 12)),
        ema=draw(_seldom(st.sampled_from((0.5, 0.75)), 0.0)),
        seed=draw(st.integers(0, 1000)),
        slots=draw(st.sampled_from((64, 8, 16))),
        chunk_rows=draw(st.sampled_from((64, 8, 32))),
        merge=draw(st.booleans()) and not extreme_ids,  # which do not fit a merged table
        balance=draw(_seldom(st.just(True), False)),
        dynamic=dynamic,
        evict=draw(_seldom(_evictions(), "", 2)),
        admission=draw(_seldom(st.integers(2, 3), 1)),
        admission_window=draw(_seldom(st.integers(1, 4), 1000)),
        tiers=draw(
            _seldom(st.tuples(st.integers(1, 3), st.integers(1, 3)).map(lambda t: f"{t[0]}:{t[1]}"), "")
        ),
        cache_rows=draw(st.sampled_from((40, 8, 200))),
        accumulate=draw(_seldom(st.integers(2, 3), 1)),
        dedup=draw(_seldom(_words("dedup", Dedup), "both")),
        first_use=draw(_seldom(st.just(True), False)),
        taper=draw(_seldom(st.sampled_from((0.25, 0.5, 0.9)), 1.0)),
        skip_fetch=draw(_seldom(st.just(True), False)),
        depth=draw(_seldom(st.integers(1, 5), 0)),
        max_grad_norm=draw(_seldom(st.sampled_from((0.02, 1.0, float("inf"))), 0.0, 4)),
        max_grad_value=draw(_seldom(st.sampled_from((0.001, 0.01)), 0.0, 4)),
        skip_nonfinite=draw(_seldom(st.just(True), False, 4)),
        precision=draw(_seldom(_words("precision", Precision), "float32")),
        loss_scale=draw(st.sampled_from((2.0**16, 2.0**8, 2.0**26))),
        exchange_precision=draw(_seldom(_words("exchange_precision", Precision), "float32")),
        replay=draw(_seldom(st.sampled_from((0.1, 0.5, 1.0)), 0.0, 6)),
        exchange_sums=draw(_seldom(_words("exchange_sums", ExchangeSums), "auto")),
        exchanges=draw(_seldom(st.sampled_from(("each", "once")), "joined")),
    )
