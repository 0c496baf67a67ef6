"""Promise: rows by id are those of the id, of any table beside any other, on any threads."""

import dataclasses
import pickle

import pytest
import torch

from tritonrec import ops
from tritonrec.kernels import workers
from tritonrec.serving import ExportedTable
from tritonrec.serving.exported_table import encoded, rows_side_by_side
from tritonrec.serving.numba_tables import place_of

DIM, LEAST, MOST = 6, -(2**63), 2**63 - 1
IDS = {
    "dense": list(range(3, 40)),
    "gap": [0, 1, 2, 3, 9, 10, 11],
    "gaps": [-50, -49, -7, 0, 2, 3, 90, 91, 1000],
    "even": list(range(-20, 60, 2)),
    "extremes": [LEAST, LEAST + 1, -1, 0, 5, MOST - 3, MOST],
    "one": [17],
    "empty": [],
}


def table_of(name, seed=0, unknown="initial"):
    ids = torch.tensor(IDS[name], dtype=torch.int64)
    weights = torch.randn(len(ids), DIM, generator=torch.Generator().manual_seed(seed))
    return ExportedTable(ids, weights, 5, 6 + seed, 0.5, unknown)


def want(table, ids):
    """Row by row, by a dict."""
    places = {int(each): at for at, each in enumerate(table.ids)}
    rows = []
    for each in ids.tolist():
        if each in places:
            rows.append(table.whole[places[each]])
        elif table.unknown == "zeros":
            rows.append(torch.zeros(DIM))
        else:
            rows.append(ops.initial_rows(5, table.table_id, torch.tensor([each]), DIM, 0.5)[0])
    return torch.stack(rows) if rows else torch.empty(0, DIM)


def asked(name, known_alone=False):
    own = IDS[name]
    near = [each + off for each in own for off in (-2, -1, 1, 2) if LEAST <= each + off <= MOST]
    some = own if known_alone else [*own, *near, 0, LEAST, MOST, -1, 12345]
    order = torch.randperm(3 * len(some), generator=torch.Generator().manual_seed(len(some)))
    return torch.tensor(some * 3, dtype=torch.int64)[order]


@pytest.mark.parametrize("unknown", ["initial", "zeros"])
@pytest.mark.parametrize("name", IDS)
def test_rows_of_known_and_unknown_ids(name, unknown):
    table = table_of(name, unknown=unknown)
    for ids in (asked(name), asked(name, known_alone=True), asked(name)[:0]):
        got = table.rows(ids)
        assert got.shape == (len(ids), DIM) and torch.equal(got, want(table, ids))


@pytest.mark.parametrize("name", IDS)
def test_places_are_found_without_a_second_search(name):
    ids, places = table_of(name).ids.numpy(), {each: at for at, each in enumerate(IDS[name])}
    assert all(place_of(ids, each) == places.get(each, -1) for each in asked(name).numpy())


@pytest.mark.parametrize("threads", [1, 3])
def test_tables_of_all_forms_beside_each_other(monkeypatch, threads):
    monkeypatch.setattr(workers, "THREAD_COST", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    tables = [table_of(name, seed, "zeros" if seed % 2 else "initial") for seed, name in enumerate(IDS)]
    short = dataclasses.replace(tables[1], **encoded(tables[1].weights))
    wide = torch.randn(len(tables[2].ids), 2 * DIM)[:, ::2]
    tables += [short, dataclasses.replace(tables[2], weights=wide)]
    count, names = 101, [*IDS, "gap", "gaps"]
    ids = [asked(name).repeat(20)[: 2 * count : 2] for name in names]
    got = rows_side_by_side(tables, ids)
    assert got.shape == (count, len(tables), DIM)
    for at, (table, own) in enumerate(zip(tables, ids, strict=True)):
        assert torch.equal(got[:, at], want(table, own)), at


def test_a_table_that_went_through_pickle_has_its_own_memory():
    table, ids = table_of("gaps"), asked("gaps")
    expected = table.rows(ids)
    again = pickle.loads(pickle.dumps(table))
    table.weights.zero_()
    assert torch.equal(again.rows(ids), expected)


@pytest.mark.parametrize(
    "wrong",
    [torch.tensor([1, 2], dtype=torch.int32), torch.tensor([[1, 2]]), torch.tensor([1, 2, 3]),
     torch.empty(2, dtype=torch.int64, device="meta")],
)  # fmt: skip
def test_ids_that_are_no_memory_of_int64_are_refused(wrong):
    table = table_of("dense")
    with pytest.raises(ValueError, match=r"\(2,\) int64 on the CPU"):
        rows_side_by_side([table, table], [torch.tensor([4, 5]), wrong])
    other = dataclasses.replace(table, weights=table.weights[:, :3].contiguous())
    with pytest.raises(ValueError, match="with 6 columns"):
        rows_side_by_side([table, other], [torch.tensor([4, 5])] * 2)
