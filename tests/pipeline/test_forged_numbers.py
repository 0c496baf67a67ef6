"""Promise: a checkpoint with fitting checksums and numbers that no training keeps is refused by name, and
nothing has changed then. NaN in rows and weights is what a run that diverged has, and is loaded.
"""

import json
import math
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_loads import everything
from test_state_loads import KEPT, equal
from trainer_parts import DIM, Ranker, batches, parts

from tritonrec import HashEmbeddingCollection, HashOptimizer
from tritonrec.checkpoint.files import sha256_of
from tritonrec.checkpoint.manifest import add_checksum
from tritonrec.distributed import Communicators
from tritonrec.embedding import FeatureConfig, HashTableCollection, RowOptimizer
from tritonrec.pipeline import DenseModel, Trainer, WindowConfig

NAN = math.nan
RULES = ("adam", "adagrad", "rowwise_adagrad", "rowwise_adam", "rowwise_lamb", "ftrl")


def with_scheduler(**options):
    *made, optimizer = parts(policy=KEPT, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return Trainer(
        *made, optimizer, Communicators.local(), "sequential", WindowConfig(seed=4), scheduler=scheduler
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    with with_scheduler() as training:
        list(training.run(batches(5)))
        training.save(folder)
    return folder


def forged(saved, folder, change_meta=lambda meta: None, change=lambda name, tensors: None):
    """A copy with other metadata, and files that have other tensors, all with checksums that fit."""
    shutil.copytree(saved, folder)
    (path,) = folder.glob("step-*.json")
    body = json.loads(path.read_text())
    del body["manifest_sha256"]
    change_meta(body["meta"])
    entries = [("dense", body["dense"])]
    for name, table in body["tables"].items():
        entries += [(name, part) for part in table["layers"][0]["parts"] if part["file"]]
    for name, entry in entries:
        with safe_open(folder / entry["file"], "pt") as file:
            header = file.metadata()
        tensors = load_file(folder / entry["file"])
        change(name, tensors)
        (folder / entry["file"]).unlink()
        made = folder / "made.safetensors"
        save_file(tensors, made, header)
        digest = sha256_of(made)
        entry |= {"sha256": digest, "bytes": made.stat().st_size}
        entry["file"] = f"{entry['file'].rsplit('.', 2)[0]}.{digest[:16]}.safetensors"
        made.rename(folder / entry["file"])
    path.write_text(json.dumps(add_checksum(body)))
    return folder


def put(place, value):
    """Give the last number of a tensor another value: `place` is of a table and column, or ends a name."""

    def change(name, tensors):
        found = [
            tensors[key] for key in tensors if (name, key) == place or (name == "dense" and key == place)
        ]
        for each in found:
            each.view(-1)[-1] = value
            done.append(each)

    done = []
    change.done = done
    return change


FILES = {
    "a negative second moment of rows": (put(("item", "rows"), -1.0), "-1.0 as a sum of squares"),
    "a score of no step": (put(("item", "score"), -2), "-2 in column 'score'"),
    "a negative count": (put(("item.candidates", "counts"), -3), "-3 in column 'counts'"),
    "a lookup of no step": (put(("item.candidates", "last"), -1), "-1 in column 'last'"),
    "a negative second moment": (
        put("dense/optimizers/0/state/mix.weight/exp_avg_sq", -2.0), "exp_avg_sq of mix.weight has -2"
    ),
    "a negative step": (put("dense/optimizers/0/state/mix.weight/step", -5), "step of mix.weight is"),
    "a step that is no number": (put("dense/optimizers/0/state/mix.weight/step", NAN), "step of mix"),
    "half a step": (put("dense/optimizers/0/state/mix.weight/step", 1.5), "step of mix.weight is"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
def test_a_file_with_a_number_that_no_training_keeps_is_refused(saved, tmp_path, kind):
    change, message = FILES[kind]
    folder = forged(saved, tmp_path / "forged", change=change)
    assert change.done
    refuse(folder, message)


def refuse(folder, message):
    with with_scheduler() as training:
        list(training.run(batches(2)))
        before = everything(training)
        with pytest.raises(ValueError, match=message):
            training.load(folder)
        assert equal(everything(training), before)


def test_rows_and_weights_of_a_run_that_diverged_are_loaded(saved, tmp_path):
    def change(name, tensors):
        if name == "item":
            tensors["rows"][1] = NAN
        if name == "dense":
            for each in ("dense/model/mix.weight", "dense/optimizers/0/state/mix.weight/exp_avg_sq"):
                tensors[each][:] = NAN

    with with_scheduler() as training:
        assert training.load(forged(saved, tmp_path / "forged", change=change)) == 5


def of(pairs, *names):
    """The list [key, value] of a state that was taken apart, at these keys."""
    for name in names:
        inner = (
            pairs[1] if isinstance(pairs, list) and len(pairs) == 2 and isinstance(pairs[0], str) else pairs
        )
        pairs = inner[name] if isinstance(name, int) else next(p for p in inner["dict"] if p[0] == name)
    return pairs


def setting(value, *names):
    def change(meta):
        of(meta["dense"], *names)[1] = value

    return change


GROUP = "optimizers", 0, "param_groups", 0
META = {
    "a negative rate": (setting(-0.5, *GROUP, "lr"), "lr of group 0 is '-0.5'"),
    "a negative eps": (setting(-1e-8, *GROUP, "eps"), "eps of group 0"),
    "a flag that is a text": (setting("no", *GROUP, "foreach"), "foreach of group 0"),
    "a flag that is a number": (setting(7, *GROUP, "amsgrad"), "amsgrad of group 0"),
    "an epoch before all": (setting(-5, "schedulers", 0, "last_epoch"), "last_epoch of scheduler 0 is '-5'"),
    "half an epoch": (setting(2.5, "schedulers", 0, "last_epoch"), "last_epoch of scheduler 0"),
    "an epoch that is no number": (setting({"float": "nan"}, "schedulers", 0, "last_epoch"), "last_epoch"),
    "a negative base": (setting([-0.1], "schedulers", 0, "base_lrs"), "base_lrs of scheduler 0 has"),
    "a size that is no number": (setting("x", "schedulers", 0, "step_size"), "step_size of scheduler 0"),
}  # fmt: skip


def test_a_setting_without_bound_comes_back():
    """Of an optimizer of one's own; torch's have none."""

    def dense():
        model = Ranker()
        return DenseModel(
            model, torch.optim.SGD([{"params": [*model.parameters()], "limit": math.inf}], lr=0.1)
        )

    dense().load_state_dict(dense().state_dict())


@pytest.mark.parametrize("kind", META)
def test_settings_of_optimizers_and_schedulers_that_torch_would_refuse_are_refused(saved, tmp_path, kind):
    change, message = META[kind]
    refuse(forged(saved, tmp_path / "forged", change), message)


@pytest.mark.parametrize(
    ("key", "value"), [("dim", DIM - 1), ("seed", 7), ("scale", 0.5), ("table_id", 3), ("seed", NAN)]
)
def test_a_description_that_contradicts_the_tables_is_refused(saved, tmp_path, key, value):
    def change(meta):
        meta["embedding"]["tables"]["item"][key] = value

    refuse(forged(saved, tmp_path / "forged", change), f"{key}")


def test_what_was_changed_by_name_may_differ_in_the_description_too(saved, tmp_path):
    with with_scheduler(seed=9) as training:
        assert training.load(saved, changed={"seed"}) == 5


@pytest.mark.parametrize("name", RULES)
def test_every_rule_knows_its_squares(name):
    rule = RowOptimizer(name, lr=0.1)
    width = rule.row_width(DIM)
    rows = torch.ones(2, width, dtype=torch.float32)
    rows[:, DIM:] = 0.5
    refused = []
    for column in range(width):
        rows[1, column] = -0.25
        tables = HashTableCollection([FeatureConfig("item", DIM)], rule, seed=1)
        state = {"item": {"keys": torch.tensor([3, 4], dtype=torch.int64), "rows": rows.clone()}}
        try:
            tables.load_state(state)
            assert len(tables.state()["item"]["keys"]) == 2
        except ValueError as error:
            assert "-0.25 as a sum of squares" in str(error)
            assert not len(tables.state()["item"]["keys"])
            refused.append(column)
        rows[1, column] = 0.5
    squares = 1 if name.startswith("rowwise") else DIM
    assert refused == [*range(width - squares, width)]


@pytest.mark.parametrize("number", [-1.0, 0.5, NAN, math.inf, 2.0**25])
def test_a_row_s_last_update_is_a_number_of_one(number):
    rule = RowOptimizer("momentum_sgd", lr=0.1, weight_decay=0.1, lazy_weight_decay=True)
    rows = torch.zeros(2, rule.row_width(DIM), dtype=torch.float32)
    rows[1, DIM] = -3.0  # a momentum
    keys = torch.tensor([3, 4], dtype=torch.int64)
    tables = HashTableCollection([FeatureConfig("item", DIM)], rule, seed=1)
    tables.load_state({"item": {"keys": keys, "rows": rows}})
    rows[1, -1] = number
    with pytest.raises(ValueError, match="has a row last updated in update"):
        tables.load_state({"item": {"keys": keys, "rows": rows}})


def test_a_hash_optimizer_refuses_squares_below_0():
    rows = HashEmbeddingCollection([FeatureConfig("item", DIM)], RowOptimizer("adagrad", lr=0.1), seed=1)
    optimizer = HashOptimizer(rows)
    rows.tables.load(
        "item", torch.tensor([3], dtype=torch.int64), torch.ones(1, 2 * DIM, dtype=torch.float32)
    )
    state = optimizer.state_dict()
    (kept,) = state["state"].values()
    kept["state"][0, 1] = -1.0
    with pytest.raises(ValueError, match="as a sum of squares"):
        optimizer.load_state_dict(state)


def test_an_average_of_fewer_than_no_models_is_refused():
    def dense():
        model = Ranker()
        average = torch.optim.swa_utils.AveragedModel(model)
        return DenseModel(model, torch.optim.SGD(model.parameters(), lr=0.1), average=average)

    state = dense().state_dict()
    for wrong in (torch.tensor(-1, dtype=torch.int64), torch.tensor(NAN, dtype=torch.float32)):
        state["average"]["n_averaged"] = wrong
        with pytest.raises(ValueError, match="average"):
            dense().load_state_dict(state)


def test_a_state_of_none_in_place_of_a_tensor_is_refused():
    model = Ranker()
    optimizer = torch.optim.Adam(model.parameters())
    dense = DenseModel(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = dense.state_dict()
    kept = next(iter(state["optimizers"][0]["state"].values()))
    kept["exp_avg"] = None
    with pytest.raises(ValueError, match=r"exp_avg of .* is NoneType"):
        dense.load_state_dict(state)
