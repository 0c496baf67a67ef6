"""Promise: served predictions are those of synchronous inference in every bit, whatever the bound."""

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from speeds import examples
from thread_ranks import Clock, ThreadRanks

from tritonrec.data import ClickBatch, KeyedJaggedTensor
from tritonrec.nn import DLRM, DLRMConfig, partition_tables
from tritonrec.serving import TableWiseDLRM, infer, own_samples
from tritonrec.serving.bounded_lag import BoundedLagAllToAll

pytestmark = pytest.mark.smoke

WORLD = 3
FEATURES = ("ad", "device", "page", "site")
SIZES = {"ad": 50, "device": 4, "page": 9, "site": 30}
ranks = ThreadRanks(WORLD)


def build(dense=5):
    torch.manual_seed(3)
    model = DLRM(DLRMConfig(FEATURES, dense, 8, (16,), (24, 12)))
    tables = {name: torch.randn(size, 8) for name, size in SIZES.items()}
    return model, tables


def make_batches(dense=5, sizes=(8, 5, 0, 2, 9, 3, 7)):
    """Seven batches; the third is empty, the fourth has fewer samples than there are ranks."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for step, samples in enumerate(sizes):
        ids = [torch.randint(0, SIZES[name], (samples,), generator=generator) for name in FEATURES]
        batches.append(
            ClickBatch(
                step,
                torch.arange(samples),
                KeyedJaggedTensor.from_matrix(FEATURES, torch.stack(ids, 1)),
                torch.randn(samples, dense, generator=generator),
                torch.zeros(samples, dtype=torch.int64),
            )
        )
    return batches


def alone(model, tables, batch):
    """One process that holds everything."""
    rows = {name: tables[name][lookup.ids] for name, lookup in batch.lookups().items()}
    return model.predict(batch, rows)


def serve(group, model, tables, bound, owners, delays=(0, 0, 0), transport="auto", sizes=None):
    rank = group.rank()
    dense = model.config.dense
    own = {name: table.__getitem__ for name, table in tables.items() if owners[name] == rank}
    served = TableWiseDLRM(model, owners, own, rank, WORLD)
    clock = Clock()
    exchange = BoundedLagAllToAll(group, bound, served.capacity(9), recorder=clock, transport=transport)
    batches = make_batches(dense, sizes) if sizes is not None else make_batches(dense)

    def slowly():
        for batch in batches:
            time.sleep(delays[rank] * (batch.step % 2))
            yield batch

    return list(infer(served, slowly(), exchange)), len(clock.starts), exchange.in_flight


@torch.no_grad()
def synchronous(group, model, tables, owners):
    """The usual order, with gloo's collective and splits computed by hand."""
    rank = group.rank()
    own = {name: table.__getitem__ for name, table in tables.items() if owners[name] == rank}
    served = TableWiseDLRM(model, owners, own, rank, WORLD)
    predictions = []
    for batch in make_batches():
        rows, send = served.lookup(batch)
        block = own_samples(batch.num_samples, rank, WORLD)
        receive = [(block.stop - block.start) * len(served.features[source]) for source in range(WORLD)]
        received = torch.empty(sum(receive), 8)
        group.alltoall_base(received, rows, receive, send, dist.AllToAllOptions()).wait()
        predictions.append(served.top(batch, served.bottom(batch), received, receive))
    return predictions


def test_every_bound_gives_the_bits_of_synchronous_inference():
    owners = partition_tables(SIZES, WORLD)
    model, tables = build()
    expected = [alone(model, tables, batch) for batch in make_batches()]
    usual = ranks.run(synchronous, model, tables, owners)
    for bound, transport in [(0, "shared"), (1, "shared"), (2, "shared"), (10, "shared"), (2, "messages")]:
        for rank, (predictions, starts, left) in enumerate(
            ranks.run(serve, model, tables, bound, owners, (0, 0.004, 0.002), transport)
        ):
            assert starts == len(expected) and left == 0
            for got, whole, same in zip(predictions, expected, usual[rank], strict=True):
                assert torch.equal(got, whole[own_samples(len(whole), rank, WORLD)])
                assert torch.equal(got, same)
    assert len({round(float(p), 4) for p in torch.cat(expected)}) > 20  # not one constant


@settings(max_examples=examples(10))
@given(
    bound=st.integers(0, 5),
    sizes=st.lists(st.integers(0, 9), max_size=9),
    delays=st.lists(st.sampled_from([0, 0, 0.001, 0.003]), min_size=WORLD, max_size=WORLD),
    transport=st.sampled_from(["shared", "messages"]),
)
def test_any_sizes_and_delays_give_the_bits_of_one_process(bound, sizes, delays, transport):
    owners = partition_tables(SIZES, WORLD)
    model, tables = build()
    expected = [alone(model, tables, batch) for batch in make_batches(sizes=sizes)]
    found = ranks.run(serve, model, tables, bound, owners, delays, transport, sizes)
    for rank, (predictions, _, left) in enumerate(found):
        assert left == 0 and len(predictions) == len(expected)
        for got, whole in zip(predictions, expected, strict=True):
            assert torch.equal(got, whole[own_samples(len(whole), rank, WORLD)])


def test_a_rank_without_tables_and_a_model_without_dense_features():
    owners = {"ad": 2, "device": 2, "page": 0, "site": 2}
    model, tables = build(dense=0)
    expected = [alone(model, tables, batch) for batch in make_batches(dense=0)]
    for rank, (predictions, _, _) in enumerate(ranks.run(serve, model, tables, 2, owners)):
        for got, whole in zip(predictions, expected, strict=True):
            assert torch.equal(got, whole[own_samples(len(whole), rank, WORLD)])


def test_predictions_are_held_back_by_no_more_than_the_bound():
    model, tables = build()
    served = TableWiseDLRM(
        model, dict.fromkeys(FEATURES, 0), {name: table.__getitem__ for name, table in tables.items()}, 0, 1
    )
    for bound in (0, 2):
        taken = []

        def batches(taken=taken):
            for batch in make_batches():
                taken.append(batch.step)
                yield batch

        ahead = [
            len(taken) - 1 - at
            for at, _ in enumerate(infer(served, batches(), BoundedLagAllToAll(None, bound)))
        ]
        assert ahead == [bound] * (7 - bound) + list(range(bound))[::-1]


def test_blocks_cover_a_batch_and_fit_the_capacity():
    model, tables = build()
    own = {name: table.__getitem__ for name, table in tables.items()}
    served = TableWiseDLRM(model, {"ad": 0, "device": 1, "page": 1, "site": 2}, own, 0, WORLD)
    assert [served.capacity(samples) for samples in (0, 1, 6, 7)] == [0, 64, 128, 192]
    for samples in range(8):
        blocks = [own_samples(samples, rank, WORLD) for rank in range(WORLD)]
        assert [at for block in blocks for at in range(samples)[block]] == list(range(samples))
        assert blocks[0].stop - blocks[2].stop + blocks[2].start in (0, 1)


def test_owners_and_tables_are_checked():
    model, tables = build()
    with pytest.raises(ValueError, match=r"feature 'site' needs an owner in .0, 2., got None"):
        TableWiseDLRM(model, {"ad": 0, "device": 0, "page": 1}, {}, 0, 2)
    with pytest.raises(ValueError, match=r"feature 'ad' needs an owner in .0, 2., got 2"):
        TableWiseDLRM(model, dict.fromkeys(FEATURES, 2), {}, 0, 2)
    with pytest.raises(ValueError, match="rank 0 owns the feature 'device' but was given no table"):
        TableWiseDLRM(model, dict.fromkeys(FEATURES, 0), {"ad": tables["ad"].__getitem__}, 0, 2)


def test_a_batch_with_several_ids_of_a_sample_is_refused():
    model, tables = build()
    own = {name: table.__getitem__ for name, table in tables.items()}
    served, batch = TableWiseDLRM(model, dict.fromkeys(FEATURES, 0), own, 0, 1), make_batches()[3]
    offsets = batch.features.offsets.clone()
    offsets[1] = 0  # the first sample has no id, the second one two: as many as there are samples
    ragged = replace(batch, features=replace(batch.features, offsets=offsets))
    with pytest.raises(ValueError, match="a served batch needs one id of each feature for each sample"):
        served.lookup(ragged)
