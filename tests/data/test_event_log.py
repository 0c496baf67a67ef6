"""A log written by anyone is read as its format says, or refused with file, line and column; nothing is guessed."""

# ruff: noqa: E501 - a case is a line
from __future__ import annotations

import csv
import json
import time
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonrec.data import LogFormat, load
from tritonrec.data.grouped import sequences_of
from tritonrec.data.log_format import described, with_query
from tritonrec.data.parquet import concat, table_of
from tritonrec.data.sources import source_of
from tritonrec.data.values import common_type
from tritonrec.data.vocabulary import Vocabulary

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
THREE = LogFormat(columns=("user", "item", "timestamp"))
FOUR = LogFormat(columns=("user", "item", "timestamp", "rating"))
STEP = LogFormat(time_unit="step")


def read(tmp_path, content: str | bytes, format: LogFormat | None = None):
    path = tmp_path / "log.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return load(path, format)


def columns(interactions) -> list[list]:
    rating = interactions.rating
    named = [interactions.user.tolist(), interactions.item.tolist(), interactions.timestamp.tolist()]
    return named if rating is None else [*named, rating.tolist()]


GOOD = {
    "positional": ("1,2,3\n4,5,6\n", THREE, [[1, 4], [2, 5], [3, 6]]),
    "positional_rating": ("1,2,3,4.5\n4,5,6,1\n", FOUR, [[1, 4], [2, 5], [3, 6], [4.5, 1.0]]),
    "other_order": (
        "4.5|1|2|3\n", LogFormat(columns=("rating", "user", "item", "timestamp"), delimiter="pipe"),
        [[1], [2], [3], [4.5]],
    ),
    "tabs": ("1\t2\t3\n4\t5\t6\n", THREE, [[1, 4], [2, 5], [3, 6]]),
    "semicolons": ("1;2;3;0.5\n", FOUR, [[1], [2], [3], [0.5]]),
    "colons": ("1::2::3::0.5\n4::5::6::1\n", replace(FOUR, delimiter="::"), [[1, 4], [2, 5], [3, 6], [0.5, 1.0]]),
    "blanks": ("1  2 \t3\n 4 5 6 \n", replace(THREE, delimiter="blanks"), [[1, 4], [2, 5], [3, 6]]),
    "header": ("timestamp,Item,USER\n3,2,1\n6,5,4\n", None, [[1, 4], [2, 5], [3, 6]]),
    "named": ("a,b,c,d\n1,2,3,4\n", LogFormat(user="d", item="B", timestamp="a"), [[4], [2], [1]]),
    "rating_as_label": (
        "user,item,time,rating\n1,2,3,0\n4,5,6,1\n", LogFormat(label=("rating",)), [[1, 4], [2, 5], [3, 6]],
    ),
    "header_and_columns": ("user,item,timestamp\n1,2,3\n", THREE, [[1], [2], [3]]),
    "other_header": ("a,b,c\n1,2,3\n", replace(THREE, header="yes"), [[1], [2], [3]]),
    "recbole": (
        "user_id:token\titem_id:token\trating:float\ttime:float\n1\t2\t5\t3\n", None, [[1], [2], [3], [5.0]],
    ),
    "other_columns": ("userId,genre,movieId,timestamp\n1,a,2,3\n", None, [[1], [2], [3]]),
    "byte_order_mark": ("\ufeffuser,item,time\n1,2,3\n", None, [[1], [2], [3]]),
    "windows_lines": ("user,item,ts\r\n1,2,3\r\n", None, [[1], [2], [3]]),
    "no_last_newline": ("1,2,3\n4,5,6", THREE, [[1, 4], [2, 5], [3, 6]]),
    "blank_lines": ("\nuser,item,time\n\n1,2,3\n\n4,5,6\n\n", None, [[1, 4], [2, 5], [3, 6]]),
    "extremes": (
        f"{INT64_MIN},{INT64_MAX},{INT64_MIN}\n-1,0,-5\n", replace(THREE, time_unit="step"),
        [[INT64_MIN, -1], [INT64_MAX, 0], [INT64_MIN, -5]],
    ),
    "spaces": (" 1 , 2 , 3 \n", THREE, [[1], [2], [3]]),
    "quoted": ('user,item,time\n"1","2",1\n', None, [[1], [2], [1]]),
    "quoted_title": ('user,item,time,title\n1,2,3,"a, ""b"""\n', None, [[1], [2], [3]]),
    "lines_in_quotes": (
        'user,title,item,time\n1,"a\nb\n\nc",2,3\n4,d,5,6\n', LogFormat(multiline=True), [[1, 4], [2, 5], [3, 6]],
    ),
    "bare_quotes": (
        'user\titem\ttime\ttitle\n1\t2\t3\t"Weird\n4\t5\t6\t12" vinyl\n7\t8\t9\tx\n', None,
        [[1, 4, 7], [2, 5, 8], [3, 6, 9]],
    ),
    "other_encoding": ("user,item,time,title\n1,2,3,caf\xe9\n".encode("latin-1"), None, [[1], [2], [3]]),
    "encoded": (
        "us\xe9r;item;time\n1;2;3\n".encode("latin-1"), LogFormat(user="us\xe9r", encoding="latin-1"), [[1], [2], [3]],
    ),
    "missing_rows": (
        "user,item,time\n1,2,3\n4,,6\n7,8,NA\n9,10,11\n", LogFormat(drop_missing=True, missing=("NA",)),
        [[1, 9], [2, 10], [3, 11]],
    ),
    "no_times": ("user,item,rating\n5,2,1\n4,3,2\n", LogFormat(timestamp="none"), [[5, 4], [2, 3], [0, 1], [1, 2]]),
    "no_ratings": ("user,item,time,rating\n5,2,1,x\n", LogFormat(rating="none"), [[5], [2], [1]]),
    "exponents": (
        "user_id:token\titem_id:token\ttimestamp:float\n1\t2\t8.81250949e8\n", None, [[1], [2], [881250949]],
    ),
    "iso": (
        "user,item,time\n1,2,2014-04-07T10:51:09Z\n1,3,2014-04-07 12:51:09+02:00\n"
        "1,5,2014-04-07 10:51:09 UTC\n", None,
        [[1] * 3, [2, 3, 5], [1396867869] * 3],
    ),
    "iso_of_no_zone": (
        "user,item,time\n1,2,2014-04-07T10:51:09\n1,4,2014-04-07\n", None, [[1, 1], [2, 4], [1396867869, 1396828800]],
    ),
    "iso_as_postgres_writes_it": ("user,item,time\n1,2,2014-04-07 10:51:09+00\n", None, [[1], [2], [1396867869]]),
    "iso_weeks": ("user,item,time\n1,2,2023-W33-4\n", LogFormat(time_format="%G-W%V-%u"), [[1], [2], [1692230400]]),
    "iso_milliseconds": (
        "user,item,time\n1,2,2014-04-07T10:51:09.277Z\n", LogFormat(time_unit="ms"), [[1], [2], [1396867869277]],
    ),
    "dates": (
        "user,item,time\n1,2,07.04.2014\n", LogFormat(time_format="%d.%m.%Y"), [[1], [2], [1396828800]],
    ),
    "zoned": (
        "user,item,time\n1,2,Mon Oct 16 13:33:25 -0700 2017\n", LogFormat(time_format="%a %b %d %H:%M:%S %z %Y"),
        [[1], [2], [1508186005]],
    ),
    "microseconds": (
        "user,item,time\n1,2,2014-04-07 10:51:09.277001\n",
        LogFormat(time_format="%Y-%m-%d %H:%M:%S.%f", time_unit="us"), [[1], [2], [1396867869277001]],
    ),
    "nanoseconds": (
        "user,item,time\n1,2,2024-05-01 08:30:00.123456789\n", LogFormat(time_unit="ns"),
        [[1], [2], [1714552200123456789]],
    ),
    "short_dates": ("user,item,time\n1,2,20240501\n", LogFormat(time_format="%Y%m%d"), [[1], [2], [1714521600]]),
    "zone_by_name": (
        "user,item,time\n1,2,3 Mar 2014 10:00:00 GMT\n", LogFormat(time_format="%d %b %Y %H:%M:%S %Z"),
        [[1], [2], [1393840800]],
    ),
    "marked": ("\ufeffuser,item,time\n1,2,3\n", LogFormat(encoding="utf-8-sig"), [[1], [2], [3]]),
    "whole_floats": ("user,item,time\n500.0, 7.,3\n-1,8,4\n", LogFormat(whole_floats=True), [[500, -1], [7, 8], [3, 4]]),
}  # fmt: skip


@pytest.mark.parametrize("case", GOOD)
def test_every_format_is_read(tmp_path, case):
    content, format, expected = GOOD[case]
    interactions = read(tmp_path, content, format)
    assert columns(interactions) == expected
    assert interactions.user.dtype == interactions.item.dtype == interactions.timestamp.dtype == np.int64


def test_decimal_timestamps_order_the_rows_and_are_rounded_down(tmp_path):
    interactions = read(
        tmp_path, "user,item,time\n1,10,5.75\n1,11,5.25\n1,12,-0.5\n1,13,5\n1,14,5.25\n1,15,1e3\n", STEP
    )
    assert interactions.sequences.items.tolist() == [12, 13, 11, 14, 10, 15]
    assert interactions.sequences.timestamps.tolist() == [-1, 5, 5, 5, 5, 1000]
    whole = read(tmp_path, f"user,item,time\n1,1,{2**62 + 1}\n1,2,0.5\n", STEP)
    assert whole.timestamp.tolist() == [2**62 + 1, 0]


def test_one_column_orders_what_another_cannot(tmp_path):
    log = read(
        tmp_path, "user;item;day;frame\n1;5;2016-05-09;900\n1;6;2016-05-09;20\n1;7;2016-05-08;5000\n",
        LogFormat(timestamp="day", order="frame"),
    )  # fmt: skip
    assert log.sequences.items.tolist() == [7, 6, 5]


BAD = {
    "short_row": ("1,2,3\n4,5\n", THREE, r"log.csv, line 2: 2 columns, but 3 are expected: '4,5'"),
    "long_row": ("user,item,time\n\n1,2,3\n4,5,6,7\n", None, r"line 4: 4 columns, but 3 are expected"),
    "no_time": ("1,2,3\n\n4,5,noon\n", THREE, r"line 3: column timestamp has 'noon', expected a number"),
    "empty_time": ("user,item,time\n1,2,\n", None, r"line 2: column time has an empty field"),
    "nan_time": ("1,2,3\n1,2,nan\n", THREE, r"line 2: column timestamp has 'nan'"),
    "infinite_time": ("1,2,3\n1,2,inf\n", THREE, r"line 2: column timestamp has 'inf'"),
    "long_time": (f"1,2,{2**63}\n", THREE, r"line 1: column timestamp has '9223372036854775808'"),
    "long_decimal": ("1,2,1e30\n", THREE, r"line 1: column timestamp has '1e30'"),
    "wrong_format": (
        "user,item,time\n1,2,2014-04-07\n1,2,x\n", LogFormat(time_format="%Y-%m-%d"),
        r"line 3: column time has 'x', expected a time of the format %Y-%m-%d",
    ),
    "other_dates": ("user,item,time\n1,2,11/13/2019 9:05\n", None, r"line 2: column time .*time_format="),
    "no_user": ("1,2,3\n ,5,6\n", THREE, r"line 2: column user has an empty field, expected an int64"),
    "no_item": ("1,2,3\n4,,6\n", THREE, r"line 2: column item has an empty field"),
    "odd_id": ("user,item,time\n500,1,1\nNaN,1,2\n502,1,3\n", None, r"line 3: column user has 'NaN', expected an int64"),
    "float_id": ("user,item,time\n500,1,1\n500.0,1,2\n", None, r"line 3: column user has '500.0'"),
    "unsigned_id": (f"user,item,time\n{2**63},1,1\n", None, r"line 2: column user has '9223372036854775808'"),
    "zeros_lead": ("user,item,time\n7,1,1\n07,1,2\n", None, r"line 3: column user has '07'"),
    "minus_zeros": ("user,item,time\n-7,1,1\n-07,1,2\n", None, r"line 3: column user has '-07'"),
    "minus_zero": ("user,item,time\n0,1,1\n-0,1,2\n", None, r"line 3: column user has '-0'"),
    "hexadecimal": ("user,item,time\n7,1,1\n0x7,1,2\n", None, r"line 3: column user has '0x7'"),
    "underscores": ("user,item,time\n1_0,1,1\n", None, r"line 2: column user has '1_0'"),
    "words": ("user,item,time\nann,1,1\n", None, r"line 2: column user has 'ann', .*ids=words or ids=hashed"),
    "bad_rating": ("1,2,3,4\n4,5,6,good\n", FOUR, r"line 2: column rating has 'good', expected a finite number"),
    "nan_rating": ("1,2,3,4\n4,5,6,nan\n", FOUR, r"line 2: column rating has 'nan', expected a finite number"),
    "bad_label": (
        "user,item,time,like\n1,2,3,0\n1,2,3,2\n", LogFormat(label=("like",)),
        r"line 3: column like has '2', expected 0 or 1; other numbers take label_threshold=",
    ),
    "header_lacks": ("user,rating\n1,2\n", None, r"log.csv: no column that is the item; found user, rating"),
    "no_time_column": ("user,item\n1,2\n", None, r"the timestamp; found user, item: name it \(timestamp=, or none"),
    "header_twice": ("user,item,time,user_id\n1,2,3,4\n", None, r"two columns for user: 'user' and 'user_id'"),
    "two_times": ("user,item,time,timestamp\n1,2,3,4\n", None, r"two columns for timestamp"),
    "two_of_a_name": ("User,user,item,time\n1,2,3,4\n", LogFormat(user="USER"), r"'USER' could be 'User' or 'user'"),
    "no_such_column": ("user,item,time\n1,2,3\n", LogFormat(user="who"), r"no column 'who'; found user, item, time"),
    "headerless": (
        "196\t242\t3\t881250949\n", None,
        r"log.csv, line 1: the first line is no header .*'196\\t242\\t3\\t881250949'.*columns=",
    ),
    "headerless_words": ("a,b,c\n1,2,3\n", None, r"line 1: the first line is no header .*'a,b,c'"),
    "too_wide": ("1,2,3,4,5\n", THREE, r"line 1: 5 columns, but 3 are named"),
    "one_column": ("1 2 3\n", THREE, r"line 1: no comma, tab or semicolon .*'1 2 3'"),
    "empty": ("", None, r"log.csv: the file is empty"),
    "blank": ("\n\n", None, r"log.csv: the file is empty"),
    "header_only": ("user,item,time\n", None, r"log.csv: holds no interactions"),
    "not_text": (b"user,item,time\n1,1,1\n\xff\xfe,1,2\n", None, r"log.csv, line 3: not UTF-8 text"),
    "open_quote": ('user,item,time\n1,2,3\n"1,2,3\n', None, r"log.csv, line 3: "),
    "lines_in_quotes": (
        'user,item,time,t\n1,2,3,"a\nb"\n4,5,6,d\n', None, r"line 2: a field in quotes goes on in the next line",
    ),
    "open_quote_in_many": (
        'user,item,time,t\n1,2,3,"a\n' + "4,5,6,b\n" * 99, None, r"line 2: a field in quotes goes on",
    ),
    "lone_return": (
        "user,item,time\r\n1,2,3\r\n4,5,6\r7,8,9\r\n", None, r"line 3: \\r within a line: end lines with",
    ),
    "swapped": (
        "user,item,timestamp,rating\n" + "".join(f"{u},5,{u % 5 + 1},{881250949 + u}\n" for u in range(20)), None,
        r"column 'rating' has values up to 881250968, which look like no ratings",
    ),
    "ratings_as_times": (
        "user,item,time\n" + "".join(f"{u},5,{u % 5 + 1}\n" for u in range(20)), None,
        r"column 'time' has times from 1 to 5 only, which look like ratings",
    ),
    "two_units": (
        "user,item,time\n1,2,1600000000\n1,3,1600000000000\n", None,
        r"times from 1600000000 to 1600000000000 are of no one unit: .*52671.*time_unit=",
    ),
    "other_line_ends": ("user,item,time\r1,2,3\r", None, r"line 1: lines end with \\r alone"),
    "numbers_and_dates": ("user,item,time\n1,2,1396867869\n1,3,2014-04-07\n", None, r"column '?time'? has"),
    "zone_in_some": (
        "user,item,time\n1,2,2014-04-07T10:51:09Z\n1,3,2014-04-07T12:51:09\n", None,
        r"line 3: column time has '2014-04-07T12:51:09', expected a time with a zone, as in other rows",
    ),
    "zone_in_later_ones": (
        "user,item,time\n1,2,2014-04-07\n1,3,2014-04-07 12:51:09+02:00\n", None,
        r"column (')?time(')? has ('2014-04-07 12:51:09.02:00', expected a time without|dates with a zone and dates without)",
    ),
    "no_year": (
        "user,item,time\n1,2,31.12.\n1,3,01.01.\n", LogFormat(time_format="%d.%m."),
        r"log.csv: time_format=%d.%m. reads no year, and days of all years fall together",
    ),
    "hexadecimal_time": ("user,item,time\n1,2,0x10\n1,3,17\n", None, r"line 2: column time has '0x10', expected a number"),
    "short_dates": (
        "user,item,time\n1,2,20240502\n1,3,20231231\n", None,
        r"times from 20231231 to 20240502 look like dates of the format %Y%m%d: say time_format",
    ),
    **{
        f"look_like_{look}": (
            f"user,item,time\n1,2,{low}\n1,3,{high}\n", None,
            rf"column 'time': times from {low} to {high} look like {look}.*, or time_unit=s where they are seconds",
        )
        for look, low, high in [
            ("days since 1970: multiply by 86400", 19000, 19790), ("days since", 7305, 73050),
            ("hours since 1970: multiply by 3600", 438000, 471966), ("minutes since 1970", 26280000, 28279980),
            ("dates of the format %Y: say time_format=%Y", 2000, 2019), ("dates of the format %Y%m:", 201901, 201912),
            ("dates of the format %y%m%d:", 190131, 200101), ("dates of the format %Y%m%d%H", 2019013112, 2020010100),
            ("dates of the format %y%m%d%H", 14102100, 14103023),
        ]
    },
    **{
        f"no_such_day_{day}": (
            f"user,item,time\n1,2,29.02.2024\n1,3,{day}\n", LogFormat(time_format="%d.%m.%Y"),
            f"line 3: column time has '{day}', expected a time of the format",
        )
        for day in ("29.02.2023", "30.02.2024", "31.02.2023", "31.04.2024")  # Arrow's first to third of a month
    },
    **{
        f"no_such_day_by_{format}": (
            f"user,item,time\n1,2,{there}\n1,3,{day}\n", LogFormat(time_format=format),
            f"line 3: column time has '{day}', expected a time of the format",
        )
        for format, there, day in [
            ("%F", "2024-02-29", "2024-02-30"), ("%D", "02/29/24", "02/30/24"), ("%e %h %Y", "29 Feb 2024", "30 Feb 2024"),
            ("%Y%j", "2024366", "2023366"), ("%d.%m.%Y %T", "29.02.2024 10:11:12", "30.02.2024 10:11:12"),
            ("%d.%m.%Y %R", "29.02.2024 10:11", "30.02.2024 10:11"), ("%d.%m.%Y %k", "29.02.2024 10", "30.02.2024 10"),
            ("%d.%m.%Y %r", "29.02.2024 10:11:12 AM", "30.02.2024 10:11:12 AM"),
            ("%d.%m.%Y %l %p", "29.02.2024 10 AM", "30.02.2024 10 AM"),
        ]
    },
    "zone_by_name": (
        "user,item,time\n1,2,3 Mar 2014 10:00:00 EST\n", LogFormat(time_format="%d %b %Y %H:%M:%S %Z"),
        r"line 2: column time has '3 Mar 2014 10:00:00 EST'",
    ),
    **{
        f"{name}_date": (
            f"user,item,time\n1,2,2024-05-01\n1,2,{day}\n", LogFormat(time_unit="ns"),
            rf"line 3: column time has '{day}', expected a time that fits into 64 bits as ns",
        )
        for name, day in (("far", "9999-12-31"), ("early", "1600-01-01"))
    },
    "fraction": ("user,item,time\n500.5,1,1\n", LogFormat(whole_floats=True), r"line 2: column user has '500.5'"),
    "header_of_others": (
        "userId,movieId\nann,up\n", LogFormat(columns=("user", "item"), ids="words", timestamp="none"),
        r"line 1: columns are named, and the first line looks like a header: 'userId,movieId'",
    ),
    "stands_for_colons": ("1::2::3\n4::5\x1f6\n", replace(THREE, delimiter="::"), r"the text has the character '\\x1f'"),
    "fractions_and_an_order": (
        "user,item,time,at\n1,2,5,9\n1,3,5.5,8\n", LogFormat(order="at"), r"log.csv: .*times of column 'time' have frac",
    ),
    "far_below": ("user,item,time\n1,2,-1e19\n", None, r"line 2: column time has '-1e19', .* fits into int64"),
    "before": ("user,item,time\n1,2,-5\n", None, r"times from -5 to -5 are of no one unit: as seconds .*1969-12-31"),
}  # fmt: skip


@pytest.mark.parametrize(
    "times", [(0, 90000), (7304, 19000), (7304, 73051), (2458514, 2460000), (19000, 600000)]
)
def test_seconds_that_look_like_nothing_else_count_from_anywhere(tmp_path, times):
    content = "user,item,time\n" + "".join(f"1,{item},{time}\n" for item, time in enumerate(times))
    assert read(tmp_path, content, None).timestamp.tolist() == list(times)


def test_a_zone_that_this_machine_knows_by_name_is_refused_too(tmp_path, monkeypatch):
    monkeypatch.setenv("TZ", "EST5EDT")
    time.tzset()
    try:
        with pytest.raises(ValueError, match="column time has '3 Mar 2014 10:00:00 EST'"):
            read(tmp_path, *BAD["zone_by_name"][:2])
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("case", BAD)
def test_refuses_naming_line_and_column(tmp_path, case):
    content, format, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        read(tmp_path, content, format)


@pytest.mark.parametrize("case", [*GOOD, *BAD])
def test_blocks_of_a_few_bytes_are_the_whole_file(tmp_path, case, monkeypatch):
    content, format, expected = (GOOD | BAD)[case]
    if case in BAD:
        monkeypatch.setattr("tritonrec.data.text_tables.BLOCK_BYTES", 16)
        with pytest.raises(ValueError, match=r"log.csv"):
            read(tmp_path, content, format)
        return
    whole = read(tmp_path, content, format)
    monkeypatch.setattr("tritonrec.data.text_tables.BLOCK_BYTES", 16)
    assert columns(read(tmp_path, content, format)) == columns(whole) == expected


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(user="none"), "user cannot be 'none'"),
        (dict(user="a", item="a"), "must be different columns"),
        (dict(columns=("a", "a")), "different names"),
        (dict(label=("a",), dense=("b", "a")), "a label, dense or a category, and one of these: got a, b, a"),
        (dict(label=("none", "a")), "label is 'none' or names of columns"),
        (dict(quote="''"), "one character"),
        (dict(encoding="morse"), "unknown encoding 'morse'"),
        (dict(encoding="utf-16"), "lines of utf-16 do not end with one byte"),
        (dict(time_format="%Y", time_unit="step"), "time_unit='step'"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        LogFormat(**settings)


@pytest.mark.parametrize(
    "format",
    [
        LogFormat(),
        LogFormat(user="uid", time_unit="ms", ids="words", drop_missing=True, label_threshold=2.5),
        LogFormat(
            time_format="%d/%m/%Y %H:%M", delimiter=",", columns=("a b", "c,d", "e&f", "g=h", "%25", "\xe9")
        ),
        LogFormat(delimiter="::", missing=("NA", "-"), quote="'", label=("x", "y")),
    ],
)
def test_a_format_stands_in_a_source(format):
    source = described("csv:/logs/day_*.csv", format)
    path, settings = with_query(source)
    assert (path, LogFormat(**settings)) == ("csv:/logs/day_*.csv", format)
    assert described(source, LogFormat(user="other")) == described(
        source, replace(LogFormat(user="other"), **format.changes())
    )


def arrays(**others):
    return {"user": [1, 2, 1], "item": [10, 11, 12], "timestamp": [1396867869, 5, 1396867870]} | others


def test_pages_of_parquet_are_checked_where_their_writer_left_checksums(tmp_path):
    """A damaged page without compression is numbers as any other."""
    table = pa.table({"user": range(500), "item": range(500), "timestamp": range(1500000000, 1500000500)})
    path = tmp_path / "log.parquet"
    pq.write_table(table, path, compression="none", use_dictionary=False, write_page_checksum=True)
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"log.parquet: row group 0 cannot be read: .*checksum"):
        load(path)


def test_an_integer_beyond_64_bits_in_a_list_is_refused():
    with pytest.raises(ValueError, match=r"the table cannot be read as Arrow: .*too large"):
        load({"user": [2**63, 1], "item": [1, 2], "timestamp": [1, 2]})


def test_whole_floats_in_text_name_the_setting(tmp_path):
    (tmp_path / "a.csv").write_text("user,item,time\n3.0,2,4\n5.0,2,4\n")
    with pytest.raises(ValueError, match=r"'3\.0'.*whole_floats=true"):
        load(tmp_path / "a.csv")


def test_whole_floats_are_ids_by_choice(tmp_path):
    table = pa.table(arrays(user=[500.0, 501.0, 502.0]))
    assert load(table, LogFormat(whole_floats=True)).user.tolist() == [500, 501, 502]
    for wrong, row in (([500.0, 501.5, 502.0], 1), ([1.0, 2.0, 2.0**53], 2), ([1.0, None, 3.0], 1)):
        with pytest.raises(ValueError, match=f"row {row}: column user has"):
            load(pa.table(arrays(user=wrong)), LogFormat(whole_floats=True))


def test_shards_of_other_types_are_one_log(tmp_path):
    for number, user in enumerate(
        (pa.array([1, 2, 1], pa.int32()), pa.array(["1", "2", "7"]).dictionary_encode())
    ):
        pq.write_table(pa.table(arrays(user=user)), tmp_path / f"{number}.parquet")
    assert load(f"parquet:{tmp_path}").user.tolist() == [1, 2, 1, 1, 2, 7]


@pytest.mark.parametrize("end", ["parquet", "csv"])
def test_shards_of_times_with_a_zone_and_without_are_refused(tmp_path, end):
    kinds = pa.timestamp("s", "Asia/Tokyo"), pa.timestamp("s")
    for number, kind in enumerate(kinds):
        table = pa.table(arrays(timestamp=pa.array([1396867869, 5, 1396867870], kind)))
        write = pq.write_table if end == "parquet" else pa.csv.write_csv
        write(table, tmp_path / f"{number}.{end}")
    with pytest.raises(ValueError, match="'timestamp' has dates with a zone and dates without a zone: write"):
        load(f"{end}:{tmp_path}")
    assert common_type(kinds) is None and common_type(kinds[:1] * 2) == kinds[0]
    assert common_type([kinds[0], pa.timestamp("ms", "UTC")]) == pa.timestamp("us", "UTC")


def test_frames_are_sources():
    import pandas
    import polars

    expected = columns(load(pa.table(arrays())))
    frame = pandas.DataFrame(arrays() | {"other": ["a", "b", "c"]})
    filtered = pandas.concat([frame, frame]).iloc[:3][lambda each: each.user > 0]  # has an index of its own
    for source in (arrays(), {name: np.array(own) for name, own in arrays().items()}, frame, filtered,
                   polars.DataFrame(arrays()), polars.DataFrame(arrays(user=["1", "2", "1"])).cast(
                       {"user": polars.Categorical}), pa.table(arrays()).to_batches()[0],
                   {name: torch.tensor(own) for name, own in arrays().items()},
                   polars.DataFrame(arrays()).lazy()):  # fmt: skip
        assert columns(load(source)) == expected
    twice = pa.table(arrays(x=[1, 2, 3], y=[1, 2, 3])).rename_columns([*arrays(), "x", "x"])
    assert columns(load(twice)) == expected
    for wrong in (arrays(user=[1]), arrays(user=5), arrays(user=np.ones((3, 2)))):
        with pytest.raises(ValueError, match="the table cannot be read as Arrow"):
            load(wrong)
    for wrong in ([1, 2], None, np.ones(3)):
        with pytest.raises(ValueError, match=r"expected a path or a table .*, got (list|NoneType|ndarray)"):
            load(wrong)
    with pytest.raises(ValueError, match="the table: no column that is the user; found item"):
        load(polars.DataFrame({"item": [1]}))


def test_json_lines_are_read_whatever_their_values(tmp_path, monkeypatch):
    rows = [
        dict(user=u % 5, item=str(u), timestamp=1.4e9 + u, rating=u % 3, text="x" * u, deep={"a": [u]})
        for u in range(99)
    ]
    rows[50]["user"], rows[60]["item"], rows[70]["rating"] = "3", 60, 2.5
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    log = load(path)
    assert log.user.tolist() == [int(row["user"]) for row in rows] and log.item.tolist() == list(range(99))
    assert log.rating.tolist() == [row["rating"] for row in rows] and log.timestamp[7] == 1400000007
    monkeypatch.setattr("tritonrec.data.text_tables.BLOCK_BYTES", 200)
    assert columns(load(path)) == columns(log)
    for line, message in (("[1]", "line 3: expected an object"), ("{", "line 3: no JSON object"),
                          (json.dumps(rows[0]) * 2, "line 3: no JSON object: Extra data"),
                          ('{"user": 1, "item": 2}', "line 3: column timestamp has an empty field"),
                          ('{"user": 1.5, "item": 2, "timestamp": 3}', "line 3: column user has 1.5")):  # fmt: skip
        path.write_text("\n".join([json.dumps(rows[0]), "", line]))
        with pytest.raises(ValueError, match=f"log.jsonl.*{message}"):
            load(path, LogFormat(rating="none"))


def test_json_of_other_bytes_and_other_types_is_refused(tmp_path):
    first = b'{"user": "ann", "item": "up", "time": 1400000000}\n'
    for odd, message in ((b'"caf\xe9"', "line 2: not UTF-8 text, name its encoding="),
                         (b'"\\ud800"', "line 2: column user is no text: .* surrogates not allowed"),
                         (b"true", "line 2: column user has true, and values of another type"),
                         (b"1.5", "line 2: column user has 1.5, and values of another type")):  # fmt: skip
        (tmp_path / "log.json").write_bytes(
            first + b'{"user": ' + odd + b', "item": 5, "time": 1400000000}\n'
        )
        with pytest.raises(ValueError, match=message):
            load(tmp_path / "log.json", LogFormat(ids="words"))


@pytest.mark.parametrize("zone", ["", "Z", "-02:00"])
def test_iso_dates_are_read_without_a_search_in_each(zone, monkeypatch):
    times = [f"2024-05-01 08:30:{second:02}{zone}" for second in range(60)]
    monkeypatch.setattr(pyarrow.compute, "match_substring_regex", lambda *_: pytest.fail("each was searched"))
    log = load({"user": range(60), "item": range(60), "time": times})
    assert (log.timestamp - log.timestamp[0]).tolist() == list(range(60)) and log.time_unit == "s"


def test_a_format_of_dates_holds_for_integers():
    day = LogFormat(time_format="%Y%m%d")
    assert load(arrays(timestamp=[20240501, 20240502, 19700101]), day).timestamp.tolist() == [
        1714521600, 1714608000, 0,
    ]  # fmt: skip


def test_words_are_ids_by_choice_and_keep_their_numbers(tmp_path):
    text = "user,item,time\nann,x,1\nbob,y,2\nann,07,3\n"
    first: dict[str, Vocabulary] = {}
    log = load(read_path(tmp_path, text), LogFormat(ids="words"), first)
    assert columns(log) == [[0, 1, 0], [0, 1, 2], [1, 2, 3]] and log.words["user"] is first["user"]
    more = load(pa.table({"user": ["eve", "ann"], "item": pa.array(["y", "z"]).dictionary_encode(), "time": [4, 5]}),
                LogFormat(ids="words"), first)  # fmt: skip
    assert columns(more)[:2] == [[2, 0], [1, 3]]
    assert first["item"].words.to_pylist() == ["x", "y", "07", "z"]
    hashed = load(read_path(tmp_path, text), LogFormat(ids="hashed"))
    assert len(set(hashed.user.tolist())) == 2 and hashed.user[0] == hashed.user[2]
    with pytest.raises(ValueError, match="line 3: column user has an empty field, expected a word"):
        load(read_path(tmp_path, "user,item,time\nann,x,1\n,y,2\n"), LogFormat(ids="words"))


def test_words_are_numbered_as_they_are(tmp_path):
    """As pandas' factorize does: case, blanks around a word and Unicode forms count."""
    import pandas

    user = ["ann", " ann", "ann ", "Ann", "\xe9", "e\u0301", "\xa0ann", "ann", "7", "07", "7.0", "NA", "null"]
    frame = pandas.DataFrame({"user": user, "item": user[::-1], "time": range(1, 14)})
    frame.to_csv(tmp_path / "log.csv", index=False)
    frame.to_parquet(tmp_path / "log.parquet")
    frame.to_json(tmp_path / "log.jsonl", orient="records", lines=True)
    for name in ("log.csv", "log.parquet", "log.jsonl"):
        log = load(tmp_path / name, LogFormat(ids="words", time_unit="s"))
        assert log.user.tolist() == pandas.factorize(frame.user)[0].tolist()
        assert log.item.tolist() == pandas.factorize(frame.item)[0].tolist()


@pytest.mark.parametrize("name", ["rating", "stars", "likes"])
def test_a_label_is_one_when_it_is_read_again_whatever_its_name(tmp_path, name):
    log = load(read_path(tmp_path, f"user,item,time,{name}\n1,2,3,0\n4,5,6,1\n"), LogFormat(label=(name,)))
    pq.write_table(table_of(log), tmp_path / "log.parquet")
    again = load(tmp_path / "log.parquet")
    assert again.rating is log.rating is None and again.feedback[name].tolist() == [0, 1]


@pytest.mark.parametrize("read", [load, sequences_of])
def test_a_log_that_is_refused_adds_no_words(tmp_path, monkeypatch, read):
    monkeypatch.setenv("TRITONREC_CACHE", str(tmp_path / "cache"))
    words = {"user": Vocabulary(["eve"])}
    broken = read_path(tmp_path, "user,item,time\nann,x,1\nbob,y,noon\n")
    with pytest.raises(ValueError, match="line 3: column time"):
        read(str(broken), format=LogFormat(ids="words", time_unit="s"), words=words)
    assert words == {"user": Vocabulary(["eve"])}
    clicks = LogFormat(ids="words", label=("label",), categories=("site",))
    with pytest.raises(ValueError, match="row 1: column label has 3"):
        load({"site": ["a", "b"], "label": [0, 3]}, clicks, words)
    assert words == {"user": Vocabulary(["eve"])}


def read_path(tmp_path, text):
    (tmp_path / "log.csv").write_text(text)
    return tmp_path / "log.csv"


def test_labels_are_feedback(tmp_path):
    text = "user,item,time,like,watched,rating\n1,2,1,1,0.5,4\n1,3,2,0,0.9,3\n2,4,3,true,0,5\n"
    log = load(read_path(tmp_path, text), LogFormat(label=("like",), rating="none"))
    assert log.feedback["like"].tolist() == [1, 0, 1] and log.rating is None
    log = load(read_path(tmp_path, text), LogFormat(label=("watched",), label_threshold=0.5))
    assert log.feedback["watched"].tolist() == [1, 1, 0] and log.rating.tolist() == [4, 3, 5]
    log = load(read_path(tmp_path, text), LogFormat(label_threshold=3.5))
    assert log.feedback["click"].tolist() == [1, 0, 1]


def test_a_unit_is_found_or_named():
    for unit, factor in (("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9)):
        table = pa.table(arrays(timestamp=[factor * time for time in (1396867869, 1396867800, 1396867870)]))
        assert load(table).time_unit == unit
    assert load(pa.table(arrays())).time_unit == "s"
    assert load(pa.table(arrays(timestamp=[-5, 2**60, 3])), STEP).time_unit == "step"


int64 = st.integers(INT64_MIN, INT64_MAX)


@given(
    rows=st.lists(st.tuples(int64, int64, int64, st.floats(-1e4, 1e4)), min_size=1, max_size=8),
    order=st.permutations(["user", "item", "timestamp", "rating"]),
    delimiter=st.sampled_from(",;\t"),
    header=st.booleans(),
)
def test_what_was_written_is_read_back(tmp_path_factory, rows, order, delimiter, header):
    path = tmp_path_factory.getbasetemp() / "written.csv"
    place = {"user": 0, "item": 1, "timestamp": 2, "rating": 3}
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        if header:
            writer.writerow(order)
        writer.writerows([[row[place[name]] for name in order] for row in rows])
    format = LogFormat(time_unit="step", columns=() if header else tuple(order))
    assert columns(load(path, format)) == [list(column) for column in zip(*rows, strict=True)]
    parts = list(source_of(path, format).events().parts())
    assert columns(concat(parts)) == columns(load(path, format))


def test_feather_is_a_file_of_arrow(tmp_path):
    feather.write_feather(pa.table(arrays()), tmp_path / "log.feather")
    assert columns(load(tmp_path / "log.feather")) == columns(load(arrays()))
    (tmp_path / "log.feather").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match=r"log\.feather: not a file of Arrow"):
        load(tmp_path / "log.feather")
