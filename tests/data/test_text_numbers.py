"""Numbers that are read out of text in one pass are those that Arrow reads, and so are all refusals."""

from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tritonrec.data import LogFormat, load, text_tables
from tritonrec.data.click_columns import ClickColumns, _hexadecimal
from tritonrec.data.values import Part

WORDS = [
    "0", "1", "2", "7", "31", "-5", "-1", "3.5", "12.25", "-0.125", "0.1", "0.3", "100000", "1.1.1", "--1",
    "999999999999999.5", "9007199254740993", "12345678.12345678", str(2**63 - 1), str(2**63), str(-(2**63)),
    "18446744073709551617", "36893488147419103233", "12345678901234567890123", "0.100000000000000005551",
    "8a9d33d9", "00000001", "123456789", "123456789a", "007", "+7", " 7", "7 ", "7.", "0x10", "-0", "-", ".5",
    "-.5", "1e3", "-1.5e3", "8.98846567431158e307", "nan", "inf", "1_0", "x", "é", '"7"', '"', '7"', "\r",
    "7\r", "FF", "",
]  # fmt: skip
PLAIN = ["5", "6", "7", "4.5", "1", "x"]
COLUMNS = ("user", "item", "timestamp", "rating", "liked", "title")
EVENTS = LogFormat(columns=COLUMNS, header="no", time_unit="step", delimiter="tab", label=("liked",))
FORMATS = {
    "events": {},
    "no_label": {"label": ()},
    "two_roles": {"label": ("rating",), "label_threshold": 3.5},
    "threshold": {"label_threshold": 1.5},
    "hashed": {"ids": "hashed"},
    "missing": {"missing": ("7", "x"), "drop_missing": True},
    "quotes": {"delimiter": "comma", "quote": '"'},
    "long": {"delimiter": "::"},
    "minus": {"delimiter": "-"},
    "blanks": {"delimiter": "blanks"},
    "order": {"order": "liked", "label": ()},
}


def found(make):
    """The arrays of a log, or the words of its refusal."""
    try:
        log = make()
    except ValueError as error:
        return str(error)
    arrays = {name: own for name, own in vars(log).items() if isinstance(own, np.ndarray)}
    arrays |= getattr(log, "feedback", {})
    return {name: (own.dtype, own.shape, own.tobytes()) for name, own in arrays.items()}


def compare(source, path, text, format):
    """What is read in one pass has to be what Arrow alone reads."""
    path.write_bytes(text.encode())
    with patch.object(text_tables, "_numbers", lambda *_: None):
        expected = found(lambda: load(source, format))
    assert found(lambda: load(source, format)) == expected, text


@pytest.mark.parametrize("which", range(len(COLUMNS)), ids=COLUMNS)
@pytest.mark.parametrize("name", FORMATS)
def test_every_spelling_in_an_event_is_that_of_arrow(tmp_path, name, which):
    format = LogFormat(**FORMATS[name]).over(EVENTS)
    between = {"blanks": " \t"}.get(name, format.delimiter_text)
    path = tmp_path / "log.csv"
    for word in WORDS:
        row = [*PLAIN[:which], word, *PLAIN[which + 1 :]]
        rows = [["1", "2", "3", "4", "0", "t"], row, ["-3", "0", "8", "0.5", "1", ""]]
        compare(f"csv:{path}", path, "\n".join(map(between.join, rows)) + "\n", format)


@pytest.mark.parametrize("which", [0, 1, 13, 14, 39])
def test_every_spelling_in_a_click_is_that_of_arrow(tmp_path, which):
    path = tmp_path / "train.txt"
    for word in WORDS:
        row = ["1", *["3"] * 13, *["0abF"] * 26]
        row[which] = word
        rows = [["0", "-2", *["4096"] * 12, *["ffffffff"] * 26], row, ["1", *[""] * 39]]
        compare(f"criteo-tsv:{path}", path, "\n".join(map("\t".join, rows)) + "\n", LogFormat())


@given(st.data())
def test_lines_end_as_those_of_arrow(tmp_path_factory, data):
    path, ends = (
        tmp_path_factory.mktemp("log") / "log.csv",
        ["\n", "\r\n", "\n\n", "\r\n\r\n", "\r", "\n\r", " \n"],
    )
    fields = st.tuples(*[st.integers(-99, 10**9).map(str)] * 3, st.floats(0, 9).map(lambda x: f"{x:.3f}"))
    rows = data.draw(st.lists(st.tuples(fields, st.sampled_from(ends)), min_size=1))
    text = "1\t2\t3\t4\t0\tt\n"
    for (user, *row), end in rows:
        text += user + data.draw(st.sampled_from("\t\t\t_")) + "\t".join([*row, "1", "t"]) + end
    compare(f"csv:{path}", path, text.rstrip("\n") if data.draw(st.booleans()) else text, EVENTS)


def test_plain_lines_are_read_in_one_pass(tmp_path):
    rows = np.random.default_rng(1).integers(-(10**9), 10**9, (1000, 4)).tolist()
    text = "".join(",".join(map(str, row)) + "\n" for row in [["user", "item", "timestamp", "rating"], *rows])
    (tmp_path / "log.csv").write_text(text)
    with patch.object(text_tables.pcsv, "read_csv", side_effect=AssertionError("Arrow reads it")):
        log = load(tmp_path / "log.csv", LogFormat(time_unit="step", rating="rating"))
    assert np.stack([log.user, log.item, log.timestamp, log.rating], 1).tolist() == rows


@given(st.lists(st.one_of(st.none(), st.integers(0, 2**32 - 1)), min_size=1), st.data())
def test_hexadecimal_words_of_a_column_are_their_numbers(numbers, data):
    digits, first = data.draw(st.integers(1, 8)), data.draw(st.integers(0, len(numbers)))
    words = pa.array([None if each is None else f"{each:0{digits}x}" for each in numbers], pa.string())
    expected = [2**32 if each is None else each for each in numbers[first:]]
    assert _hexadecimal(Part("here", "row", 0), "C1", words.slice(first)).tolist() == expected
    wrong = pa.array(["0", data.draw(st.sampled_from(["", "g", "é", "123456789"]))])
    with pytest.raises(
        ValueError, match=r"row 1: column C1 has .*, expected one to eight hexadecimal digits"
    ):
        _hexadecimal(Part("here", "row", 0), "C1", wrong)


@pytest.mark.parametrize("kind", [pa.int64(), pa.int32(), pa.float64(), pa.string()])
@pytest.mark.parametrize("most", [4095, 4096, 4097, 123456789])  # the logarithms of the smallest are a table
def test_counts_become_their_logarithms(kind, most):
    counts = [0, 1, most, 4094, -1, -(2**31), None, *range(2, min(most, 5000), 7)]
    columns = ClickColumns("label", ("count",), (), LogFormat(categories=("c",), log_counts=True))
    table = pa.table({"count": pa.array(counts).cast(kind), "label": [0] * len(counts)})
    order = np.random.default_rng(0).permutation(len(counts))
    expected = np.log1p(np.maximum(np.array([each or 0 for each in counts], float), 0)).astype(np.float32)
    found = columns.arrays(Part("here", "row", 0), table, order)[1]
    assert found.tobytes() == expected[order].tobytes()
