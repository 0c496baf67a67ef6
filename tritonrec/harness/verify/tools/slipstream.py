"""Slipstream at threshold 0, which judges rows and must drop no input."""

from __future__ import annotations

from collections.abc import Iterator

from ....data import Batch, ClickLoader
from ....slipstream import RemainingLoader, Slipstream, SlipstreamConfig
from ..variants import CRITEO, SMALL, Run, Variant, add_variants


def classified(run: Run) -> Iterator[list[Batch]]:
    """The batches up to the classification, and those that it leaves."""
    config, loader = run.job.slipstream, run.job.epochs()
    assert isinstance(config, SlipstreamConfig) and isinstance(loader, ClickLoader)
    watch = Slipstream(config, loader, run.trainer.program.tables, run.trainer.communicators)
    watch.attach(run.trainer)
    return _classified(watch, run)


def _classified(watch: Slipstream, run: Run) -> Iterator[list[Batch]]:
    loader, steps, border = run.loader, run.steps, watch.config.classify_at
    assert isinstance(loader, ClickLoader)
    yield [loader.batch(step) for step in range(steps[0], border)]
    found = watch.classify(watch.judge(), loader)
    left = RemainingLoader(loader, found.kept, border, steps[-1] + 1)
    yield [left.batch(step) for step in range(border, border + left.num_steps)]
    run.counts.update(watch.counts)


add_variants(
    {
        "slipstream-0": Variant(
            "Slipstream with threshold 0: rows are judged, and no input is dropped",
            {"model": "dlrm", **SMALL, "data": CRITEO},
            {"slipstream": SlipstreamConfig(1, 2, 2, hot_share=0.0, threshold=0.0)},
            shows=("judged", "hot_inputs"),
            tool=classified,
        ),
    },
    before="balanced",
)
