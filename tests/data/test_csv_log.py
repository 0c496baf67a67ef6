"""A log written by anyone is read as it was meant, or refused with file, line and column."""

from __future__ import annotations

import csv

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tritonrec.data import csv_log

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def read(tmp_path, content: str | bytes):
    path = tmp_path / "log.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return csv_log.read(path)


def columns(interactions) -> list[list]:
    rating = interactions.rating
    named = [interactions.user.tolist(), interactions.item.tolist(), interactions.timestamp.tolist()]
    return named if rating is None else [*named, rating.tolist()]


GOOD = {
    "positional": ("1,2,3\n4,5,6\n", [[1, 4], [2, 5], [3, 6]]),
    "positional_rating": ("1,2,3,4.5\n4,5,6,1\n", [[1, 4], [2, 5], [3, 6], [4.5, 1.0]]),
    "tabs": ("1\t2\t3\n4\t5\t6\n", [[1, 4], [2, 5], [3, 6]]),
    "semicolons": ("1;2;3;0.5\n", [[1], [2], [3], [0.5]]),
    "header": ("timestamp,Item,USER\n3,2,1\n6,5,4\n", [[1, 4], [2, 5], [3, 6]]),
    "recbole": (
        "user_id:token\titem_id:token\trating:float\ttime:float\n1\t2\t5\t3\n",
        [[1], [2], [3], [5.0]],
    ),
    "other_columns": ("userId,genre,movieId,timestamp\n1,a,2,3\n", [[1], [2], [3]]),
    "byte_order_mark": ("\ufeffuser,item,time\n1,2,3\n", [[1], [2], [3]]),
    "windows_lines": ("user,item,ts\r\n1,2,3\r\n", [[1], [2], [3]]),
    "no_last_newline": ("1,2,3\n4,5,6", [[1, 4], [2, 5], [3, 6]]),
    "blank_lines": ("\n1,2,3\n\n4,5,6\n , , \n", [[1, 4], [2, 5], [3, 6]]),
    "extremes": (
        f"{INT64_MIN},{INT64_MAX},{INT64_MIN}\n-1,0,-5\n",
        [[INT64_MIN, -1], [INT64_MAX, 0], [INT64_MIN, -5]],
    ),
    "spaces": (" 1 , 2 , 3 \n", [[1], [2], [3]]),
    "strings": ("user,item,time\nann,x,1\nbob,y,2\nann,y,3\n", [[0, 1, 0], [0, 1, 1], [1, 2, 3]]),
    "quoted": ('user,item,time\n"a,b","c ""d""",1\n', [[0], [0], [1]]),
    "zeros_lead": ("user,item,time\n7,1,1\n07,1,2\n7,1,3\n", [[0, 1, 0], [1, 1, 1], [1, 2, 3]]),
    "beyond_int64": (f"user,item,time\n{2**63},1,1\n5,1,2\n", [[0, 1], [1, 1], [1, 2]]),
    "underscores": ("user,item,time\n1_0,1,1\n10,1,2\n", [[0, 1], [1, 1], [1, 2]]),
}


@pytest.mark.parametrize("case", GOOD)
def test_every_format_is_read(tmp_path, case):
    content, expected = GOOD[case]
    interactions = read(tmp_path, content)
    assert columns(interactions) == expected
    assert interactions.user.dtype == interactions.item.dtype == interactions.timestamp.dtype == np.int64


def test_decimal_timestamps_order_the_rows_and_are_rounded_down(tmp_path):
    interactions = read(
        tmp_path, "user,item,time\n1,10,5.75\n1,11,5.25\n1,12,-0.5\n1,13,5\n1,14,5.25\n1,15,1e3\n"
    )
    assert interactions.item.tolist() == [12, 13, 11, 14, 10, 15]
    assert interactions.timestamp.tolist() == [-1, 5, 5, 5, 5, 1000]


BAD = {
    "short_row": ("1,2,3\n4,5\n", r"log.csv, line 2: 2 columns, but the first line has 3"),
    "long_row": ("user,item,time\n1,2,3\n4,5,6,7\n", r"line 3: 4 columns, but the first line has 3"),
    "no_time": ("1,2,3\n\n4,5,noon\n", r"line 3: column timestamp: 'noon' is not a number"),
    "empty_time": ("user,item,time\n1,2,\n", r"line 2: column timestamp: '' is not a number"),
    "nan_time": ("1,2,3\n1,2,nan\n", r"line 2: column timestamp: 'nan' is not a number"),
    "infinite_time": ("1,2,3\n1,2,inf\n", r"line 2: column timestamp: 'inf' is not a number"),
    "long_time": (
        f"1,2,{2**63}\n",
        r"line 1: column timestamp: 9223372036854775808 does not fit into 64 bits",
    ),
    "long_decimal": ("1,2,1e30\n", r"line 1: column timestamp: 1e30 does not fit into 64 bits"),
    "no_user": ("1,2,3\n ,5,6\n", r"line 2: column user: the id is empty"),
    "no_item": ("1,2,3\n4,,6\n", r"line 2: column item: the id is empty"),
    "bad_rating": ("1,2,3,4\n4,5,6,good\n", r"line 2: column rating: 'good' is not a finite number"),
    "nan_rating": ("1,2,3,4\n4,5,6,nan\n", r"line 2: column rating: 'nan' is not a finite number"),
    "header_lacks": (
        "user,rating\n1,2\n",
        r"line 1: the header has no column item and no column timestamp: .*user",
    ),
    "header_twice": ("user,item,time,user_id\n", r"line 1: two columns for user: 'user' and 'user_id'"),
    "too_wide": ("1,2,3,4,5\n", r"line 1: 5 columns and no header"),
    "one_column": ("1 2 3\n", r"line 1: no comma, tab or semicolon .*'1 2 3'"),
    "empty": ("", r"log.csv: the file is empty"),
    "blank": ("\n\n", r"log.csv: the file is empty"),
    "header_only": ("user,item,time\n", r"log.csv: holds no interactions"),
    "not_text": (b"user,item,time\n\xff\xfe,1,2\n", r"log.csv: not UTF-8 text"),
    "open_quote": ('user,item,time\n1,2,3\n"1,2,3\n', r"log.csv, after line 2"),
}


@pytest.mark.parametrize("case", BAD)
def test_refuses_naming_line_and_column(tmp_path, case):
    content, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        read(tmp_path, content)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.csv"):
        csv_log.read(tmp_path / "absent.csv")


int64 = st.integers(INT64_MIN, INT64_MAX)


@given(
    rows=st.lists(st.tuples(int64, int64, int64, st.floats(-1e9, 1e9)), min_size=1, max_size=8),
    order=st.permutations(["user", "item", "timestamp", "rating"]),
    delimiter=st.sampled_from(",;\t"),
    header=st.booleans(),
)
def test_what_was_written_is_read_back(tmp_path_factory, rows, order, delimiter, header):
    path = tmp_path_factory.getbasetemp() / "written.csv"
    names = order if header else ["user", "item", "timestamp", "rating"]
    place = {"user": 0, "item": 1, "timestamp": 2, "rating": 3}
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        if header:
            writer.writerow(names)
        writer.writerows([[row[place[name]] for name in names] for row in rows])
    assert columns(csv_log.read(path)) == [list(column) for column in zip(*rows, strict=True)]
