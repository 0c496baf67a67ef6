"""Promise: a training goes on from a torch.distributed.checkpoint folder at any world size, with its bits."""

import threading
import time
from datetime import timedelta
from functools import cache
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tritonrec import dcp, nn
from tritonrec.checkpoint import CheckpointError, slices
from tritonrec.data import ClickLoader, ClickLog
from tritonrec.distributed import Communicators, RankPool
from tritonrec.embedding import FeatureConfig, HashTableCollection, RowOptimizer
from tritonrec.embedding.policy import Eviction, TablePolicy
from tritonrec.harness.train.gather import state_digest
from tritonrec.harness.verify.thread_ranks import run_ranks
from tritonrec.pipeline import Trainer, WindowConfig

FORMATS = ["dcp", "safetensors"]
PAIRS = [(1, 2), (2, 1), (2, 4), (4, 2), (4, 1), (1, 4)]
SAVED, MORE = 4, 3


@cache
def clicks():
    draw = np.random.default_rng(3)
    return ClickLog(
        draw.normal(size=(300, 2)).astype(np.float32), draw.zipf(1.3, (300, 2)) % 2**40,
        draw.integers(2, size=300), ("item", "user"), 290,
    )  # fmt: skip


def made(communicators, seed=2):
    """A trainer of tables of two dimensions and rules, one merged of two features and one with a policy."""
    log, generator = clicks(), torch.Generator().manual_seed(7)
    features = [
        FeatureConfig(
            name, 8, policy=TablePolicy(eviction=Eviction("lru", 60)) if name == "item" else TablePolicy()
        )
        for name in log.features
    ]
    model = nn.DLRM(nn.DLRMConfig(log.features, 2, 8, bottom=(8,), top=(8,)))
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.randn(each.shape, generator=generator) / 4)
    tables = HashTableCollection(features, RowOptimizer("adam", lr=0.05), seed=seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    config = WindowConfig(micro_batches=2, seed=4)
    return Trainer(model, tables, optimizer, communicators, "nestpipe", config)


def trained(trainer, steps):
    here = trainer.communicators
    loader = ClickLoader(clicks(), 24, 5, here.rank, here.world_size)
    first = trainer.next_step
    for _ in trainer.run(loader.batch(step) for step in range(first, first + steps)):
        pass
    return digest(trainer)


def digest(trainer):
    return state_digest(trainer.communicators, trainer.tables, trainer.dense.tensors())


def exported(communicators, folder, format):
    with made(communicators) as trainer:
        before = trained(trainer, SAVED)
        written = dcp.async_save(trainer, folder, {"note": [1, "two"]}, format=format)
        after = trained(trainer, MORE)  # beside the save
        written.result(60)
    return before, after


def imported(communicators, folder):
    notes = []
    with made(communicators) as trainer:
        trained(trainer, 1)  # whose rows have to go
        assert dcp.load(trainer, folder, notes.append) == SAVED
        assert notes == [{"note": [1, "two"]}]
        return digest(trainer), trained(trainer, MORE)


@pytest.mark.if_changed
@pytest.mark.parametrize("format", FORMATS)
def test_a_folder_of_one_rank_goes_on_at_other_world_sizes(tmp_path, format):
    bits = exported(Communicators.local(), tmp_path / "out", format)
    assert bits[0] != bits[1]
    assert imported(Communicators.local(), tmp_path / "out") == bits
    for ranks in 2, 3:  # three ranks share parts of the slices
        assert run_ranks(ranks, lambda each: imported(each, tmp_path / "out")) == [bits] * ranks


@pytest.mark.if_changed
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_folder_is_read_in_parts_none_of_which_reads_all_rows(tmp_path, monkeypatch, ranks):
    """DCP reads a chunk whole, so that chunks of all rows made the time of a load their square."""
    monkeypatch.setattr(slices, "PART_BYTES", 512)
    bits = run_ranks(ranks, lambda each: exported(each, tmp_path / "out", "dcp"))[0]
    columns = torch_dcp.FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    rows = [[chunk.sizes[0] for chunk in columns[name].chunks] for name in columns if "/keys" in name]
    assert max(map(max, rows)) < 16 and min(map(sum, rows)) > 32 and len(rows) > 1
    for loads in 1, 3:
        assert run_ranks(loads, lambda each: imported(each, tmp_path / "out")) == [bits] * loads


def saved_by_several(communicators, folder):
    """Saves of four kinds with no wait between them; no two use the savers' group at once."""
    group, used = communicators.checkpoint, threading.Lock()
    exchange = group.exchange

    def alone(*given):
        assert used.acquire(blocking=False), "two saves exchange at once"
        try:
            time.sleep(0.005)  # so that saves overlap
            return exchange(*given)
        finally:
            used.release()

    group.exchange = alone
    with (
        made(communicators) as trainer,
        trainer.saver(folder / "whole") as whole,
        trainer.saver(folder / "changes", full_every=2) as changes,
    ):
        for step in range(2):
            trained(trainer, 1)
            whole.save(step + 1)
            changes.save(step + 1)
            exports = [
                dcp.async_save(trainer, folder / f"{format}{step}", format=format) for format in FORMATS
            ]
            trainer.save(folder / "last")
        for each in exports:
            each.result()
        assert dcp.load(trainer, folder / "dcp1") == dcp.load(trainer, folder / "safetensors1") == 2
        return [trainer.load(folder / name) for name in ("whole", "changes", "last")], digest(trainer)


@pytest.mark.if_changed
def test_savers_of_one_group_take_turns(tmp_path):
    (steps, first), other = run_ranks(2, lambda each: saved_by_several(each, tmp_path))
    assert steps == [2, 2, 2] and other == (steps, first)


@pytest.mark.slow
@pytest.mark.multi_rank
def test_six_pairs_of_world_sizes_have_the_same_bits(tmp_path, pool):
    for format in FORMATS:
        bits = {size: pool.run(exported, size, tmp_path / f"{format}{size}", format) for size in (1, 2, 4)}
        assert bits == {size: [bits[1][0]] * size for size in (1, 2, 4)}
        for saved, loads in PAIRS:
            found = pool.run(imported, loads, tmp_path / f"{format}{saved}")
            assert found == [bits[1][0]] * loads, (format, saved, loads)


def test_other_readers_find_one_tensor_for_each_column(tmp_path):
    with made(Communicators.local()) as trainer:
        trained(trainer, SAVED)
        for format in FORMATS:
            dcp.save(trainer, tmp_path / format, format=format)
        ids, rows = trainer.tables.export()["item"]
        parameters = dict(trainer.dense.model.named_parameters())
    saved = torch_dcp.FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata
    name = "tables/item/{}".format
    state = {
        name(column): torch.empty(saved[name(column)].size, dtype=dtype)
        for column, dtype in (("keys", torch.int64), ("rows", torch.float32))
    }
    state["dense/model/top.0.weight"] = torch.empty(parameters["top.0.weight"].shape)
    torch_dcp.load(state, checkpoint_id=tmp_path / "dcp")
    order = state[name("keys")].argsort()
    assert torch.equal(state[name("keys")][order], ids)
    assert torch.equal(state[name("rows")][order], rows)
    assert torch.equal(state["dense/model/top.0.weight"], parameters["top.0.weight"])
    (file,) = (tmp_path / "safetensors").glob("*.safetensors")
    with safe_open(file, "pt") as there:
        assert torch.equal(there.get_tensor(name("rows")), state[name("rows")])


def test_all_rows_come_back_where_every_part_has_some(tmp_path):
    with made(Communicators.local()) as trainer:
        rows = torch.randn(5000, 24)
        rows[:, 16:].abs_()  # Adam's squares
        trainer.tables.load("user", torch.arange(5000) * 7, rows)
        dcp.save(trainer, tmp_path)
        ids, rows = trainer.tables.export()["user"]
    with made(Communicators.local()) as other:
        dcp.load(other, tmp_path)
        there = other.tables.export()["user"]
    assert torch.equal(there[0], ids) and torch.equal(there[1], rows)


@pytest.mark.parametrize("format", FORMATS)
def test_tables_without_rows_come_back_so(tmp_path, format):
    def saved(communicators):
        with made(communicators) as trainer:
            dcp.save(trainer, tmp_path, format=format)

    run_ranks(2, saved)
    with made(Communicators.local()) as trainer:
        trained(trainer, 1)
        assert dcp.load(trainer, tmp_path) == 0
        assert not any(len(ids) for ids, _ in trainer.tables.export().values())


def test_what_does_not_fit_changes_nothing(tmp_path):
    exported(Communicators.local(), tmp_path / "out", "dcp")
    with made(Communicators.local(), seed=3) as trainer:
        before = trained(trainer, 1)
        with pytest.raises(
            ValueError, match=f"seed of table item is 2 in the checkpoint in {tmp_path / 'out'}"
        ):
            dcp.load(trainer, tmp_path / "out")
        assert digest(trainer) == before
        assert dcp.load(trainer, tmp_path / "out", changed={"seed"}) == SAVED


def test_wrong_folders_are_named(tmp_path):
    with made(Communicators.local()) as trainer:
        with pytest.raises(CheckpointError, match=r"holds no checkpoint of tritonrec\.dcp"):
            dcp.load(trainer, tmp_path)
        torch_dcp.save({"weight": torch.ones(2)}, checkpoint_id=tmp_path / "other", no_dist=True)
        with pytest.raises(CheckpointError, match=r"holds no checkpoint of tritonrec\.dcp"):
            dcp.load(trainer, tmp_path / "other")
        with pytest.raises(CheckpointError, match="not empty"):
            dcp.save(trainer, tmp_path / "other")
        assert not (tmp_path / "other" / ".lock").exists()
        assert not any(group.table._snapshots for group in trainer.tables.groups)  # copies rows no more
        with pytest.raises(ValueError, match="format must be"):
            dcp.save(trainer, tmp_path / "new", format="pickle")
        for call in (dcp.save, dcp.load):
            with pytest.raises(ValueError, match="cannot be at a URL"):
                call(trainer, "memory://folder")


@pytest.mark.parametrize(
    "damage", [lambda raw: b"", lambda raw: raw[: len(raw) // 2], lambda raw: b"PK\3\4" + raw]
)
@pytest.mark.parametrize("format", ["dcp", "safetensors"])
def test_a_damaged_file_is_one_error_with_the_folder(tmp_path, format, damage):
    exported(Communicators.local(), tmp_path / "out", format)
    with made(Communicators.local()) as trainer:
        before = trained(trainer, 1)
        for file in list((tmp_path / "out").iterdir()):
            raw = file.read_bytes()
            file.write_bytes(damage(raw))
            with pytest.raises(CheckpointError, match=f"{tmp_path / 'out'}[ :]") as error:
                dcp.load(trainer, tmp_path / "out")
            assert "Traceback" not in str(error.value)
            file.unlink()
            with pytest.raises(CheckpointError, match=f"{tmp_path / 'out'}"):
                dcp.load(trainer, tmp_path / "out")
            file.write_bytes(raw)
        assert digest(trainer) == before


@pytest.mark.parametrize("text", [b"", b"[1]", b'{"step": 3}', b"\xff"])
def test_a_meta_tensor_of_something_else_is_named(tmp_path, text):
    meta = torch.tensor(list(text), dtype=torch.uint8)
    torch_dcp.save({"meta": meta}, checkpoint_id=tmp_path / "other", no_dist=True)
    with (
        made(Communicators.local()) as trainer,
        pytest.raises(CheckpointError, match="no checkpoint of this version"),
    ):
        dcp.load(trainer, tmp_path / "other")


def test_a_folder_without_some_rows_is_refused(tmp_path):
    with made(Communicators.local()) as trainer:
        trained(trainer, 1)
        dcp.save(trainer, tmp_path, format="safetensors")
        (file,) = tmp_path.glob("*.safetensors")
        tensors = load_file(file)
        tensors["tables/item/rows"] = tensors["tables/item/rows"][:-2].clone()
        save_file(tensors, file)
        with pytest.raises(CheckpointError, match=r"not whole: it lacks rows of .*tables/item/rows"):
            dcp.load(trainer, tmp_path)


@pytest.mark.if_changed
@pytest.mark.parametrize(("format", "replicas"), [*((each, 1) for each in FORMATS), ("dcp", 2)])
def test_two_ranks_write_a_folder_of_the_same_bits(tmp_path, format, replicas):
    """Of two copies of the tables the second writes nothing, and does not wait for it."""
    bits = exported(Communicators.local(), tmp_path / "one", format)
    written = run_ranks(2, lambda each: exported(each, tmp_path / "two", format), replicas=replicas)
    assert written == [bits] * 2
    assert imported(Communicators.local(), tmp_path / "two") == bits


@pytest.mark.parametrize("save", [dcp.save, Trainer.save], ids=["dcp", "trainer"])
def test_ranks_that_do_not_see_each_other_s_files_publish_nothing(tmp_path, save):
    def saved(communicators):
        with made(communicators) as trainer:
            trained(trainer, 1)
            save(trainer, tmp_path / str(communicators.rank))

    with pytest.raises(CheckpointError, match=r"rank 1 has written .* where rank 0 does not see it: give"):
        run_ranks(2, saved)
    assert not [each for each in tmp_path.rglob("*") if each.suffix in (".json", ".metadata")]


def written_late(communicators, folder):
    """A save for which the disk of rank 1 takes longer than a collective may."""

    class Late(torch_dcp.FileSystemWriter):
        def write_data(self, *arguments):
            time.sleep(4 if communicators.rank else 0)
            return super().write_data(*arguments)

    with patch.object(torch_dcp, "FileSystemWriter", Late), made(communicators) as trainer:
        trained(trainer, 1)
        dcp.save(trainer, folder)
    # rank 0 may not have released its lock yet
    return sorted(each.name for each in folder.iterdir() if each.name != ".lock")


@pytest.mark.if_changed
@pytest.mark.multi_rank
def test_ranks_wait_for_a_slow_disk_beyond_the_timeout(tmp_path):
    with RankPool([2], timedelta(seconds=2)) as own:
        written = [".metadata", "__0_0.distcp", "__1_0.distcp"]
        assert own.run(written_late, 2, tmp_path / "out") == [written] * 2
