"""A checkpoint of any world size loads at any other, each rank reading the files of its slices alone."""

from __future__ import annotations

import json
import threading
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from simulated import ascending, load_on, on_ranks, part_of, random_table, same, save_on, whole
from speeds import slow_except

from tritonrec import ops
from tritonrec.checkpoint import SLICES, CheckpointError, load, range_of, save, slice_of, writer
from tritonrec.checkpoint import slices as slices_module
from tritonrec.checkpoint.files import manifest_of
from tritonrec.checkpoint.manifest import add_checksum, read_manifest

WORLDS = (1, 2, 3, 4, 5, 8)


@pytest.fixture
def small_parts(monkeypatch):
    """Parts of a kilobyte, so that small tables have many."""
    monkeypatch.setattr(slices_module, "PART_BYTES", 1024)


def tables_of_all_kinds() -> dict[str, dict[str, torch.Tensor]]:
    return {
        "items": random_table(1, 700),
        "users/é": random_table(2, 90, width=5),
        "empty": random_table(3, 0),
        "one row": random_table(4, 1),
        "no width": random_table(5, 9, width=0),
        "candidates": {"keys": torch.tensor([2**63 - 1, -(2**63), -1]), "counts": torch.tensor([3, 1, 2])},
    }


@pytest.mark.parametrize("saved_by", WORLDS)
def test_every_world_size_loads_what_any_other_saved(tmp_path, small_parts, saved_by):
    tables = tables_of_all_kinds()
    dense = {"w": torch.randn(3, 2), "step": torch.tensor(7)}
    save_on(saved_by, tmp_path, 12, tables, dense=dense, meta={"a": [1]})
    for world_size in WORLDS:
        checkpoints = load_on(world_size, tmp_path)
        for name, table in tables.items():
            assert same(whole(checkpoints, name), ascending(table)), (name, world_size)
        for checkpoint in checkpoints:
            assert same(checkpoint.dense, dense) and checkpoint.meta == {"a": [1]}
            assert (checkpoint.step, checkpoint.saved_by) == (12, saved_by)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 7, 8, 64, 100, 65536, 65537, 2**31 - 1])
def test_ranges_of_ranks_and_slices_agree_with_the_owner(world_size):
    """On random keys and, where a rank's range begins, on the places beside the bound."""
    keys = random_table(6, 20_000)["keys"]
    owners = ops.owner_of(keys, world_size)
    slices = slice_of(keys)
    assert bool(((slices >= 0) & (slices < SLICES)).all())
    for rank in owners[:500].unique().tolist():
        first, last = slices_module.slices_of(range_of(rank, world_size))
        inside = slices[owners == rank]
        assert bool(((inside >= first) & (inside <= last)).all())
    for rank in {0, world_size // 3, world_size - 1}:
        begin, end = range_of(rank, world_size)
        assert begin * world_size >> 32 == rank and (end - 1) * world_size >> 32 == rank
        assert end == (range_of(rank + 1, world_size)[0] if rank + 1 < world_size else 2**32)
    assert range_of(0, world_size)[0] == 0 and range_of(world_size - 1, world_size)[1] == 2**32


def test_files_do_not_depend_on_the_order_of_rows(tmp_path, small_parts):
    table = random_table(7, 500)
    order = torch.randperm(500, generator=torch.Generator().manual_seed(8))
    shuffled = {column: values[order] for column, values in table.items()}
    save_on(3, tmp_path / "a", 1, {"t": table})
    save_on(3, tmp_path / "b", 1, {"t": shuffled})
    names = sorted(str(path.relative_to(tmp_path / "a")) for path in (tmp_path / "a").rglob("*.*"))
    assert len(names) > 6
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_rows_lie_by_slice_and_key_in_files_of_their_slices(tmp_path, small_parts):
    table = at_bounds(random_table(9, 200_000))
    save_on(5, tmp_path, 1, {"t": table})
    body = read_manifest(manifest_of(tmp_path, 1))
    (layer,) = body["tables"]["t"]["layers"]
    assert len(layer["parts"]) > 60
    assert sum(part["rows"] for part in layer["parts"]) == len(table["keys"])
    for part in layer["parts"]:
        keys = load_file(tmp_path / part["file"])["keys"]
        pairs = list(zip(slice_of(keys).tolist(), keys.tolist(), strict=True))
        assert pairs == sorted(pairs)
        assert bool((ops.owner_of(keys, 5) == part["rank"]).all())
        first, last = (int(text, 16) for text in part["file"].split(".")[1].split("-"))
        assert (first, last) == slices_module.slices_of((part["begin"], part["end"]))
        assert first <= pairs[0][0] and pairs[-1][0] <= last


def at_bounds(table: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The rows of the first and the last slice of every part that there can be, and some of others."""
    slices = slice_of(table["keys"])
    chosen = (slices % 256 == 0) | (slices % 256 == 255) | (slices % 1000 == 1)
    return {column: values[chosen] for column, values in table.items()}


@pytest.mark.if_changed
@pytest.mark.parametrize("saved_by", slow_except([3], [1, 3]))
def test_rows_at_the_bounds_of_parts_are_found(tmp_path, monkeypatch, saved_by):
    monkeypatch.setattr(slices_module, "PART_BYTES", 64)  # as many parts as there can be
    table = at_bounds(random_table(27, 200_000))
    base = save_on(saved_by, tmp_path, 1, {"t": table})[0]
    changed = {column: values[::2] for column, values in table.items()} | {"rows": table["rows"][::2] + 1}
    erased = table["keys"][1::4]
    save_on(saved_by, tmp_path, 2, {"t": changed}, base=base, erased={"t": erased})
    keep = ~torch.isin(table["keys"], torch.cat([erased, changed["keys"]]))
    table = {column: torch.cat([values[keep], changed[column]]) for column, values in table.items()}
    for world_size in (2, 16, 64):
        assert same(whole(load_on(world_size, tmp_path), "t"), ascending(table))


@pytest.mark.parametrize("saved_by, world_size", [(1, 8), (2, 8), (4, 8), (8, 8)])
def test_a_rank_among_more_reads_files_of_one_old_rank(tmp_path, small_parts, saved_by, world_size):
    """The modulo rule of MTGRBoost section 5.2, on the upper bits: rank r reads what rank r // 2 wrote."""
    save_on(saved_by, tmp_path, 1, {"t": random_table(10, 3000)})
    writer = {part["file"]: part["rank"] for part in parts_in(tmp_path)}
    for rank, checkpoint in enumerate(load_on(world_size, tmp_path)):
        read = [file for file in checkpoint.files if file in writer]
        assert read and {writer[file] for file in read} == {rank * saved_by // world_size}


def parts_in(directory: Path, step: int = 1) -> list[dict]:
    return read_manifest(manifest_of(directory, step))["tables"]["t"]["layers"][-1]["parts"]


@pytest.mark.parametrize(
    "saved_by, world_size", slow_except([(1, 5), (8, 2)], product((1, 3, 8), (2, 5, 64)))
)
def test_little_more_is_read_than_needed(tmp_path, small_parts, saved_by, world_size):
    """At most a part at either end of the range."""
    save_on(saved_by, tmp_path, 1, {"t": random_table(11, 12_000, width=8)})
    parts = parts_in(tmp_path)
    largest = max(part["bytes"] for part in parts)
    assert len(parts) >= 256 and largest < 4096
    for checkpoint in load_on(world_size, tmp_path):
        headers = 400 * len(checkpoint.files)
        assert checkpoint.bytes_needed < checkpoint.bytes_read
        assert checkpoint.bytes_read < checkpoint.bytes_needed + 2 * largest + headers
        sizes = [(tmp_path / file).stat().st_size for file in checkpoint.files]
        assert checkpoint.bytes_read == sum(sizes)


@pytest.mark.parametrize("world_size", [1, 4, 48])
def test_small_tables_make_one_file_a_rank(tmp_path, world_size):
    save_on(world_size, tmp_path, 1, {"t": random_table(12, 2000), "none": random_table(13, 0)})
    assert len(list((tmp_path / "step-000000000001").iterdir())) == world_size + 1


@pytest.mark.parametrize("megabytes, parts", [(0, 1), (1, 1), (3, 4), (16, 16), (5000, 256)])
def test_large_tables_are_cut_into_256_parts_at_most(megabytes, parts):
    assert len(slices_module.parts_of((0, 2**32), megabytes << 20)) == parts
    third = slices_module.parts_of(range_of(1, 3), (megabytes << 20) // 3)
    assert third[0][0] == range_of(1, 3)[0] and third[-1][1] == range_of(1, 3)[1]
    assert all(left[1] == right[0] for left, right in pairwise(third))
    assert parts // 3 <= len(third) <= parts // 3 + 2


def test_a_table_of_another_width_is_refused_before_it_is_read(tmp_path):
    save_on(2, tmp_path, 1, {"t": random_table(14, 20)})
    like = {"t": random_table(14, 0)}
    load(tmp_path, like=like)
    for path in (tmp_path / "step-000000000001").iterdir():
        path.unlink()
    wider = {"t": like["t"] | {"rows": torch.zeros(0, 4)}}
    words = r"column 'rows' of table 't' is float32 \(3,\) in the checkpoint, float32 \(4,\) here"
    with pytest.raises(ValueError, match=rf"step-000000000001\.json does not fit.*{words}"):
        load(tmp_path, like=wider)
    with pytest.raises(ValueError, match="table 't' is only in the checkpoint"):
        load(tmp_path, like={})


def without_a_part(parts: list[dict]) -> list[dict]:
    return parts[:1] + parts[2:]


def with_a_part_twice(parts: list[dict]) -> list[dict]:
    return [*parts, parts[1]]


def with_a_longer_part(parts: list[dict]) -> list[dict]:
    return [parts[0] | {"end": parts[0]["end"] + 1}, *parts[1:]]


@pytest.mark.parametrize(
    "change, words",
    [
        (without_a_part, "nothing holds slices 16384 to 32767"),
        (with_a_part_twice, "two files hold slices 16384 to 32767"),
        (with_a_longer_part, "two files hold slices 16384 to 16384"),
    ],
)
def test_slices_missing_or_there_twice_are_refused(tmp_path, change, words):
    save_on(4, tmp_path, 1, {"t": random_table(15, 50)})
    path = manifest_of(tmp_path, 1)
    body = {name: value for name, value in read_manifest(path).items() if name != "manifest_sha256"}
    layer = body["tables"]["t"]["layers"][0]
    layer["parts"] = change(layer["parts"])
    path.write_text(json.dumps(add_checksum(body)))
    with pytest.raises(
        CheckpointError, match=rf"step-000000000001\.json: table 't', layer of step 1: {words}"
    ):
        load(tmp_path)


def test_ranks_that_do_not_cover_the_ring_publish_nothing(tmp_path, monkeypatch):
    """Two ranks that both take the first half for theirs, and write at the same moment."""
    both, original = threading.Barrier(2), writer.save_file

    def save_file(tensors, path, header):
        written = original(tensors, path, header)
        if "dense" not in path.name:
            both.wait(20)
        return written

    monkeypatch.setattr(writer, "save_file", save_file)
    monkeypatch.setattr(slices_module, "range_of", lambda rank, world_size: (0, 2**31))
    with pytest.raises(CheckpointError, match="table 't': two files hold slices 0 to 32767"):
        save_on(2, tmp_path, 1, {"t": random_table(16, 50)})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("column", ["keys", "erased"])
def test_a_key_of_another_rank_is_refused_on_all_ranks(tmp_path, world_size, column):
    table = random_table(17, 30)
    base = save_on(world_size, tmp_path, 1, {"t": table})[0]
    foreign = {"t": table["keys"][ops.owner_of(table["keys"], world_size) == 1][:1]}

    def work(rank, gather):
        own = part_of(table, rank, world_size)
        erased = {}
        if rank == 0 and column == "keys":
            own["keys"][-1] = foreign["t"]
        elif rank == 0:
            erased = foreign
        return save(
            tmp_path, 2, {}, {"t": own}, {}, rank=rank, world_size=world_size, gather=gather,
            base=base, erased=erased,
        )  # fmt: skip

    errors = on_ranks(world_size, work)
    key = int(foreign["t"])
    assert isinstance(errors[0], ValueError)
    for error in errors:
        assert f"table 't': rank 0 of {world_size} does not own key {key}" in str(error)
    assert load(tmp_path).step == 1
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["step-000000000001"]


def test_a_rank_that_fails_fails_all_of_them(tmp_path, monkeypatch):
    table = random_table(18, 30)
    save_on(3, tmp_path, 1, {"t": table})
    before = sorted(tmp_path.rglob("*"))

    def work(rank, gather):
        directory = tmp_path if rank != 1 else tmp_path / "step-000000000001.json"
        own = part_of(table, rank, 3)
        return save(directory, 2, {}, {"t": own}, {}, rank=rank, world_size=3, gather=gather)

    errors = on_ranks(3, work)
    for error in errors:
        assert isinstance(error, CheckpointError)
        assert "step-000000000001.json/step-000000000002" in str(error)
        assert "The checkpoints before it are untouched" in str(error)
    assert "rank 1: " in str(errors[0])
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("what", ["step", "width", "table", "base"])
def test_ranks_that_save_different_things_are_refused(tmp_path, what):
    base = save_on(2, tmp_path, 1, {"t": random_table(19, 30)})[0]

    def work(rank, gather):
        own = part_of(random_table(19, 30, width=4 if what == "width" and rank else 3), rank, 2)
        tables = {"u" if what == "table" and rank else "t": own}
        options = {"base": base, "erased": {}} if what == "base" and rank else {}
        step = 3 if what == "step" and rank else 2
        return save(tmp_path, step, {}, tables, {}, rank=rank, world_size=2, gather=gather, **options)

    for error in on_ranks(2, work):
        assert isinstance(error, CheckpointError)
        assert "the ranks do not save the same tables" in str(error)
    assert load(tmp_path).step == 1


def test_a_rank_that_never_comes_is_an_error(tmp_path):
    def gather(text):
        raise ConnectionError("rank 1 is gone")

    with pytest.raises(CheckpointError, match=r"could not exchange their reports: .*rank 1 is gone"):
        save(tmp_path, 1, {}, {}, {}, rank=0, world_size=2, gather=gather)


@pytest.mark.slow
@given(
    worlds=st.lists(st.sampled_from(WORLDS), min_size=1, max_size=4),
    loaded_by=st.sampled_from(WORLDS),
    changes=st.lists(
        st.dictionaries(
            st.sampled_from([-(2**63), -1, 0, 2**63 - 1])
            | st.integers(-(2**63), 2**63 - 1)
            | st.integers(-9, 9),
            st.none() | st.integers(0, 255),
            max_size=12,
        ),
        min_size=4,
        max_size=4,
    ),
)
def test_a_base_and_its_deltas_give_the_model(tmp_path_factory, worlds, loaded_by, changes):
    """A full checkpoint and up to three deltas, each at a world size of its own; None erases a key."""
    directory = tmp_path_factory.mktemp("deltas")
    model: dict[int, int] = {}
    base, options = None, {}
    for step, (world_size, change) in enumerate(zip(worlds, changes, strict=False)):
        present = {key: value for key, value in change.items() if value is not None}
        gone = [key for key, value in change.items() if value is None]
        model = {key: value for key, value in (model | present).items() if key not in gone}
        if base is not None:
            options = {"base": base, "erased": {"t": torch.tensor(gone, dtype=torch.int64)}}
        base = save_on(world_size, directory, step, {"t": table_of(present)}, **options)[0]
    assert same(whole(load_on(loaded_by, directory), "t"), ascending(table_of(model)))


def table_of(model: dict[int, int]) -> dict[str, torch.Tensor]:
    values = torch.tensor(list(model.values()), dtype=torch.float32)
    return {
        "keys": torch.tensor(list(model), dtype=torch.int64),
        "rows": torch.stack([values, values + 0.5], dim=1),
        "score": values.to(torch.uint8),
    }


def test_a_delta_gives_bit_for_bit_what_a_full_checkpoint_gives(tmp_path, small_parts):
    """Keys that change, come, go, go and come back within one delta, and go in one and come in the next."""
    table = random_table(20, 800)
    base = save_on(4, tmp_path / "deltas", 1, {"t": table})[0]
    generator = torch.Generator().manual_seed(21)
    for step, world_size in ((2, 3), (3, 8)):
        shuffled = table["keys"][torch.randperm(len(table["keys"]), generator=generator)]
        erased, back, changed = shuffled[:60], shuffled[40:60], shuffled[60:200]
        new = random_table(20 + step, 70, extremes=False)["keys"]
        now = torch.cat([changed, back, new])
        rows = {"keys": now, "rows": torch.randn(len(now), 3, generator=generator)}
        rows |= {
            "score": torch.arange(len(now)) + step,
            "heat": torch.full((len(now),), step).to(torch.uint8),
        }
        keep = ~torch.isin(table["keys"], torch.cat([erased, changed]))
        table = {column: torch.cat([table[column][keep], rows[column]]) for column in table}
        base = save_on(world_size, tmp_path / "deltas", step, {"t": rows}, base=base, erased={"t": erased})[0]
    save_on(5, tmp_path / "full", 3, {"t": table})
    full = load(tmp_path / "full").tables["t"]
    assert same(full, ascending(table))
    assert same(load(tmp_path / "deltas").tables["t"], full)
    assert same(whole(load_on(5, tmp_path / "deltas"), "t"), full)


def test_a_delta_without_changes_writes_no_table_files(tmp_path):
    table = random_table(22, 40)
    base = save_on(2, tmp_path, 1, {"t": table})[0]
    none = {column: values[:0] for column, values in table.items()}
    saved = save_on(2, tmp_path, 2, {"t": none}, base=base, erased={})
    assert len(list((tmp_path / "step-000000000002").iterdir())) == 1
    assert saved[1].bytes == 0
    assert same(load(tmp_path).tables["t"], ascending(table))


def test_what_a_kept_delta_builds_upon_is_kept(tmp_path):
    table = random_table(23, 40)
    some = {column: values[:4] for column, values in table.items()}
    base = save_on(2, tmp_path, 1, {"t": table})[0]
    for step in (2, 3, 4):
        base = save_on(
            2, tmp_path, step, {"t": some}, base=base, erased={"t": table["keys"][step : step + 1]}
        )[0]
        folders = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
        assert folders == [f"step-{at:012d}" for at in range(1, step + 1)]
    assert [path.name for path in sorted(tmp_path.glob("*.json"))] == [
        "step-000000000003.json", "step-000000000004.json",
    ]  # fmt: skip
    assert len(load(tmp_path).tables["t"]["keys"]) == 39
    save_on(2, tmp_path, 5, {"t": table})
    assert len(list(tmp_path.iterdir())) == 2 + 5  # step 4 still builds upon 1 to 3
    save_on(2, tmp_path, 6, {"t": table})
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        "step-000000000005", "step-000000000006",
    ]  # fmt: skip


def test_a_delta_on_another_base_is_refused(tmp_path):
    table = random_table(24, 20)
    old = save_on(1, tmp_path, 1, {"t": table})[0]
    new = save_on(1, tmp_path, 2, {"t": table})[0]
    for base, step in ((old, 3), (new, 2)):
        with pytest.raises(CheckpointError, match=r"is not the base of the changes.*save a full one"):
            save_on(1, tmp_path, step, {"t": table}, base=base, erased={})
    other = save_on(1, tmp_path, 2, {"t": random_table(25, 20)})[0]
    with pytest.raises(CheckpointError, match=r"step-000000000002\.json is not the base of the changes"):
        save_on(1, tmp_path, 3, {"t": table}, base=new, erased={})
    wider = random_table(24, 20, width=4)
    with pytest.raises(ValueError, match=r"other tables or columns .*'rows' of table 't'.*save a full"):
        save_on(1, tmp_path, 3, {"t": wider}, base=other, erased={})
    with pytest.raises(ValueError, match="needs both `base` and `erased`"):
        save_on(1, tmp_path, 3, {"t": table}, base=other)
    with pytest.raises(ValueError, match="erased keys of table 'u' must be"):
        save_on(1, tmp_path, 3, {"t": table}, base=other, erased={"u": torch.tensor([1])})
    assert load(tmp_path).step == 2


def test_the_example_without_tritonrec_in_the_docs_reads_all_of_it(tmp_path, small_parts, monkeypatch):
    text = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    code = text.partition("## Loading without tritonrec")[2].partition("```python\n")[2].partition("```")[0]
    assert "import tritonrec" not in code and "from tritonrec" not in code
    model = {key: key % 251 for key in random_table(26, 300)["keys"].tolist()}
    base = save_on(3, tmp_path / "checkpoints", 4, {"items": table_of(model)}, dense={"w": torch.ones(2)})[0]
    gone = list(model)[:20]
    model = {key: value for key, value in model.items() if key not in gone}
    changed = {key: 252 for key in list(model)[:30]}
    erased = {"items": torch.tensor(gone)}
    save_on(2, tmp_path / "checkpoints", 12, {"items": table_of(changed)}, base=base, erased=erased)
    monkeypatch.chdir(tmp_path)
    found: dict = {}
    exec(code, found)
    model |= changed
    assert {key: row.tolist() for key, row in found["rows"].items()} == {
        key: [value, value + 0.5] for key, value in model.items()
    }
    assert found["manifest"]["step"] == 12 and found["dense"] == {}
