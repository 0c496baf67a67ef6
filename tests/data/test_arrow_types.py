"""A column of a log means the same whatever Arrow type it has, or is refused with its row."""

# ruff: noqa: E501 - a case is a line
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_event_log import arrays, columns

from tritonrec.data import LogFormat, load

SPELLINGS = {
    "integers": arrays(user=pa.array([1, 2, 1], pa.int8()), item=pa.array([10, 11, 12], pa.uint64())),
    "decimals": arrays(user=pa.array([1, 2, 1], pa.decimal128(9, 0)), item=pa.array([10, 11, 12]).cast(pa.decimal256(30, 2))),
    "text": arrays(user=["1", "2", "1"], item=pa.array(["10", "11", "12"], pa.large_string())),
    "views": arrays(user=pa.array(["1", "2", "1"], pa.string_view()), item=pa.array([b"10", b"11", b"12"], pa.large_binary())),
    "dictionaries": arrays(
        user=pa.array(["1", "2", "1"]).dictionary_encode(), item=pa.array([10, 11, 12]).dictionary_encode()
    ),
    "runs": arrays(user=pa.RunEndEncodedArray.from_arrays([1, 2, 3], [1, 2, 1]), item=[10, 11, 12]),
    "seconds": arrays(timestamp=pa.array([1396867869, 5, 1396867870], pa.timestamp("s"))),
    "nanoseconds": arrays(
        timestamp=pa.array([1396867869 * 10**9, 5 * 10**9, 1396867870 * 10**9], pa.timestamp("ns", "Asia/Tokyo"))
    ),
    "floats": arrays(timestamp=[1396867869.0, 5.0, 1396867870.0]),
    "time_text": arrays(timestamp=["2014-04-07T10:51:09Z", "1970-01-01 00:00:05Z", "2014-04-07 12:51:10+0200"]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "how"),
    [
        (case, how)
        for case in SPELLINGS
        for how in ("memory", "parquet", "arrow", "reader")
        if (case, how) != ("runs", "parquet")  # which has no runs
    ],
)
def test_all_spellings_of_a_type_are_one(tmp_path, case, how):
    table = source = pa.table(SPELLINGS[case])
    if how == "parquet":
        pq.write_table(table, source := tmp_path / "log.parquet", row_group_size=2)
    elif how == "arrow":
        with pa.ipc.new_file(source := tmp_path / "log.arrow", table.schema) as writer:
            writer.write_table(table)
    elif how == "reader":
        source = table.to_reader(max_chunksize=2)
    assert columns(load(source)) == columns(load(pa.table(arrays())))


@pytest.mark.parametrize("case", SPELLINGS)
def test_rows_of_any_spelling_are_repeated_and_left_out(case):
    """Arrow itself takes no rows of views."""
    table = pa.table(SPELLINGS[case]).append_column(
        "shown", pa.array(["7-1 8-0", None, "9-1"], pa.string_view())
    )
    log = load(table.drop_columns("item"), LogFormat(shown="shown"))
    assert log.user.tolist() == [1, 1, 1] and log.item.tolist() == [7, 8, 9]
    assert log.timestamp.tolist() == [1396867869, 1396867869, 1396867870]
    users = pa.array(["1", None, "1"], pa.string_view())
    log = load(table.set_column(0, "user", users), LogFormat(drop_missing=True))
    assert log.item.tolist() == [10, 12] and log.timestamp.tolist() == [1396867869, 1396867870]


def test_dates_are_seconds_of_their_days():
    log = load(pa.table(arrays(timestamp=pa.array([16167, 3, 16168], pa.date32()))))
    assert log.timestamp.tolist() == [16167 * 86400, 3 * 86400, 16168 * 86400] and log.time_unit == "s"
    log = load(
        pa.table(arrays(timestamp=pa.array([16167, 3, 16168], pa.date32()))), LogFormat(time_unit="ms")
    )
    assert log.timestamp.tolist() == [16167 * 86400000, 3 * 86400000, 16168 * 86400000]


BAD_COLUMNS = {
    "null": (dict(user=[1, None, 2]), "row 1: column user has an empty field, expected an int64"),
    "nan": (dict(user=[500.0, float("nan"), 502.0]), "row 1: column user has nan, expected an integer"),
    "float": (dict(user=[500.0, 501.5, 502.0]), "row 1: column user has 501.5, expected an integer"),
    "floats": (dict(user=[500.0, 501.0, 502.0]), "column 'user' is of type double, .*whole_floats"),
    "unsigned": (dict(item=pa.array([1, 2**63, 2], pa.uint64())), f"row 1: column item has {2**63}, expected an int64"),
    "decimal": (dict(item=pa.array([1, 2, 3]).cast(pa.decimal128(21, 1))), None),
    "list": (dict(item=[[1], [2], [3]]), "column 'item' (is of type .*list.*, expected integers|holds lists)"),
    "boolean": (dict(item=[True, False, True]), "column 'item' is of type bool, expected integers"),
    "word": (dict(item=["1", "B008X", "2"]), "row 1: column item has 'B008X', .*ids=words"),
    "time_null": (dict(timestamp=pa.array([1, None, 2], pa.timestamp("s"))), "row 1: column timestamp has an empty"),
    "time_nan": (dict(timestamp=[1.0, float("inf"), 2.0]), "row 1: column timestamp has inf"),
    "time_of_32_bits": (
        dict(timestamp=pa.array(np.array([7, 1.5e9, 1.5e9 + 1], np.float32))),
        r"row 1: column timestamp has 1500000000.0, expected a time of less than 2\*\*24",
    ),
    "time_of_32_bits_below": (
        dict(timestamp=pa.array(np.array([7, 8, -1.5e9], np.float32))),
        r"row 2: column timestamp has -1500000000.0, expected a time of less than 2\*\*24",
    ),
    "bytes": (dict(user=[b"1", b"2", b"\xff"]), "row 2: column user has b'.xff', expected UTF-8 text"),
    "time_kind": (dict(timestamp=[True, False, True]), "column 'timestamp' is of type bool, expected times"),
}  # fmt: skip


@pytest.mark.parametrize("how", ["memory", "parquet"])
@pytest.mark.parametrize("case", BAD_COLUMNS)
def test_a_value_that_is_none_is_named_by_its_row(tmp_path, case, how):
    changes, message = BAD_COLUMNS[case]
    source = pa.table(arrays(**changes))
    if how == "parquet":
        pq.write_table(source, source := tmp_path / "log.parquet")
    if message is None:
        assert load(source).item.tolist() == [1, 2, 3]
        return
    with pytest.raises(ValueError, match=message):
        load(source)


@pytest.mark.parametrize(("kind", "bits"), [("float16", 11), ("float32", 24), ("float64", 53)])
def test_a_float_that_several_integers_share_is_no_id(kind, bits):
    users = [np.array([last, 1, 2], kind) for last in (2**bits - 1, 2**bits)]
    assert load(pa.table(arrays(user=users[0])), LogFormat(whole_floats=True)).user[0] == 2**bits - 1
    with pytest.raises(ValueError, match=rf"an integer of less than 2\*\*{bits}"):
        load(pa.table(arrays(user=users[1])), LogFormat(whole_floats=True))


@pytest.mark.parametrize("end", ["parquet", "arrow"])
def test_a_type_of_the_writer_is_no_number(tmp_path, end):
    """Days of a period are no seconds, whether pandas, which knows the type, is imported or not."""
    storage = pa.table(arrays())
    about = {b"ARROW:extension:name": b"pandas.period", b"ARROW:extension:metadata": b'{"freq": "D"}'}
    place = storage.schema.get_field_index("timestamp")
    schema = storage.schema.set(place, storage.schema.field(place).with_metadata(about))
    path = tmp_path / f"log.{end}"
    if end == "parquet":
        pq.write_table(storage.cast(schema), path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
            writer.write_table(storage.cast(schema))
    with pytest.raises(ValueError, match=r"column 'timestamp' is of the type pandas.period of its writer"):
        load(path)
