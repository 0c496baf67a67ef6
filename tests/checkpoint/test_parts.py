"""Promise: a checkpoint read in parts has its rows, in an order that depends on the keys alone."""

import pytest
import torch
from simulated import EXTREMES, random_table, save_on

from tritonrec.checkpoint import CheckpointError, CheckpointStream, slice_of


def table(rows=400):
    draw = torch.Generator().manual_seed(3)
    keys = torch.cat([torch.tensor(EXTREMES), torch.arange(rows) * 7919 + 5])
    return {"keys": keys, "rows": torch.randn(len(keys), 3, generator=draw)}


def read(folder, count=None):
    parts = list(CheckpointStream(folder).rows("items", count))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}, len(parts)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [1, 4, 256])
def test_rows_come_by_slice_and_key_whatever_world_size_saved_them(tmp_path, world_size, count):
    whole = table()
    save_on(world_size, tmp_path, 4, {"items": whole})
    found, parts = read(tmp_path, count)
    assert parts == count
    order = sorted(
        range(len(found["keys"])), key=lambda i: (int(slice_of(found["keys"])[i]), int(found["keys"][i]))
    )
    assert order == list(range(len(order)))
    by_key = found["keys"].argsort()
    assert torch.equal(found["keys"][by_key], whole["keys"].sort().values)
    assert torch.equal(found["rows"][by_key], whole["rows"][whole["keys"].argsort()])


def test_increments_of_other_world_sizes_are_taken_in(tmp_path):
    whole = table()
    old = {"keys": whole["keys"][:300], "rows": whole["rows"][:300] * 2}
    gone = torch.tensor([12345678901])
    old = {"keys": torch.cat([old["keys"], gone]), "rows": torch.cat([old["rows"], torch.ones(1, 3)])}
    base = save_on(3, tmp_path, 4, {"items": old})[0]
    save_on(2, tmp_path, 5, {"items": whole}, base=base, erased={"items": gone})
    save_on(1, tmp_path / "whole", 5, {"items": whole})
    found, want = (read(folder)[0] for folder in (tmp_path, tmp_path / "whole"))
    assert torch.equal(found["keys"], want["keys"]) and torch.equal(found["rows"], want["rows"])


def test_an_altered_file_is_named(tmp_path):
    save_on(1, tmp_path, 4, {"items": table()})
    (path,) = tmp_path.glob("step-*/items*")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{path.name} was altered"):
        read(tmp_path)


def test_a_stream_gives_dense_tensors_and_a_small_table_at_once(tmp_path):
    weight = torch.arange(4.0)
    save_on(2, tmp_path, 1, {"t": random_table(5, 300)}, dense={"w": weight})
    stream = CheckpointStream(tmp_path)
    assert stream.dense().keys() == {"w"} and torch.equal(stream.dense()["w"], weight)
    assert stream.slices_of("t") == 1 and len(list(stream.rows("t"))) == 1
