"""A log written as Parquet is read back exactly; ranks share its shards; bad files and columns are named."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tritonrec.data import parquet
from tritonrec.data.convert import convert, write
from tritonrec.data.grouped import sequences_of
from tritonrec.data.interactions import Interactions, ItemGenres, UserFeatures
from tritonrec.data.log_format import LogFormat
from tritonrec.data.parquet_rows import ParquetRows
from tritonrec.data.sources import load, source_of
from tritonrec.data.vocabulary import Vocabulary, words_of
from tritonrec.files.places import place_of
from tritonrec.harness.job import Job

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def parts(path):
    return source_of(f"parquet:{path}").events().parts()


def made_log(rows: int = 500, seed: int = 1) -> Interactions:
    random = np.random.default_rng(seed)
    user = random.integers(-20, 20, rows)
    user[:2] = INT64_MIN, INT64_MAX
    return Interactions(
        user,
        random.integers(INT64_MIN, INT64_MAX, rows),
        random.integers(-300_000, 600_000, rows) // 1000 * 1000,
        random.integers(0, 50, rows) / 7,
        {"like": random.integers(0, 2, rows), "share": random.integers(0, 2, rows)},
    )


def same(left: Interactions, right: Interactions) -> bool:
    columns = [(getattr(left, name), getattr(right, name)) for name in ("user", "item", "timestamp")]
    columns += [(left.feedback[name], right.feedback[name]) for name in left.feedback]
    if left.rating is not None and right.rating is not None:
        columns.append((left.rating, right.rating))
    return (
        (left.rating is None) == (right.rating is None)
        and list(left.feedback) == list(right.feedback)
        and all(mine.dtype == other.dtype and np.array_equal(mine, other) for mine, other in columns)
    )


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_csv_file_comes_back_exactly(tmp_path):
    log = made_log()
    csv = tmp_path / "log.csv"
    columns = (log.user.tolist(), log.item.tolist(), log.timestamp.tolist(), log.rating.tolist())
    lines = [f"{user},{item},{time},{rating!r}" for user, item, time, rating in zip(*columns, strict=True)]
    csv.write_text("user,item,timestamp,rating\n" + "\n".join(lines))
    source = load(f"csv:{csv}?time_unit=s")
    assert same(source, replace(log, feedback={}))
    write(source, tmp_path / "out", rows_per_file=90, rows_per_group=40)
    assert same(load(f"parquet:{tmp_path / 'out'}"), source)
    assert files_of(tmp_path / "out") == [f"part-0000{n}.parquet" for n in range(6)]


def test_feedback_and_features_come_back(tmp_path):
    features = UserFeatures(np.array([-4, 7]), {"age": np.array([3, 1]), "zone": np.array([0, 9])})
    genres = ItemGenres(np.array([-1, 0, 5]), np.array([0, 2, 2, 3]), np.array([4, 1, 1]))
    log = replace(made_log(), user_features=features, genres=genres)
    write(log, tmp_path / "out", partition_by="date", rows_per_file=50)
    back = load(f"parquet:{tmp_path / 'out'}")
    assert list(back.feedback) == ["like", "share"]
    assert back.user_features.user_ids.tolist() == [-4, 7] and list(back.user_features.columns) == [
        "age",
        "zone",
    ]
    assert {name: column.tolist() for name, column in back.user_features.columns.items()} == {
        "age": [3, 1], "zone": [0, 9]
    }  # fmt: skip
    for name in ("item_ids", "offsets", "genres"):
        assert np.array_equal(getattr(back.genres, name), getattr(genres, name))
    plain = made_log()
    write(plain, tmp_path / "plain")
    assert load(f"parquet:{tmp_path / 'plain'}").user_features is None


def test_partitions_are_days_and_keep_every_sequence(tmp_path):
    log = made_log()
    write(log, tmp_path / "out", partition_by="date", rows_per_file=60)
    days = sorted({path.parent.name for path in (tmp_path / "out").rglob("part-*")})
    first = np.datetime64("1969-12-28")
    assert days == [f"date={first + day}" for day in range(11)]
    for path in (tmp_path / "out").rglob("part-*"):
        times = pq.ParquetFile(path).read().column("timestamp").to_numpy()
        assert {f"date={day}" for day in times.astype("datetime64[s]").astype("datetime64[D]")} == {
            path.parent.name
        }
        assert len(times) <= 60
    back = load(f"parquet:{tmp_path / 'out'}")
    for name in ("user_ids", "offsets", "items", "timestamps"):
        assert np.array_equal(getattr(back.sequences, name), getattr(log.sequences, name)), name
    assert np.array_equal(back.rating[back.sequences.rows], log.rating[log.sequences.rows])
    milliseconds = replace(log, timestamp=log.timestamp * 1000)
    write(milliseconds, tmp_path / "ms", partition_by="date", time_unit="ms", rows_per_file=60)
    assert files_of(tmp_path / "ms") == files_of(tmp_path / "out")


@pytest.mark.if_changed
@settings(max_examples=25)
@given(rows=st.integers(2, 60), per_file=st.integers(1, 25), per_group=st.integers(1, 25))
def test_the_parts_of_a_log_are_its_row_groups_in_order(tmp_path_factory, rows, per_file, per_group):
    log, out = made_log(rows), tmp_path_factory.mktemp("data") / "out"
    write(log, out, rows_per_file=per_file, rows_per_group=per_group)
    found = list(parts(out))
    assert same(parquet.concat(found), log)
    assert all(1 <= len(part) <= min(per_file, per_group) for part in found)


def test_more_than_ten_files_stay_in_order(tmp_path):
    log = made_log(12)
    write(log, tmp_path / "out", rows_per_file=1)
    assert same(load(f"parquet:{tmp_path / 'out'}"), log)


def test_a_single_file_and_narrow_integers(tmp_path):
    table = pa.table(
        {
            "seen_in": pa.array(["a", "b"]),
            "timestamp": pa.array([5, 6], pa.uint32()),
            "item": pa.array([-1, 2], pa.int16()),
            "user": pa.array([3, 4], pa.uint64()),
            "rating": pa.array([1, 2], pa.int8()),
        }
    )
    pq.write_table(table, tmp_path / "log.parquet")
    log = load(f"parquet:{tmp_path / 'log.parquet'}")
    assert (log.user.tolist(), log.item.tolist(), log.timestamp.tolist()) == ([3, 4], [-1, 2], [5, 6])
    assert log.rating.tolist() == [1.0, 2.0] and log.feedback == {}


def columns(**changes) -> dict[str, pa.Array]:
    whole = {name: pa.array([1, 2], pa.int64()) for name in ("user", "item", "timestamp")}
    return {name: column for name, column in (whole | changes).items() if column is not None}


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(item=None), r"b\.parquet: no column that is the item; found user, timestamp"),
        (dict(user=pa.array(["x", "y"])), r"b\.parquet, row 0: column user has 'x', expected an int64"),
        (dict(timestamp=pa.array(["noon", "1"])), r"b\.parquet, row 0: column timestamp has 'noon'"),
        (dict(user=pa.array([1, None])), r"b\.parquet, row 1: column user has an empty field"),
        (
            dict(item=pa.array([1, 2**63], pa.uint64())),
            r"b\.parquet, row 1: column item has 9223372036854775808",
        ),
        (dict(rating=pa.array([1.0, 2.0])), r"b\.parquet: has the columns .*rating.* but .*a\.parquet has"),
        (dict(like=pa.array([True, False])), r"b\.parquet: has the columns .*like"),
    ],
)
def test_a_bad_column_is_named_with_its_file(tmp_path, changes, message):
    pq.write_table(pa.table(columns()), tmp_path / "a.parquet")
    pq.write_table(pa.table(columns(**changes)), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=message):
        load(f"parquet:{tmp_path}")


def test_a_damaged_name_of_a_column_names_its_file(tmp_path):
    pq.write_table(pa.table({"caf\u00e9": [1, 2]}), tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole.replace("f\u00e9".encode(), b"f\xff\xff"))
    with pytest.raises(ValueError, match=r"a\.parquet: .*utf-8"):
        ParquetRows(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", ["item", "like"])
def test_a_column_that_is_there_twice_is_named_with_its_file(tmp_path, name):
    """Another one that is there twice is as good as absent, as each that nothing needs."""
    two = pa.table(columns(like=pa.array([True, False])))
    two = two.append_column("z", two["user"]).append_column("z", two["item"])
    pq.write_table(two, tmp_path / "a.parquet")
    assert len(load(f"parquet:{tmp_path}")) == len(load(two)) == 2
    two = two.append_column(name, two[name])
    pq.write_table(two, tmp_path / "a.parquet")
    pa.ipc.new_file(str(tmp_path / "a.arrow"), two.schema).close()
    for source in (f"parquet:{tmp_path / 'a.parquet'}", f"arrow:{tmp_path / 'a.arrow'}", two):
        with pytest.raises(ValueError, match=f"(the table|a\\.[a-z]+): two columns are named '{name}'"):
            load(source)
    with pytest.raises(ValueError, match=rf"a\.parquet: two columns are named '{name}'"):
        ParquetRows(tmp_path / "a.parquet", columns=["user", name])


@pytest.mark.parametrize(
    "rating, message",
    [
        (pa.array(["5", "good"]), r"row 1: column rating has 'good', expected a finite number"),
        (pa.array([[5], [4]]), r"column 'rating' is of type .*list.*, expected numbers"),
        (pa.array([1.0, float("nan")]), r"row 1: column rating has nan, expected a finite number"),
        (pa.array([1.0, None]), r"row 1: column rating has an empty field"),
    ],
)
def test_a_bad_rating_is_named(tmp_path, rating, message):
    pq.write_table(pa.table(columns(rating=rating)), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=message):
        load(f"parquet:{tmp_path}")


def test_an_empty_or_broken_dataset_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere: no such file or folder"):
        load(f"parquet:{tmp_path / 'nowhere'}")
    with pytest.raises(ValueError, match="holds no Parquet file"):
        load(f"parquet:{tmp_path}")
    empty = {name: pa.array([], pa.int64()) for name in ("user", "item", "timestamp")}
    pq.write_table(pa.table(empty), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="holds no interactions"):
        load(f"parquet:{tmp_path}")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and then nothing of the kind")
    with pytest.raises(ValueError, match=r"b\.parquet: not a Parquet file"):
        load(f"parquet:{tmp_path}")


def test_a_name_of_a_column_that_is_no_text_is_refused(tmp_path):
    write(made_log(), tmp_path / "out", rows_per_file=100)
    path = tmp_path / "out" / "part-00001.parquet"
    path.write_bytes(path.read_bytes().replace(b"timestamp", b"\xf4imestamp", 1))
    with pytest.raises(ValueError, match=r"part-00001\.parquet: not a Parquet file: 'utf-8' codec"):
        next(parts(tmp_path / "out"))


def test_a_shard_that_is_damaged_later_is_named(tmp_path):
    write(made_log(), tmp_path / "out", rows_per_file=100)
    path = tmp_path / "out" / "part-00003.parquet"
    found = parts(tmp_path / "out")
    next(found)
    path.write_bytes(path.read_bytes()[:200])
    for _ in range(2):
        next(found)
    with pytest.raises(ValueError, match=r"part-00003\.parquet: row group 0 cannot be read"):
        next(found)


def test_a_damaged_file_of_features_is_named(tmp_path):
    features = UserFeatures(np.array([-4, 7]), {"age": np.array([3, 1])})
    genres = ItemGenres(np.array([-1, 5]), np.array([0, 2, 3]), np.array([4, 1, 1]))
    write(replace(made_log(), user_features=features, genres=genres), tmp_path / "out")
    for name in ("_users.parquet", "_items.parquet"):
        path = tmp_path / "out" / name
        whole = path.read_bytes()
        numbers = pa.table({"user": [1, 0], "item": [2, 3], "genres": [1, 1]})
        for change in (
            lambda path, whole: path.write_bytes(whole[:-7]),
            lambda path, whole: path.write_bytes(b""),
            lambda path, whole: pq.write_table(pa.table({"x": [1]}), path),
            lambda path, whole, table=numbers: pq.write_table(table, path),
        ):
            change(path, whole)
            with pytest.raises(ValueError, match=name):
                load(f"parquet:{tmp_path / 'out'}")
        path.write_bytes(whole)
    assert load(f"parquet:{tmp_path / 'out'}").genres.genres.tolist() == [4, 1, 1]


def test_an_output_with_anything_in_it_is_refused(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    write(made_log(), out)
    assert os.listdir(tmp_path) == ["out"]
    before = files_of(out)
    with pytest.raises(FileExistsError, match="out exists and is not an empty folder"):
        write(made_log(seed=2), out)
    assert files_of(out) == before and same(load(f"parquet:{out}"), made_log())
    with pytest.raises(FileExistsError, match="is not an empty folder"):
        write(made_log(), out / before[0])


def test_an_interrupted_conversion_leaves_nothing(tmp_path):
    def interrupt(rows):
        assert (tmp_path / "out").exists() is False
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(made_log(), tmp_path / "out", report=interrupt)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(rows_per_file=0), "rows_per_file must be at least 1, got 0"),
        (dict(rows_per_group=0), "rows_per_group must be at least 1, got 0"),
        (dict(partition_by="user"), "partition_by must be 'date' or None, got 'user'"),
        (dict(log=Interactions(*np.zeros((3, 0), dtype=np.int64))), "the log holds no interactions"),
        (dict(log=replace(made_log(), feedback={"item": np.zeros(500, dtype=np.int64)})),
         "feedback cannot be called 'item'"),
    ],
)  # fmt: skip
def test_bad_requests_are_named(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        write(**(dict(log=made_log(), out=tmp_path / "out") | arguments))
    assert os.listdir(tmp_path) == []


def run(*arguments: str):
    import typer

    app = typer.Typer()
    app.command()(convert)
    return CliRunner().invoke(app, list(arguments))


def test_the_command_converts_and_reports(tmp_path):
    out = str(tmp_path / "out")
    done = run("zipf:users=40,seed=3", out, "--rows-per-file", "100", "--partition-by", "date")
    assert done.exit_code == 0, done.output
    log = load("zipf:users=40,seed=3")
    assert f"{len(log):,} interactions in" in done.output.replace("\n", " ")
    assert np.array_equal(load(f"parquet:{out}").sequences.items, log.sequences.items)
    refused = run("zipf:users=40", out)
    assert refused.exit_code == 1 and "is not an empty folder" in refused.output.replace("\n", " ")
    unknown = run("nothing", str(tmp_path / "other"))
    assert unknown.exit_code == 1 and "unknown data 'nothing'" in unknown.output
    unit = run("zipf:users=40", str(tmp_path / "other"), "--time-unit", "h")
    assert unit.exit_code == 1 and "--time-unit must be s, ms, us or ns, got 'h'" in unit.output


@pytest.mark.if_changed
@pytest.mark.parametrize("partition", [[], ["--partition-by", "date"]])
def test_a_log_of_words_keeps_them(tmp_path, monkeypatch, partition):
    """A converted log has the numbers of its words, and these beside it."""
    monkeypatch.setenv("TRITONREC_CACHE", str(tmp_path / "cache"))
    rows = "ann,x,1400000000\nbob,y,1400000001\nann,z,1400100000\nann,x,1400200000\n"
    (tmp_path / "log.csv").write_text(f"user,item,time\n{rows}")
    source, out = f"{tmp_path}/log.csv?ids=words", tmp_path / "out"
    made = run(source, str(out), *partition)
    assert made.exit_code == 0, made.output
    original, again = load(source), load(out)
    assert again.words == original.words and again.user.tolist() == original.user.tolist()
    assert words_of(sequences_of(str(out))) == words_of(sequences_of(source)) == original.words
    earlier = {"item": Vocabulary(["x"])}  # of a checkpoint: the log's extend it
    assert load(out, words=earlier).item.tolist() == [0, 1, 2, 0] and earlier == original.words
    with pytest.raises(ValueError, match="the vocabulary 'item' has other ids"):
        load(out, words={"item": Vocabulary(["y"])})
    with pytest.raises(ValueError, match="ids are numbers of words already"):
        load(out, LogFormat(ids="hashed"))
    made = run(source, str(tmp_path / "sequences"), "--sequences")
    assert made.exit_code == 0 and words_of(tmp_path / "sequences") == original.words
    for folder in ("out", "sequences"):  # at a URL as here
        for file in filter(Path.is_file, (tmp_path / folder).rglob("*")):
            place = f"memory://words{len(partition)}/{folder}/{file.relative_to(tmp_path / folder)}"
            place_of(place).write_bytes(file.read_bytes())
    assert load(f"memory://words{len(partition)}/out").words == original.words
    for where in (f"memory://words{len(partition)}", tmp_path):
        for name in ("sequences", "sequences/*.parquet"):
            assert Job(f"parquet:{where}/{name}").vocabularies() == original.words


@pytest.mark.if_changed
def test_days_that_cannot_be_are_refused_naming_the_unit(tmp_path):
    text = "user,item,time\n" + "".join(f"{row},1,{1649408076860 + row}\n" for row in range(9))
    (tmp_path / "log.csv").write_text(text)
    done = run(f"csv:{tmp_path}/log.csv", str(tmp_path / "out"), "--partition-by", "date")
    assert done.exit_code == 0 and files_of(tmp_path / "out")[0].startswith("date=2022-04-08")
    wrong = run(f"csv:{tmp_path}/log.csv", str(tmp_path / "no"), "--partition-by", "date", "--time-unit", "s")
    assert wrong.exit_code == 1 and "name time_unit=ms" in wrong.output.replace("\n", " ")
    assert load(f"parquet:{tmp_path}/out").time_unit == "ms"
    for unit, times in (("s", [1649408076860]), ("", [2**40]), ("ms", [881250949]), ("step", [1, 2])):
        ids = np.ones(len(times), np.int64)
        with pytest.raises(ValueError, match=r"time_unit|name it"):
            write(
                Interactions(ids, ids, np.array(times), time_unit=unit), tmp_path / "no", partition_by="date"
            )
    with pytest.raises(ValueError, match="name time_unit=ms"):
        write(load(f"csv:{tmp_path}/log.csv", LogFormat(time_unit="s")), tmp_path / "no", partition_by="date")
    assert not (tmp_path / "no").exists()


def test_shards_of_two_units_are_no_log(tmp_path):
    ids, times = np.arange(2), np.array([1714552200, 1714552201])
    milliseconds = Interactions(ids, ids, times * 1000, time_unit="ms")
    write(milliseconds, tmp_path / "log")
    with pytest.raises(
        ValueError, match=r"part-00000.parquet: column 'timestamp' has times in ms, .*time_unit=s"
    ):
        load(tmp_path / "log", LogFormat(time_unit="s"))
    second = tmp_path / "log" / "part-00001.parquet"
    for log, kinds in ((Interactions(ids, ids, times, time_unit="s"), "times in ms and times in s"),
                       (Interactions(ids, ids, times), "numbers and times in ms")):  # fmt: skip
        pq.write_table(parquet.table_of(log), second)
        with pytest.raises(ValueError, match=f"column 'timestamp' has {kinds}: write it alike"):
            load(tmp_path / "log")
    assert load(tmp_path / "log", LogFormat(time_unit="ms")).time_unit == "ms"  # named for all shards
    pq.write_table(parquet.table_of(milliseconds), second)
    assert load(tmp_path / "log").time_unit == "ms"


def test_columns_of_the_writer_are_no_columns(tmp_path):
    import pandas

    frame = pandas.DataFrame({"user": [1, 2, 3, 4], "item": [4, 5, 6, 7], "timestamp": [7, 8, 9, 10]})
    frame[frame.user != 2].to_parquet(tmp_path / "log.parquet")
    assert "__index_level_0__" in pq.read_schema(tmp_path / "log.parquet").names
    assert load(tmp_path / "log.parquet").item.tolist() == [4, 6, 7]
