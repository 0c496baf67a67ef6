"""A small run that Slipstream follows, and what its blocks must compute, written out loop by loop."""

import math
from itertools import pairwise

import torch

from tritonrec.data import ClickLoader
from tritonrec.data.synthetic_clicks import SyntheticClickOptions, generate
from tritonrec.distributed import Communicators
from tritonrec.harness.job import Job
from tritonrec.nn import HSTUConfig
from tritonrec.pipeline import Trainer, WindowConfig
from tritonrec.slipstream import Slipstream, SlipstreamConfig

DATA = "criteo:samples=500,scale=0.0001,exponent=2.2,seed=4"
LOG = generate("criteo", SyntheticClickOptions(500, 0.0001, 2.2, seed=4))
CONFIG = SlipstreamConfig(warmup=4, snapshots=3, every=2, hot_share=0.01, drop=0.5, alpha=23)
"""Classified before step 10."""


def job(**changes):
    small = dict(model="dlrm", batch_size=24, sizes=HSTUConfig(dim=6), bottom=(8,), top=(8,), lr=0.05)
    return Job(DATA, **(small | changes))


def loader(rank=0, world_size=1):
    return ClickLoader(LOG, 24, 0, rank, world_size)


def follow(config=CONFIG, mode="nestpipe", window=None, optimizer="rowwise_adagrad", **changes):
    """Slipstream after its steps, and the weights after each of them by feature and id."""
    the_job = job(**changes)
    model, tables, dense = the_job.build(optimizer)
    watch = Slipstream(config, loader(), tables, Communicators.local())
    weights = []
    with Trainer(model, tables, dense, Communicators.local(), mode, window or WindowConfig(2)) as trainer:
        watch.attach(trainer)
        for step in range(config.classify_at):
            trainer.step(loader().batch(step))
            weights.append(
                {
                    (name, int(id_)): row[:6].clone()
                    for name, (ids, rows) in tables.export().items()
                    for id_, row in zip(ids, rows, strict=True)
                }
            )
    return watch, weights


def hot_of(config=CONFIG):
    """(feature, id) of the rows that enough of the warm-up's accesses go to, in their order."""
    batches = [loader().batch(step) for step in range(config.warmup)]
    hot = []
    for name in sorted(LOG.features):
        column = torch.cat([batch.features[name].ids for batch in batches]).tolist()
        hot += [(name, i) for i in sorted(set(column)) if column.count(i) >= config.hot_share * len(column)]
    return hot


def expected_changes(weights, config=CONFIG):
    """Distances between the last two snapshots, infinite for rows that one of the intervals has not met."""
    times = [config.warmup + n * config.every for n in range(config.snapshots + 1)]
    met = [
        {
            (name, int(i))
            for step in range(first, last)
            for name, lookup in loader().batch(step).lookups().items()
            for i in lookup.ids
        }
        for first, last in pairwise(times)
    ]
    before, last = weights[times[-2] - 1], weights[times[-1] - 1]
    earlier = set().union(*met[:-1])
    return [
        float((last[row].double() - before[row].double()).norm()) if row in met[-1] & earlier else math.inf
        for row in hot_of(config)
    ]
