"""Promise: an export holds the rows of its checkpoint, and its dense part the bits of the model."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
import torch
from safetensors.torch import load_file, save_file
from speeds import slow_except

from tritonrec import checkpoint, nn, ops
from tritonrec.checkpoint import CheckpointError
from tritonrec.data import ClickBatch, KeyedJaggedTensor, Lookup, NextItemLoader, load
from tritonrec.distributed import Communicators
from tritonrec.embedding import Eviction, FeatureConfig, HashTableCollection, RowOptimizer, TablePolicy
from tritonrec.pipeline import Trainer, WindowConfig
from tritonrec.serving import Predictor, export, load_weights, programs

DIM, LENGTH = 8, 6


def sasrec():
    layer = torch.nn.TransformerEncoderLayer(DIM, 2, 12, 0.1, batch_first=True, norm_first=True)

    class Encoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.positions = torch.nn.Embedding(LENGTH, DIM)
            self.encoder = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

        def forward(self, x, hidden):
            causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
            x = x + self.positions(torch.arange(LENGTH)[None])
            return self.encoder(x, mask=causal, src_key_padding_mask=hidden, is_causal=False)

    model = nn.PaddedNextItem(Encoder(), LENGTH)
    nn.convert(model)
    return model


def hstu(**options):
    return nn.HSTU(
        nn.HSTUConfig(dim=DIM, layers=1, heads=2, qk_dim=4, v_dim=4, max_seq_len=LENGTH, **options)
    )


MODELS = {
    "hstu": hstu,
    "biased": lambda: hstu(relative_bias=True),
    "fuxi": lambda: nn.FuXi(nn.FuXiConfig(dim=DIM, layers=1, heads=2, qk_dim=4, v_dim=4, max_seq_len=LENGTH)),
    "sasrec": sasrec,
}
FEATURES = ("ad", "site", "user")


class Trained:
    """A trained model, its tables, and its checkpoints in a folder."""

    def __init__(self, folder, model, features, batches, rule="adam", **recipe):
        self.model, self.folder = model, folder
        self.tables = HashTableCollection(features, RowOptimizer(rule, lr=0.05))
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        with Trainer(
            model, self.tables, self.optimizer, Communicators.local(), "nestpipe", WindowConfig(2), **recipe
        ) as trainer:
            for saved in batches:
                list(trainer.run(saved))
                trainer.save(folder)
            self.evaluated = trainer.dense.evaluated
        model.eval()


def loader():
    return NextItemLoader(load("zipf:users=24,items=40,seed=3"), 8, LENGTH, 2, 0)


def next_item(folder, name="hstu", **recipe):
    torch.manual_seed(1)
    log = loader()
    batches = [[log.batch(step) for step in steps] for steps in (range(2), range(2, 3))]
    return Trained(folder, MODELS[name](), [FeatureConfig("item", DIM)], batches, **recipe)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return next_item(tmp_path_factory.mktemp("checkpoints"))


def scores_of(trained, history, items):
    """As `tritonrec train` evaluates."""
    rows = trained.tables.peek({"item": Lookup(history.ids)})["item"]
    with torch.no_grad():
        hidden = trained.evaluated.eval().encode(history, rows)
    weights = trained.tables.peek({"item": Lookup(items)})["item"]
    return ops.linear(hidden[history.offsets[1:] - 1], weights, None)


@pytest.mark.parametrize("name", slow_except(["biased"], MODELS))
def test_a_predictor_gives_the_scores_of_the_trainer_at_lengths_and_batches_unseen_at_the_export(
    tmp_path, name
):
    trained = next_item(tmp_path / "c", name)
    export(tmp_path / "c", tmp_path / "out", trained.model)
    predictor = Predictor.load(tmp_path / "out")
    assert (predictor._encoder is predictor.program) == (name in ("fuxi", "sasrec"))  # the others in one call
    items = torch.tensor([3, 10**15, -7, 12, 3])  # two without a row
    for size in (1, 4, 7, 24):
        for batch in loader().evaluation_batches(size):
            want = scores_of(trained, batch.history, items)
            assert torch.equal(predictor.scores(batch.history, items), want) and want.abs().max() > 0


def test_the_average_is_exported_where_the_training_kept_one(tmp_path):
    torch.manual_seed(1)
    model, log = MODELS["hstu"](), loader()
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    batches = [[log.batch(step) for step in range(2)]]
    trained = Trained(tmp_path / "c", model, [FeatureConfig("item", DIM)], batches, average=average)
    fresh = MODELS["hstu"]()
    load_weights(checkpoint.CheckpointStream(tmp_path / "c"), fresh)
    for name, value in trained.evaluated.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value)
    assert not torch.equal(fresh.norm.weight, model.norm.weight)


def clicks(sizes=(5, 4)):
    draw = torch.Generator().manual_seed(2)
    for step, size in enumerate(sizes):
        ids = torch.randint(0, 30, (size, 3), generator=draw)
        dense = torch.randn(size, 2, generator=draw)
        labels = torch.randint(0, 2, (size,), generator=draw)
        kjt = KeyedJaggedTensor.from_matrix(FEATURES, ids)
        yield ClickBatch(step, torch.arange(size), kjt, dense, labels)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_a_predictor_gives_the_clicks_of_the_trainer(tmp_path, compiled):
    torch.manual_seed(1)
    model = nn.DLRM(nn.DLRMConfig(FEATURES, 2, DIM, (6,), (7,)))
    trained = Trained(tmp_path / "c", model, [FeatureConfig(name, DIM) for name in FEATURES], [clicks()])
    export(tmp_path / "c", tmp_path / "out", model, compiled=compiled)
    predictor = Predictor.load(tmp_path / "out", compiled=compiled)
    for batch in clicks((1, 2, 17, 64, 33)):
        want = model.predict(batch, trained.tables.peek(batch.lookups()))
        assert torch.equal(predictor.predict(batch), want)
        ids = {name: lookup.ids for name, lookup in batch.lookups().items()}
        assert torch.equal(predictor.predict(batch.dense, ids), want)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_what_aotinductor_compiled_gives_the_scores_of_the_trainer(tmp_path, name):
    trained = next_item(tmp_path / "c", name)
    export(tmp_path / "c", tmp_path / "out", trained.model, compiled=True)
    predictor = Predictor.load(tmp_path / "out", compiled=True)
    for size in (1, 7, 24):
        for batch in loader().evaluation_batches(size):
            want = scores_of(trained, batch.history, loader().catalogue)
            assert torch.equal(predictor.scores(batch.history, loader().catalogue), want)


class Pair(torch.nn.Module):
    """A scorer of a user's own: the product of two rows behind a layer of the model."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, left, right):
        return (self.model.norm(left) * right).sum(1)


@pytest.mark.if_changed
def test_a_scorer_of_ones_own_is_exported_with_the_values_of_the_checkpoint(trained, tmp_path):
    fresh = MODELS["hstu"]()
    examples = [(torch.randn(size, DIM), torch.randn(size, DIM)) for size in (3, 1, 20)]
    export(trained.folder, tmp_path / "out", fresh, scorer=Pair(fresh), examples=examples)
    program = Predictor.load(tmp_path / "out").program
    for arguments in [*examples, (torch.randn(9, DIM), torch.randn(9, DIM))]:
        with torch.no_grad():
            assert torch.equal(program(*arguments), Pair(trained.model)(*arguments))


@pytest.mark.parametrize("kind", [tuple, list, dict])
def test_a_scorer_that_returns_no_tensor_is_one_error(trained, tmp_path, kind):
    class Pairs(Pair):
        def forward(self, left, right):
            return kind([("left", left), ("right", super().forward(left, right))])  # a tuple of tuples

    fresh = MODELS["hstu"]()
    examples = [(torch.randn(size, DIM), torch.randn(size, DIM)) for size in (3, 1)]
    with pytest.raises(TypeError, match=f"Pairs returns {kind.__name__}, and an exported scorer returns a"):
        export(trained.folder, tmp_path / "out", fresh, scorer=Pairs(fresh), examples=examples)
    assert not list(tmp_path.iterdir())


class Towers(torch.nn.Module):
    """A user's tower of a bag and dense features, and an item's: two outputs, each of a size of its own."""

    def __init__(self, model):
        super().__init__()
        self.model, self.user, self.item = model, nn.Linear(DIM + 2, DIM), nn.Linear(DIM, DIM)

    def forward(self, bags, dense, items):
        users = self.user(torch.cat([bags, dense], 1))
        return self.model.norm(users), torch.relu(self.item(items)).double()


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_two_towers_are_one_export(trained, tmp_path, precision):
    """Bags are pooled as in training; users and items are computed together, or each by itself."""
    fresh = MODELS["hstu"]()
    scorer, examples = Towers(fresh), []
    for users, items in ((3, 2), (1, 1), (0, 20), (20, 0)):
        examples.append((torch.randn(users, DIM), torch.randn(users, 2), torch.randn(items, DIM)))
    export(trained.folder, tmp_path / "out", fresh, scorer=scorer, examples=examples, precision=precision)
    program, scorer.model = Predictor.load(tmp_path / "out").program, trained.model
    for arguments in [*examples, (torch.randn(9, DIM), torch.randn(9, 2), torch.randn(50, DIM))]:
        with torch.no_grad():
            want = programs.InPrecision(scorer, precision)(*arguments)
        got = program(*arguments)
        assert [each.dtype for each in got] == [torch.float32, torch.float64]
        assert all(map(programs.same_bits, got, want))


def test_a_second_output_that_differs_is_not_exported(trained):
    scorer = Towers(trained.model)
    described = programs.Scorer(
        programs.SCORER, scorer, [(torch.randn(3, DIM), torch.randn(3, 2), torch.randn(2, DIM))], {}
    )
    for wrong in (lambda *given: (scorer(*given)[0], -scorer(*given)[1]), lambda *given: scorer(*given)[:1]):
        with pytest.raises(ValueError, match="it differs from Towers in its bits on example 0"):
            programs.compare(described, wrong, "it")


@pytest.mark.if_changed
@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.bool])
def test_scores_of_any_dtype_are_compared_in_their_bits(trained, tmp_path, dtype):
    class Others(Pair):
        def forward(self, left, right):
            return (super().forward(left, right) * 3).to(dtype)

    fresh = MODELS["hstu"]()
    examples = [(torch.randn(size, DIM), torch.randn(size, DIM)) for size in (3, 1)]
    export(trained.folder, tmp_path / "out", fresh, scorer=Others(fresh), examples=examples)
    assert Predictor.load(tmp_path / "out").program(*examples[0]).dtype == dtype


class Attention(torch.nn.Module):
    """Of a user's own, over a history: what our modules and sums by sample make of sizes stays dynamic."""

    def __init__(self, model):
        super().__init__()
        self.score = torch.nn.Sequential(
            nn.RMSNorm(2 * DIM), nn.Linear(2 * DIM, 4), nn.PReLU(4), nn.Linear(4, 1)
        )
        self.model = model

    def forward(self, history, target, offsets):
        wanted = target.repeat_interleave(offsets.diff(), 0, output_size=history.shape[0])
        with nn.jagged(offsets):
            weights = self.score(torch.cat([history, wanted], 1))
        pooled = nn.sum_by_sample(weights * history, offsets) * self.model.norm(target)
        return nn.binary_cross_entropy(pooled.sum(1), torch.ones_like(target[:, 0]))


def test_a_scorer_over_histories_is_exported(trained, tmp_path):
    fresh = MODELS["hstu"]()
    scorer, examples = Attention(fresh), []
    for lengths in ([4, 2, 1], [3], [1, 5, 2, 2, 7]):
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        examples.append((torch.randn(sum(lengths), DIM), torch.randn(len(lengths), DIM), offsets))
    export(trained.folder, tmp_path / "out", fresh, scorer=scorer, examples=examples)
    program, scorer.model = Predictor.load(tmp_path / "out").program, trained.model
    for lengths in ([2, 1], [1], [3] * 40):
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        given = torch.randn(sum(lengths), DIM), torch.randn(len(lengths), DIM), offsets
        scores = program(*given)
        assert torch.equal(scores, scorer(*given)) and not scores.requires_grad


def test_a_program_that_differs_in_a_bit_is_refused():
    module = Pair(MODELS["hstu"]()).eval()
    scorer = programs.Scorer(programs.SCORER, module, [(torch.randn(3, DIM), torch.randn(3, DIM))], {})

    def wrong(left, right):
        return torch.nextafter(module(left, right), torch.tensor(torch.inf))

    programs.compare(scorer, module, "itself")
    with pytest.raises(
        ValueError, match=r"wrong differs from Pair in its bits on example 0, of shapes \(3, 8\)"
    ):
        programs.compare(scorer, wrong, "wrong")


def columns_of(folder, name="item"):
    """All columns of a table, read by other tools alone."""
    table = json.loads((folder / "manifest.json").read_text())["tables"][name]
    parts = []
    for entry in table["files"]:
        path = folder / entry["file"]
        assert hashlib.sha256(path.read_bytes()).hexdigest() == entry["sha256"]
        if table["format"] == "safetensors":
            parts.append(load_file(path))
        else:
            found = parquet.read_table(path).to_pydict()
            parts.append({column: torch.tensor(values) for column, values in found.items()})
        assert len(parts[-1]["ids"]) == entry["rows"]
    return {column: torch.cat([part[column] for part in parts]) for column in parts[0]}


@pytest.mark.parametrize("format", ["parquet", "safetensors"])
@pytest.mark.parametrize("shard_rows", [None, 1, 7])
def test_other_tools_read_ids_weights_and_metadata(trained, tmp_path, format, shard_rows):
    export(trained.folder, tmp_path / "out", format=format, shard_rows=shard_rows, metadata=shard_rows != 1)
    found = columns_of(tmp_path / "out")
    order = found["ids"].argsort()
    ids, rows = trained.tables.export()["item"]
    assert torch.equal(found["ids"][order], ids) and len(ids) > 20
    assert torch.equal(found["weights"][order], rows[:, :DIM])
    if shard_rows != 1:
        assert torch.equal(found["state"][order], rows[:, DIM:])
    else:
        assert found.keys() == {"ids", "weights"}


def test_an_older_step_is_exported_too(trained, tmp_path):
    first, last = checkpoint.steps(trained.folder)
    export(trained.folder, tmp_path / "old", step=first)
    export(trained.folder, tmp_path / "new")
    assert [Predictor.load(tmp_path / name).step for name in ("old", "new")] == [first, last]
    old, new = columns_of(tmp_path / "old"), columns_of(tmp_path / "new")
    assert not torch.equal(old["weights"][:5], new["weights"][:5])


def save_rows(folder, rows, base=0, dim=3):
    """A checkpoint of `rows` rows, the last `base` of them in an increment."""
    ids = torch.arange(rows) * 977 - 5000
    values = torch.randn(rows, dim + 1, generator=torch.Generator().manual_seed(0))
    score = torch.arange(rows, dtype=torch.int32)
    described = {
        "tables": {"a/b": {"dim": dim, "seed": 1, "table_id": 2, "scale": 0.5}},
        "features": {"x": {"table": "a/b", "pooling": "sum"}},
    }

    def write(step, places, **options):
        tables = {"a/b": {"keys": ids[places], "rows": values[places], "score": score[places]}}
        return checkpoint.save(folder, step, {}, tables, {"embedding": described}, **options)

    saved = write(1, slice(0, rows - base))
    if base:
        write(2, slice(rows - base, rows), base=saved, erased={"a/b": ids[:2]})
    return ids[2:] if base else ids, values[2:] if base else values


def test_files_are_a_function_of_the_rows_whatever_layers_they_come_from(tmp_path):
    ids, values = save_rows(tmp_path / "layers", 300, base=90)
    described = json.loads((tmp_path / "layers" / "step-000000000002.json").read_text())["meta"]
    order = torch.randperm(len(ids))
    tables = {
        "a/b": {"keys": ids[order], "rows": values[order], "score": (torch.arange(298) + 2).int()[order]}
    }
    checkpoint.save(tmp_path / "whole", 2, {}, tables, described)
    shards = []
    for name in ("layers", "whole"):
        export(tmp_path / name, tmp_path / f"{name}-out", shard_rows=64, metadata=True)
        shards.append({path.name: path.read_bytes() for path in (tmp_path / f"{name}-out").glob("a_b*")})
    assert shards[0] == shards[1] and len(shards[0]) == 5


def test_a_table_is_never_whole_in_memory(tmp_path):
    """Counted: the rows that the reader hands out at a time."""
    save_rows(tmp_path / "c", 40_000, dim=15)
    stream = checkpoint.CheckpointStream(tmp_path / "c")
    sizes = [len(columns["keys"]) for columns in stream.rows("a/b", stream.slices_of("a/b", 1 << 17))]
    assert sum(sizes) == 40_000 and max(sizes) < 40_000 // 8 and len(sizes) == 32


MEASURED = """
import resource, sys
from pathlib import Path
from tritonrec.serving import export
export(Path(sys.argv[1]), Path(sys.argv[2] + "-small"))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
export(Path(sys.argv[3]), Path(sys.argv[2]), shard_rows=1 << 16)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_the_memory_of_an_export_does_not_grow_with_the_table(tmp_path):
    """A table of 512 MiB, in shards of 16 MiB."""
    save_rows(tmp_path / "small", 100)
    save_rows(tmp_path / "large", 1 << 21, dim=62)
    arguments = [tmp_path / "small", tmp_path / "out", tmp_path / "large"]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *map(str, arguments)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 200 << 10, f"{int(done.stdout) >> 10} MiB"


def test_an_empty_table_is_exported(tmp_path):
    save_rows(tmp_path / "c", 0)
    manifest = export(tmp_path / "c", tmp_path / "out")
    assert manifest["tables"]["a/b"]["rows"] == 0
    predictor = Predictor.load(tmp_path / "out")
    offsets = torch.tensor([0, 0, 2])
    want = ops.initial_rows(1, 2, torch.tensor([5, 6]), 3, 0.5)
    found = predictor.rows("x", torch.tensor([5, 6]), offsets)
    assert torch.equal(found[0], torch.zeros(3)) and torch.equal(found[1], want[0] + want[1])
    zeros = Predictor.load(tmp_path / "out", unknown="zeros")
    assert not zeros.rows("x", torch.tensor([5, 6]), offsets).any()


def test_rows_of_a_policy_and_of_pooled_features_are_those_of_peek(tmp_path):
    policy = TablePolicy(Eviction("lru", capacity=12), admission=2)
    features = [FeatureConfig(name, DIM, policy=policy, pooling="mean") for name in FEATURES[:2]]
    features.append(FeatureConfig("user", 4))
    tables = HashTableCollection(features, RowOptimizer("sgd"), seed=9)
    for step in range(4):
        for group in tables.groups:
            member_ids = torch.arange(step * 3, step * 3 + 9)
            keys = torch.cat([group.layout.pack(m, member_ids, "x") for m in range(len(group.layout.names))])
            group.table.lookup(keys, step)
    meta = {"embedding": tables.describe()}
    checkpoint.save(tmp_path / "c", 4, {}, tables.state(), meta)
    export(tmp_path / "c", tmp_path / "out", metadata=True)
    predictor = Predictor.load(tmp_path / "out")
    ids, offsets = torch.arange(30), torch.arange(0, 31, 5)
    lookups = {name: Lookup(ids, offsets) for name in FEATURES}
    for name, want in tables.peek(lookups).items():
        assert torch.equal(predictor.rows(name, ids, offsets), want), name
    assert "score" in columns_of(tmp_path / "out", "ad") and set(predictor.tables) == set(FEATURES)


def test_a_failed_export_leaves_nothing(trained, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tritonrec.serving.exporter.write_shard", full)
    with pytest.raises(OSError, match="No space"):
        export(trained.folder, tmp_path / "new" / "out")
    assert not os.listdir(tmp_path / "new")


def test_bad_arguments_are_named(trained, tmp_path):
    out = tmp_path / "out"
    for wrong, message in (
        ({"format": "csv"}, "format must be one of parquet, safetensors, got 'csv'"),
        ({"shard_rows": 0}, "shard_rows must be at least 1, got 0"),
        ({"compiled": True}, "compiled goes with a model"),
        ({"model": hstu(relative_bias=True)}, "the checkpoint's model is another one than HSTU: Missing key"),
        ({"model": hstu(), "scorer": Pair(hstu())}, "scorer must hold model"),
    ):
        with pytest.raises(ValueError, match=message):
            export(trained.folder, out, **wrong)
    model = hstu()
    with pytest.raises(ValueError, match="two calls or more"):
        export(trained.folder, out, model, scorer=Pair(model))
    with pytest.raises(TypeError, match="Linear has no exported form of its own: give scorer="):
        programs.scorer_of(torch.nn.Linear(2, 2), 4)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        export(tmp_path / "nothing", out)
    checkpoint.save(tmp_path / "plain", 1, {}, {}, {})
    with pytest.raises(ValueError, match="not saved by a Trainer of this version"):
        export(tmp_path / "plain", out)
    assert not os.path.lexists(out)
    out.mkdir()
    with pytest.raises(ValueError, match="exists: export to a new folder"):
        export(trained.folder, out)


def test_a_missing_compiler_is_one_sentence(trained, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "/proc/nowhere/g++")
    with pytest.raises(ValueError, match=r"needs a C\+\+ compiler, and /proc/nowhere/g\+\+ is not here"):
        export(trained.folder, tmp_path / "out", hstu(), compiled=True)


def test_altered_and_missing_files_are_named(trained, tmp_path):
    out = tmp_path / "out"
    export(trained.folder, out, format="safetensors")
    path = out / "item.00000.safetensors"
    columns = load_file(path)
    with pytest.raises(ValueError, match="has no compiled program"):
        Predictor.load(out, compiled=True)
    save_file({**columns, "weights": columns["weights"] * 1.5}, path)
    with pytest.raises(ValueError, match=r"item\.00000\.safetensors was altered"):
        Predictor.load(out)
    path.unlink()
    with pytest.raises(
        ValueError, match=r"item\.00000\.safetensors cannot be read, but the manifest names it"
    ):
        Predictor.load(out)
    manifest = Path(out / "manifest.json")
    manifest.write_text(manifest.read_text().replace('"seed": 0', '"seed": 1'))
    with pytest.raises(ValueError, match="was altered: its own checksum does not fit"):
        Predictor.load(out)
    manifest.write_text("{}")
    with pytest.raises(ValueError, match="is no export"):
        Predictor.load(out)
