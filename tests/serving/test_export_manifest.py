"""A manifest or a shard of another form is refused by name, also where every checksum fits."""

import hashlib
import json

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_parts import places
from safetensors.torch import save_file

from tritonrec import checkpoint
from tritonrec.checkpoint.manifest import add_checksum
from tritonrec.serving import Predictor, export
from tritonrec.serving.shards import write_shard

DENSE = {
    "kind": "next_item",
    "program": {"file": "x", "sha256": ""},
    "max_seq_len": 3,
    "timestamps": False,
}

CLICKS = {"kind": "click", "program": {"file": "x", "sha256": ""}, "features": ["item", "user"], "dense": 1}


@pytest.fixture
def folder(tmp_path):
    ids = torch.randint(-(2**63), 2**63 - 1, (9,), generator=torch.Generator().manual_seed(4))
    table = {"keys": ids, "rows": torch.randn(9, 3, generator=torch.Generator().manual_seed(5))}
    described = {
        "tables": {"item": {"dim": 2, "seed": 1, "table_id": 0, "scale": 0.5}},
        "features": {"item": {"table": "item", "pooling": "none"}},
    }
    checkpoint.save(tmp_path / "saved", 1, {}, {"item": table}, {"embedding": described})
    export(tmp_path / "saved", tmp_path / "out", shard_rows=5)
    return tmp_path / "out"


def reseal(folder, change=lambda body: None):
    """Make every checksum fit, after a `change` of the manifest."""
    path = folder / "manifest.json"
    body = json.loads(path.read_text())
    del body["manifest_sha256"]
    for entry in body["tables"]["item"]["files"]:
        entry["sha256"] = hashlib.sha256((folder / entry["file"]).read_bytes()).hexdigest()
    change(body)
    path.write_text(json.dumps(add_checksum(body)))


def set_to(value, *path):
    def change(body):
        for name in path[:-1]:
            body = body[name]
        body[path[-1]] = value

    return change


@pytest.mark.if_changed
@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["step"], "3", "step of the manifest is '3'"),
        (["tables"], [], r"tables of the manifest is '\[\]'"),
        (["tables", "item"], 7, "tables.item is '7'"),
        (["tables", "item", "dim"], 2.0, "dim of tables.item is '2.0'"),
        (["tables", "item", "dim"], True, "dim of tables.item is 'True'"),
        (["tables", "item", "dim"], 0, "tables.item has 9 rows of 0 columns"),
        (["tables", "item", "dim"], 2**63, "tables.item has 9 rows of 9223372036854775808 columns"),
        (["tables", "item", "rows"], -1, "tables.item has -1 rows of 2 columns"),
        (["tables", "item", "rows"], 10, "tables.item.files have another number of rows than its 10"),
        (["tables", "item", "format"], "csv", "tables.item.format is 'csv'"),
        (["tables", "item", "files", 0], None, "tables.item.files is 'None'"),
        (["tables", "item", "files", 0, "rows"], -5, "tables.item.files has -5 rows in item.00000.parquet"),
        (["tables", "item", "files", 0, "file"], "../x", "tables.item names '../x'.*"),
        (["features", "item", "table"], "other", "features.item.table is 'other', which is no table"),
        (["features", "item"], {"table": "item"}, "pooling of features.item is 'None'"),
        (["dense"], 3, "dense is '3'"),
        (["dense"], {"kind": "click", "program": {"file": "x"}}, "sha256 of dense.program is 'None'"),
        (["dense"], DENSE | {"max_seq_len": 0}, "dense.max_seq_len is 0"),
        (["dense"], CLICKS, "its dense model reads a feature 'user', and it has item"),
        (["dense"], DENSE | {"layers": 3}, "dense.layers is '3'"),
        (["dense"], DENSE | {"layers": {"model": "HSTU", "config": []}}, r"config of dense.layers is '\[\]'"),
        (["dense"], DENSE | {"layers": {"model": "HSTU", "config": {}}}, "precision of dense is 'None'"),
    ],
)  # fmt: skip
def test_a_manifest_that_describes_no_export_is_refused_by_the_name_of_the_value(
    folder, path, value, message
):
    reseal(folder)
    assert len(Predictor.load(folder).tables["item"].ids) == 9
    if path[-1] == "file":
        (folder.parent / "x").write_bytes((folder / "item.00000.parquet").read_bytes())
    reseal(folder, set_to(value, *path))
    with pytest.raises(ValueError, match=f"manifest.json does not describe an export: {message}$"):
        Predictor.load(folder)


def test_a_shard_that_cannot_be_read_is_named(folder):
    shard = folder / "item.00001.parquet"
    for content in (b"", shard.read_bytes()[:-9], b"PAR1 and nothing of the kind"):
        shard.write_bytes(content)
        reseal(folder)
        with pytest.raises(ValueError, match=r"item\.00001\.parquet cannot be read as parquet"):
            Predictor.load(folder)
    reseal(folder, set_to("safetensors", "tables", "item", "format"))
    with pytest.raises(ValueError, match=r"item\.00000\.parquet cannot be read as safetensors"):
        Predictor.load(folder)


def test_a_shard_of_other_columns_is_named(folder):
    shard = folder / "item.00001.parquet"
    columns = {"ids": torch.arange(4), "weights": torch.ones(4, 2)}
    for name, values in (
        ("ids", torch.arange(4).int()), ("weights", torch.ones(4, 3)),
        ("weights", torch.ones(4, 2, dtype=torch.float64)),
    ):  # fmt: skip
        write_shard(shard, columns | {name: values}, "parquet")
        reseal(folder)
        with pytest.raises(ValueError, match=r"item\.00001\.parquet has columns .* the manifest describes"):
            Predictor.load(folder)
    write_shard(shard, {"ids": columns["ids"]}, "parquet")
    reseal(folder)
    with pytest.raises(ValueError, match=r"item\.00001\.parquet has columns"):
        Predictor.load(folder)
    parquet.write_table(pa.table({"ids": pa.array([None] * 4, pa.string())}), shard)
    reseal(folder)
    with pytest.raises(ValueError, match=r"item\.00001\.parquet cannot be read as parquet"):
        Predictor.load(folder)
    write_shard(shard, columns, "parquet")
    reseal(folder)
    assert Predictor.load(folder).rows("item", torch.tensor([3])).tolist() == [[1.0, 1.0]]


def test_a_safetensors_shard_of_another_length_is_named(folder):
    save_file({"ids": torch.arange(4), "weights": torch.ones(3, 2)}, folder / "item.00000.parquet")
    reseal(folder, set_to("safetensors", "tables", "item", "format"))
    with pytest.raises(ValueError, match=r"item\.00000\.parquet has columns .* the manifest describes"):
        Predictor.load(folder)


def test_a_file_name_that_no_file_can_have_is_named(folder):
    reseal(folder, set_to("\ud800", "tables", "item", "files", 0, "file"))
    with pytest.raises(ValueError, match=r"the manifest names '\\ud800', which no file can be"):
        Predictor.load(folder)


def test_a_file_named_twice_gives_no_id_twice(folder):
    def twice(body):
        table = body["tables"]["item"]
        table["files"].append(table["files"][0])
        table["rows"] += table["files"][0]["rows"]

    reseal(folder, twice)
    with pytest.raises(ValueError, match=r"it names 'item\.00000\.parquet' 2 times"):
        Predictor.load(folder)
    (folder / "copy.parquet").write_bytes((folder / "item.00000.parquet").read_bytes())
    reseal(folder, set_to("copy.parquet", "tables", "item", "files", 2, "file"))
    with pytest.raises(ValueError, match="is in the files of one table twice"):
        Predictor.load(folder)


def test_a_link_out_of_the_folder_is_refused(folder):
    shard = folder / "item.00000.parquet"
    shard.rename(folder.parent / "elsewhere")
    shard.symlink_to(folder.parent / "elsewhere")
    with pytest.raises(ValueError, match=r"item\.00000\.parquet is a link to .*elsewhere, out of the folder"):
        Predictor.load(folder)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["", "item", "none", "../x", "manifest.json", "parquet", "\0", "\ud800", "click"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["file", "sha256", "rows", "tables", "item", "table"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_manifest_of_any_content_is_read_or_refused(folder, data):
    path = folder / "manifest.json"
    original = path.read_text()
    body = json.loads(original)
    del body["manifest_sha256"]
    body["dense"] = {
        "kind": "click",
        "features": ["item"],
        "dense": 2,
        "program": {"file": "x", "sha256": "y"},
    }
    if data.draw(st.booleans()):
        body["dense"] = None
    place = data.draw(st.sampled_from([*places(body)]))
    value = data.draw(JSON)
    body = value if not place else body
    if place:
        set_to(value, *place)(body)
    try:
        path.write_text(json.dumps(add_checksum(body) if isinstance(body, dict) else body))
        Predictor.load(folder)
    except ValueError:
        pass
    finally:
        path.write_text(original)


def test_more_rows_than_there_is_memory_for_are_one_error(folder):
    def many(body):
        table = body["tables"]["item"]
        table["rows"] += 2**50
        table["files"][0]["rows"] += 2**50

    reseal(folder, many)
    with pytest.raises(ValueError, match="take more memory than there is"):
        Predictor.load(folder)
