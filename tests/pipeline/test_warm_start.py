"""Promise: a training begins with what it chooses of another one, and says what it took."""

import pytest
import torch
from test_loads import equal, everything
from trainer_parts import DIM, Ranker, batches, optimizer_of, parts, trainer

from tritonrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    HashEmbedding,
)
from tritonrec.distributed import Communicators
from tritonrec.embedding import (
    TablePolicy,
    load_table_weights,
)
from tritonrec.embedding.warm_start import Choice
from tritonrec.harness.verify.thread_ranks import run_ranks
from tritonrec.pipeline import Trainer, WindowConfig


class Larger(Ranker):
    """Other names: a body around what `Ranker` has, and a head of its own."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.ModuleDict({"mix": self.mix, "norm": self.norm})
        del self.mix, self.norm
        self.head = torch.nn.Linear(DIM, 2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder, the rows and the parameters of a training of table "item"."""
    folder, made = tmp_path_factory.mktemp("saved"), parts()
    with trainer(made, "sequential") as training:
        list(training.run(batches(3)))
        training.save(folder)
    return folder, made[1].weights()["item"], {k: v.clone() for k, v in made[0].state_dict().items()}


def test_weights_of_equal_names_are_taken_and_optimizers_begin_anew(saved):
    folder, (ids, weights), values = saved
    made = parts(optimizer="rowwise_adagrad", seed=9, policy=TablePolicy(admission=2))
    with trainer(made, "sequential") as training:
        report = training.warm_start(folder)
        found_ids, found = made[1].weights()["item"]
        assert torch.equal(found_ids, ids) and torch.equal(found, weights)
        assert not made[1].export()["item"][1][:, DIM:].any() and training.next_step == 0
        assert equal(dict(made[0].state_dict()), values)
        assert not any(made[2].state.values()) or all(
            not each.get("step", torch.zeros(1)).any() for each in made[2].state.values()
        )
        list(training.run(batches(2)))
    assert report.tables == {"item": ("item", len(ids))} and not report.initial and not report.unused
    assert f"table item: {len(ids)} rows\ndense: 4 tensors" in str(report)


def test_of_several_renamings_of_a_name_the_longest_counts():
    choice = Choice(rename={"a.": "x.", "a.b.": "y.", "a.b.c": "z"})
    assert choice.renamed(["a.c", "a.b.d", "a.b.c", "b.a.c"]) == {
        "x.c": "a.c", "y.d": "a.b.d", "z": "a.b.c", "b.a.c": "b.a.c",
    }  # fmt: skip


def test_tables_and_modules_are_chosen_and_renamed(saved):
    folder, (ids, weights), values = saved
    made = parts(Larger, names=("shop", "user"))
    with trainer(made) as training:
        before = {name: each.clone() for name, each in made[0].state_dict().items()}
        report = training.warm_start(
            folder, features=["shop"], dense=["body.mix"], rename={"item": "shop", "mix.": "body.mix."}
        )
    exported = made[1].weights()
    assert torch.equal(exported["shop"][0], ids) and torch.equal(exported["shop"][1], weights)
    assert not len(exported["user"][0])
    for name, value in made[0].state_dict().items():
        kept = values[name.removeprefix("body.")] if name.startswith("body.mix") else before[name]
        assert torch.equal(value, kept), name
    assert report.tables == {"shop": ("item", len(ids))}
    assert report.dense == {"body.mix.weight": "mix.weight", "body.mix.bias": "mix.bias"}
    assert report.initial["table user"] == "not there" and report.initial["head.bias"] == "not chosen"
    assert report.unused == ["norm.weight", "norm.bias"]
    assert "table shop: " in str(report) and "from item" in str(report) and "not used: norm" in str(report)


@pytest.mark.parametrize(
    ("options", "choice", "message"),
    [
        (dict(names=["shop"]), dict(tables=["shop"]), "the source has no table 'shop', but item"),
        (dict(names=["shop"]), dict(tables=["item"]), "there is no table 'item' here, but shop"),
        (dict(), dict(features=["x"]), "there is no feature 'x', but item"),
        (dict(dim=4), dict(tables=["item"]), r"weights \(\d+, 6\) .* there, \(n, 4\) float32 here"),
        (dict(model=Larger), dict(dense=["head"]), "the source has no 'head.weight'"),
        (dict(), dict(dense=["hed"]), "no parameter here is named 'hed'; they are mix.weight"),
        (dict(), dict(rename={"a.": "b."}), "rename= has a., which nothing here took"),
        (dict(), dict(rename={"mix.weight": "norm.weight"}), "would both be norm.weight here"),
        (dict(), dict(step=7), "step-000000000007.json is missing"),
        (dict(), dict(tables="item"), "Trainer.warm_start: tables must be several names"),
    ],
)
def test_what_is_named_has_to_be_there_and_nothing_is_taken_otherwise(saved, options, choice, message):
    with trainer(parts(**options)) as training:
        before = everything(training)
        with pytest.raises((ValueError, RuntimeError, TypeError), match=message):
            training.warm_start(saved[0], **choice)
        assert equal(everything(training), before)


def test_what_has_another_size_begins_anew_and_is_reported(saved):
    made = parts(dim=4)

    class Other(Ranker):
        def __init__(self):
            super().__init__()
            self.mix = torch.nn.Linear(DIM, 2)

    made = Other(), made[1], None
    made = (made[0], made[1], optimizer_of(made[0]))
    with trainer(made) as training:
        report = training.warm_start(saved[0])
    assert {*report.initial} == {"table item", "mix.weight", "mix.bias"}
    assert report.initial["mix.bias"] == "float32 (6,) there, float32 (2,) here"
    assert "table item begins anew: weights" in str(report)


def test_every_rank_takes_its_own_rows(saved):
    folder, (ids, weights), _ = saved

    def rank(communicators):
        made = parts()
        config = WindowConfig(micro_batches=1)
        with Trainer(*made, communicators, "sequential", config) as training:
            training.warm_start(folder)
        return made[1].weights()["item"]

    found = run_ranks(3, rank)
    own = torch.cat([part[0] for part in found])
    order = own.argsort()
    assert all(len(part[0]) for part in found) and torch.equal(own[order], ids)
    assert torch.equal(torch.cat([part[1] for part in found])[order], weights)


def torchrec_state(draw):
    """Names of TorchRec's EmbeddingBagCollection and EmbeddingCollection in a model, and other parameters."""
    return {
        "sparse.ebc.embedding_bags.user.weight": torch.randn(5, DIM, generator=draw),
        "ec.embeddings.item.weight": torch.randn(80, DIM, generator=draw),
        "mix.weight": torch.randn(DIM, DIM, generator=draw),
        "over.bias": torch.randn(3, generator=draw),
    }


def test_a_state_dict_of_torchrec_is_a_source():
    state = torchrec_state(torch.Generator().manual_seed(4))
    made = parts(names=("item", "user"))
    with trainer(made) as training:
        report = training.warm_start(state)
    weights = made[1].weights()
    for name, key in (("user", "sparse.ebc.embedding_bags.user"), ("item", "ec.embeddings.item")):
        ids, rows = weights[name]
        assert torch.equal(ids, torch.arange(len(ids))) and torch.equal(rows, state[f"{key}.weight"])
    assert torch.equal(made[0].mix.weight, state["mix.weight"])
    assert report.dense == {"mix.weight": "mix.weight"} and report.unused == ["over.bias"]


def test_modules_take_the_tables_of_a_state_dict():
    draw = torch.Generator().manual_seed(4)
    state = {
        "ebc.embedding_bags.t1.weight": torch.randn(7, 4, generator=draw),
        "item_embedding.weight": torch.randn(9, 4, generator=draw),
        "top.weight": torch.randn(2, 2, generator=draw),
    }
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(0, 4, name, [name]) for name in ("t1", "t2")], seed=3)
    report = load_table_weights(ebc, state, rename={"item_embedding.weight": "t2"})
    weights = ebc.embeddings.tables.weights()
    assert torch.equal(weights["t1"][1], state["ebc.embedding_bags.t1.weight"])
    assert torch.equal(weights["t2"][1], state["item_embedding.weight"])
    assert torch.equal(weights["t2"][0], torch.arange(9))
    assert report.tables == {"t1": ("t1", 7), "t2": ("item_embedding.weight", 9)} and report.unused == []
    both = torch.nn.ModuleList(
        [ebc, EmbeddingBagCollection([EmbeddingBagConfig(0, 4, "t3", ["t3"])], seed=3)]
    )
    for module in (ebc, both):
        with pytest.raises(ValueError, match="there is no table 't9' here"):
            load_table_weights(module, state, tables=["t9"])
        with pytest.raises(ValueError, match=r"rename= has item\.weight, which nothing here took"):
            load_table_weights(module, state, rename={"item.weight": "t2"})
    with pytest.raises(ValueError, match="Linear has no hash embeddings"):
        load_table_weights(torch.nn.Linear(1, 1), state)


def test_our_own_state_dict_is_a_source_too():
    saved = torch.nn.Sequential(HashEmbedding(DIM, seed=1, name="word"), torch.nn.Linear(2, 2))
    saved[0](torch.tensor([5, -3, 2**40]))
    other = torch.nn.ModuleDict({"a": HashEmbedding(DIM, seed=2, name="term")})
    report = load_table_weights(other, saved.state_dict(), rename={"word": "term"})
    assert torch.equal(other["a"].tables.weights()["term"][1], saved[0].tables.weights()["word"][1])
    assert report.tables["term"][0] == "word" and report.unused == []


def test_two_tables_of_one_name_are_refused():
    state = {"a.embeddings.item.weight": torch.ones(2, 6), "b.embedding_bags.item.weight": torch.ones(2, 6)}
    with trainer(parts()) as training, pytest.raises(ValueError, match="are both of a table 'item'"):
        training.warm_start(state)


def test_a_key_twice_is_refused_before_anything_is_taken():
    names, ids = ["item", "shop"], [[1, 2], [3, 3]]
    state = {f"{name}.keys": torch.tensor(of) for name, of in zip(names, ids, strict=True)}
    state |= {f"{name}.weight": torch.ones(2, 6) for name in names}
    with trainer(parts(names=names)) as training:
        before = everything(training)
        with pytest.raises(ValueError, match="key 3 is given twice in table 'shop' of the source"):
            training.warm_start(state)
        assert equal(everything(training), before)


def test_a_warm_start_in_flight_is_refused(saved):
    with trainer(parts()) as training:
        run = training.run(batches(4))
        next(run)
        with pytest.raises(RuntimeError, match="in flight"):
            training.warm_start(saved[0])
        list(run)


def test_the_average_begins_with_the_same_values(saved):
    folder, _, values = saved
    model, tables, optimizer = parts()
    average = torch.optim.swa_utils.AveragedModel(model)
    torch.nn.init.zeros_(average.module.mix.weight)
    with Trainer(model, tables, optimizer, Communicators.local(), "sequential", average=average) as training:
        training.warm_start(folder)
    assert torch.equal(average.module.mix.weight, values["mix.weight"])


def test_weights_without_ids_are_refused_with_the_way_to_load_them():
    """They have the names of ours, and would be left out in silence with strict=False."""
    ec = EmbeddingCollection([EmbeddingConfig(0, 4, "item", ["item"])], seed=3)
    before = ec.state_dict()
    state = {"embeddings.item.weight": torch.ones(5, 4)}
    for strict in (True, False):
        with pytest.raises(RuntimeError, match="load_table_weights"):
            ec.load_state_dict(state, strict=strict)
        assert equal(dict(ec.state_dict()), dict(before))
    load_table_weights(ec, state)
    assert torch.equal(ec.embeddings.tables.weights()["item"][1], torch.ones(5, 4))
