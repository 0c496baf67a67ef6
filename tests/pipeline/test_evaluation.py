"""Promise: ranks that evaluate together find what one process finds with all rows, and copy no table."""

import re
from dataclasses import replace
from functools import partial
from tempfile import gettempdir
from types import SimpleNamespace

import pytest
import torch

from tritonrec.data import evaluate
from tritonrec.embedding import Eviction, Placement, PrecisionTiers, TablePolicy
from tritonrec.harness.job import Job
from tritonrec.harness.train import gather
from tritonrec.harness.train.evaluate import evaluate_model
from tritonrec.harness.train.gather import whole_tables
from tritonrec.harness.verify.thread_ranks import run_ranks
from tritonrec.nn import HSTUConfig
from tritonrec.pipeline import RowsOfRanks, Trainer, WindowConfig, evaluation, next_item_scores

SIZES = HSTUConfig(dim=8, layers=1, heads=2, qk_dim=4, v_dim=4, max_seq_len=9)
NEXT = Job("zipf:users=70,items=120,seed=4", batch_size=16, max_seq_len=9, num_negatives=3, sizes=SIZES)
JOBS = {
    "hstu": NEXT,
    "dlrm": Job("criteo:samples=700", "dlrm", batch_size=32, sizes=replace(SIZES, dim=4)),
    "grm": Job("csv:{}", "grm", batch_size=8, max_seq_len=9, max_exposed=3, sizes=SIZES),
}
SAID = r"the score of user (\d+) for item (\d+) is NaN"
POLICIES = {
    "all": TablePolicy(Eviction("lru", capacity=60, every=2), admission=2, precision=PrecisionTiers(2, 3)),
    "none": TablePolicy(),
}


def ratings():
    yield "user,item,rating,timestamp"
    draw = torch.Generator().manual_seed(3)
    for number in range(900):
        user, item, rating = (torch.rand(3, generator=draw) ** 2 * torch.tensor([40, 90, 5])).long().tolist()
        yield f"{user},{item},{rating + 1},{number}"


def placement(storage):
    of = {"disk": {"path": gettempdir(), "memory": "2KiB"}, "cached": {"cache_rows": 9}}
    return Placement(storage, **of.get(storage, {}))


def of_batches(loader, size):
    """The loader with batches of `size` for an evaluation, so that there are several."""
    cut = loader.evaluation_batches
    loader.evaluation_batches = lambda batch_size=0, part="test": cut(size, part)
    return loader


def trained(communicators, job, judge, steps=3):
    """What `judge` says of a trainer after some steps."""
    model, tables, optimizer = job.build("adam")
    loader = job.loader(communicators.rank, communicators.world_size)
    window = WindowConfig(2, seed=4)
    with Trainer(model, tables, optimizer, communicators, "nestpipe", window, trust_model=True) as trainer:
        list(trainer.run(loader.batch(step) for step in range(steps)))
        return judge(trainer)


@pytest.mark.parametrize(
    ("model", "world", "replicas", "storage", "policy", "size"),
    [
        ("hstu", 1, 1, "host", "none", 256),
        ("hstu", 2, 1, "cached", "all", 64),
        ("hstu", 3, 1, "host", "all", 16),
        ("hstu", 4, 2, "device", "none", 7),
        ("hstu", 4, 1, "disk", "all", 256),
        ("dlrm", 3, 1, "host", "all", 11),
        ("dlrm", 2, 1, "device", "none", 64),
        ("grm", 3, 1, "host", "none", 5),
        ("grm", 4, 2, "disk", "all", 32),
    ],
)
def test_ranks_find_together_what_one_process_finds_with_all_rows(
    monkeypatch, tmp_path, model, world, replicas, storage, policy, size
):
    (tmp_path / "log.csv").write_text("\n".join(ratings()))
    data = JOBS[model].data.format(tmp_path / "log.csv")
    job = replace(JOBS[model], data=data, placement=placement(storage), policy=POLICIES[policy])
    monkeypatch.setattr(evaluation, "BLOCK_ITEMS", 13)
    monkeypatch.setattr(gather, "PART_BYTES", 999)

    def judge(trainer):
        dense, whole = trainer.dense.evaluated, whole_tables(trainer.rows_of_ranks())
        before = trainer.tables.state()
        found = evaluate_model(dense, trainer.rows_of_ranks(), of_batches(job.epochs(), size))
        after = trainer.tables.state()
        for name, columns in before.items():
            for column, values in columns.items():
                assert torch.equal(values, after[name][column]), (name, column)
        assert found == evaluate_model(dense, RowsOfRanks(whole), job.epochs())
        if model == "hstu":
            loader = job.epochs()
            scores = next_item_scores(dense.eval(), whole, loader.catalogue)
            ks = tuple(int(key.split("@")[1]) for key in found if key.startswith("HR"))
            assert found == evaluate(scores, loader, ks)
            for seen in (True, False):
                together = trainer.evaluate(of_batches(job.epochs(), size), ks=(1, 5, 90), exclude_seen=seen)
                assert together == evaluate(scores, loader, (1, 5, 90), exclude_seen=seen)
        return found

    first, *others = run_ranks(world, lambda each: trained(each, job, judge), replicas)
    assert all(other == first for other in others) and any(0 < value < 1 for value in first.values())


def test_equal_scores_go_by_the_catalogue_over_ranks():
    def judge(trainer):
        loader = NEXT.epochs()
        ids = loader.catalogue[trainer.tables.groups[0].table.keys().unsqueeze(1).eq(loader.catalogue).any(0)]
        trainer.tables.load("item", ids, torch.zeros(len(ids), trainer.tables.groups[0].table.row_width))
        found = trainer.evaluate(of_batches(loader, 9), ks=(1, 4, 30))
        scores = next_item_scores(
            trainer.dense.evaluated.eval(), whole_tables(trainer.rows_of_ranks()), loader.catalogue
        )
        assert found == evaluate(scores, NEXT.epochs(), (1, 4, 30))
        return len(ids)

    assert min(run_ranks(3, lambda each: trained(each, NEXT, judge))) > 9


def test_a_score_that_is_nan_is_named_on_all_ranks():
    """One rank alone has the row."""

    def judge(trainer):
        loader, table = NEXT.epochs(), trainer.tables.groups[0].table
        victim = loader.catalogue[17:18]
        if bool((table.keys() == victim).any()):
            trainer.tables.load(
                "item", victim, torch.full((1, table.row_width), torch.nan, dtype=torch.float32)
            )
        with pytest.raises(ValueError) as error:
            trainer.evaluate(of_batches(loader, 16))
        user, item = map(int, re.match(SAID, str(error.value)).groups())
        scores = next_item_scores(
            trainer.dense.evaluated.eval(), whole_tables(trainer.rows_of_ranks()), loader.catalogue
        )
        for batch in NEXT.epochs().evaluation_batches(70):
            found = scores(batch.history)[batch.history.sample_ids == user, loader.catalogue == item]
            assert bool(found.isnan().any())
        return user, item

    assert len({*run_ranks(3, lambda each: trained(each, NEXT, judge, 9))}) == 1


@pytest.mark.parametrize(
    ("what", "evaluated"),
    [
        ("items", lambda trainer, rank: trainer.evaluate(NEXT.epochs(), part="test", exclude_seen=rank < 2)),
        ("items", lambda trainer, rank: trainer.evaluate(replace(NEXT, data=f"{NEXT.data}{rank}").epochs())),
        ("samples", lambda trainer, rank: trainer.evaluate(of_batches(NEXT.epochs(), 20 + rank))),
        ("samples", lambda trainer, rank: trainer.evaluate(without_the_last(rank == 1))),
    ],
)
def test_ranks_that_evaluate_other_things_are_told_which(what, evaluated):
    def judge(communicators, trainer):
        with pytest.raises(ValueError) as error:
            evaluated(trainer, communicators.rank)
        return str(error.value)

    found = run_ranks(3, lambda each: trained(each, NEXT, partial(judge, each)))
    assert len({*found}) == 1 and re.match(
        rf"rank [12] evaluates by other {what} than rank 0: .* same log", found[0]
    )


def without_the_last(less):
    """A loader one of whose last batches is missing."""
    loader = of_batches(NEXT.epochs(), 23)
    cut = loader.evaluation_batches
    loader.evaluation_batches = lambda part="test": iter(list(cut(part=part))[: -1 if less else None])
    return loader


def test_scores_in_memory_at_a_time_are_bounded(monkeypatch):
    """Whatever the catalogue and the number of ranks."""
    made = []

    def linear(vectors, weights, bias):
        made.append((len(vectors), len(weights)))
        return kept.linear(vectors, weights, bias)

    kept = evaluation.ops
    monkeypatch.setattr(evaluation, "ops", SimpleNamespace(linear=linear, owner_of=kept.owner_of))
    monkeypatch.setattr(evaluation, "BLOCK_SCORES", 300)
    expected = run_ranks(1, lambda each: trained(each, NEXT, lambda trainer: trainer.evaluate(NEXT.epochs())))
    of_two = run_ranks(
        2, lambda each: trained(each, NEXT, lambda trainer: trainer.evaluate(of_batches(NEXT.epochs(), 32)))
    )
    assert of_two == expected * 2
    assert max(users * items for users, items in made if users != items) <= 300
    assert max(items for _, items in made) > 1
