"""Promise: the files of a source are those that it names, in the order of their numbers, or an error."""

import gzip
import os
import threading
import urllib.error
from types import SimpleNamespace

import fsspec
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.dataset as pa_dataset
import pyarrow.parquet as pq
import pytest
from pyarrow.fs import LocalFileSystem

from tritonrec.data import LogFormat, Vocabulary, load, log_files, text_tables
from tritonrec.data.log_files import files_at
from tritonrec.data.log_format import with_query
from tritonrec.data.sequences import read_catalogue

STEP = LogFormat(time_unit="step")


def test_a_question_mark_in_a_path_is_a_path(tmp_path):
    for name in ("day_?.csv", "a?user=b.csv"):
        assert with_query(f"csv:{name}") == (f"csv:{name}", {}) or "user" in name
    (tmp_path / "a?user=b").write_text("user,item,time\n1,2,3\n")
    log = load(f"csv:{tmp_path}/a?user=b")
    assert [log.user.tolist(), log.item.tolist(), log.timestamp.tolist()] == [[1], [2], [3]]
    assert with_query("csv:https://here/x.csv?token=1")[1] == {}
    with pytest.raises(ValueError, match="no setting 'usr' of a format; known are user, item"):
        load("csv:x.csv?usr=a")
    with pytest.raises(ValueError, match="time_unit takes one of auto, s, ms, us, ns, step, got 'h'"):
        load("csv:x.csv?time_unit=h")
    with pytest.raises(ValueError, match="no setting 'TIME_UNIT'"):
        load("csv:x.csv?TIME_UNIT=s")
    with pytest.raises(ValueError, match="user stands in the settings twice"):
        load("csv:x.csv?user=a&item=b&user=c")
    with pytest.raises(ValueError, match="label_threshold must be a number, got nan"):
        load("csv:x.csv?label_threshold=nan")
    with pytest.raises(ValueError, match="has a format of its own: leave out user"):
        load("ml-100k", LogFormat(user="a"))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.csv"):
        load(tmp_path / "absent.csv")
    with pytest.raises(ValueError, match="unknown data 'qqq': expected a path"):
        load("qqq")
    with pytest.raises(ValueError, match="unknown data 'Movielens-1M', did you mean movielens-1m: expected"):
        load("Movielens-1M")


class Expired(fsspec.get_filesystem_class("memory")):
    """A store with errors of its own, from some call on."""

    protocol, store, pseudo_dirs, ends = "expired", {}, [""], "info"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("expired://", "memory://"))

    def info(self, path, **options):
        if self.ends == "info":
            raise LookupError("token expired")
        return super().info(path, **options)

    def open(self, path, mode="rb", **options):
        file = super().open(path, mode, **options)
        if mode == "rb":
            file.read = self.refuse
        return file

    def refuse(self, *args):
        raise LookupError("token expired")


@pytest.mark.parametrize("ends", ["info", "read"])
def test_an_error_of_a_store_s_own_kind_names_the_file(ends, monkeypatch):
    monkeypatch.setattr(Expired, "ends", ends)
    fsspec.register_implementation("expired", Expired, clobber=True)
    Expired(skip_instance_cache=True).pipe_file("/b/x.csv", b"user,item,time\n1,2,3\n")
    for read in (load, Vocabulary.load):
        with pytest.raises((OSError, ValueError), match=r"LookupError: token expired.*b/x.csv"):
            read("expired://b/x.csv")


def test_an_error_whose_kind_has_other_arguments_names_the_file_too(monkeypatch):
    error = urllib.error.HTTPError("http://x/y", 403, "Forbidden", None, None)  # an OSError
    monkeypatch.setattr(Expired, "ends", "")
    monkeypatch.setattr(Expired, "info", lambda *_, **__: (_ for _ in ()).throw(error))
    fsspec.register_implementation("expired", Expired, clobber=True)
    with pytest.raises(OSError, match=r"HTTP Error 403: Forbidden.*b/x.csv"):
        load("expired://b/x.csv")


def test_files_are_in_the_order_of_their_numbers_and_brackets_are_letters(tmp_path):
    for day in (0, 1, 2, 10, 23):
        (tmp_path / f"day_{day}.csv").write_text(f"user,item,time\n1,{day},{day}\n")
    assert load(f"csv:{tmp_path}", STEP).item.tolist() == [0, 1, 2, 10, 23]
    assert load(f"{tmp_path}/day_[12]*.csv", STEP).item.tolist() == [1, 2, 10, 23]
    (tmp_path / "day_3.csv").write_text("")  # a shard without rows
    assert load(f"csv:{tmp_path}", STEP).item.tolist() == [0, 1, 2, 10, 23]
    odd = tmp_path / "a[1].tsv"
    odd.write_text("user\titem\ttime\n1\t2\t3\n")
    assert load(odd).item.tolist() == load(f"csv:{odd}").item.tolist() == [2]


@pytest.mark.parametrize("at", ["folder", "working directory", "memory"])
def test_what_a_glob_matches(tmp_path, monkeypatch, at):
    """Its folders are all their files, ``**`` any number of folders, and what exists is no pattern."""
    base = {"folder": f"{tmp_path}/", "working directory": "", "memory": "memory://globs/"}[at]
    monkeypatch.chdir(tmp_path)
    memory = fsspec.filesystem("memory")
    files = (
        "a.csv",
        "x1/b.csv",
        "x1/y/c10.csv",
        "x1/y/c9.csv",
        "x2/_t/d.csv",
        "x[1]/e.csv",
        "q?/f.csv",
        "q1/g.csv",
    )
    for item, name in enumerate(files):
        text = f"user,item,time\n1,{item},5\n"
        if at == "memory":
            memory.pipe(f"/globs/{name}", text.encode())
        else:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
    expected = {
        "*.csv": [0], "x1/*": [1, 3, 2], "x1*": [1, 3, 2], "**/c*.csv": [3, 2], "**/[ab].csv": [0, 1],
        "x[1]": [5], "x[1]/*.csv": [5], "q?": [6], "q?/f.csv": [6], "x?/b.csv": [1],
    }  # fmt: skip
    assert {glob: load(f"csv:{base}{glob}").item.tolist() for glob in expected} == expected
    if at == "working directory":
        (tmp_path / "csv:1").mkdir()
        (tmp_path / "csv:1" / "a.csv").write_text("user,item,time\n1,9,5\n")
        assert load("./csv:1/a.csv").item.tolist() == [9]


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("gone")])
def test_a_pipe_or_a_link_to_nothing_is_no_file_of_a_log(tmp_path, make):
    make(tmp_path / "b.csv")
    with pytest.raises((ValueError, FileNotFoundError), match=r"b\.csv: (neither a file nor a|no such)"):
        load(tmp_path / "b.csv")
    (tmp_path / "a.csv").write_text("user,item,time\n3,2,4\n")
    for source in (tmp_path, f"{tmp_path}/*.csv"):
        with pytest.raises(ValueError, match=r"b\.csv: no file, but a link to nothing, a pipe, a dev"):
            load(source)
    assert len(load(f"{tmp_path}/a*.csv")) == 1


def test_settings_of_a_store_behind_a_url_are_no_wildcard(monkeypatch):
    seen = []
    monkeypatch.setattr(
        log_files, "filesystem_at", lambda url: (seen.append(url), (LocalFileSystem(), "b"))[1]
    )
    options = "?endpoint_override=127.0.0.1:9&scheme=http"
    assert log_files.filesystem_of(f"s3://b/*.csv{options}")[1] == "b/*.csv"
    assert log_files.filesystem_of("s3://b/d?/x.csv")[1] == "b/d?/x.csv"
    assert seen == [f"s3://b{options}", "s3://b"]


def test_a_store_that_fails_is_named(monkeypatch):
    def fails(place):
        raise OSError("no route to the store")

    monkeypatch.setattr(log_files, "filesystem_of", lambda *_: (SimpleNamespace(get_file_info=fails), "b/x"))
    with pytest.raises(OSError, match=r"^gs://b/x\.csv: no route to the store$"):
        files_at("gs://b/x.csv")


def test_an_empty_folder_with_the_name_of_a_part_is_no_part(tmp_path):
    (tmp_path / "a.csv").write_text("user,item,time\n3,2,4\n")
    (tmp_path / "empty").mkdir()
    assert len(load(tmp_path)) == 1
    (tmp_path / "b.csv").mkdir()
    with pytest.raises(ValueError, match=r"b\.csv: an empty folder with the name of a file"):
        load(tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("gone")])
def test_what_is_beside_a_log_is_a_file(tmp_path, make):
    pq.write_table(pa.table({"user": [1], "item": [2], "timestamp": [5]}), tmp_path / "a.parquet")
    make(tmp_path / "_items.parquet")
    with pytest.raises(ValueError, match=r"_items\.parquet: no file, but a link to nothing, a pipe"):
        load(tmp_path)
    make(tmp_path / "_catalogue.parquet")
    with pytest.raises(ValueError, match=r"_catalogue\.parquet: no file, but a link to nothing, a pipe"):
        read_catalogue(SimpleNamespace(root=str(tmp_path), filesystem=LocalFileSystem()))


def test_a_file_and_its_packed_one_are_no_two_files(tmp_path):
    text = b"user,item,time\n1,2,1600000000\n"
    (tmp_path / "a.csv").write_bytes(text)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text))
    with pytest.raises(ValueError, match=r"a\.csv and .*a\.csv\.gz hold the same events"):
        files_at(str(tmp_path))


def write_partitions(folder, name, values):
    for number, value in enumerate(values):
        (folder / f"{name}={value}").mkdir(parents=True)
        table = pa.table({"user": [1], "item": [number], "timestamp": [5 + number]})
        inside = table.drop_columns([name] if name in table.column_names else [])
        pq.write_table(inside, folder / f"{name}={value}/a.parquet")


@pytest.mark.parametrize("name", ["rating", "Stars", "user", "click"])
def test_columns_that_stand_in_names_of_folders_alone_are_not_left_out_in_silence(tmp_path, name):
    """As Hive and pandas' partition_cols write them, and pandas reads them as columns."""
    write_partitions(tmp_path, name, [1, 0])
    own = LogFormat(time_unit="step", label=("click",) if name == "click" else ())
    with pytest.raises(ValueError, match=f"{name} stands in names of folders, .* partitioning='hive'"):
        load(tmp_path, own)
    log = load(pa_dataset.dataset(tmp_path, partitioning="hive"), own)
    found = {"user": log.user, "click": log.feedback.get("click")}.get(name, log.rating)
    assert found.tolist() == [0, 1] and log.item.tolist() == [1, 0]  # in the order of names


def test_folders_of_other_names_are_folders(tmp_path):
    write_partitions(tmp_path, "rating", [1])
    write_partitions(tmp_path, "date", ["2024-05-01"])
    assert load(tmp_path / "date=2024-05-01", STEP).rating is None
    assert len(load(tmp_path, LogFormat(time_unit="step", rating="none"))) == 2
    assert load(f"{tmp_path}/rating=1/*.parquet", STEP).rating is None


@pytest.mark.parametrize("count", range(5))
def test_one_item_needs_no_thread_ahead_and_none_is_lost(count, monkeypatch):
    made_on, pools = [], []
    executor = text_tables.ThreadPoolExecutor
    monkeypatch.setattr(text_tables, "ThreadPoolExecutor", lambda size: pools.append(size) or executor(size))

    def items():
        for number in range(count):
            made_on.append(threading.get_ident())
            yield number

    assert list(text_tables.ahead(items())) == list(range(count))
    assert set(made_on[:2]) <= {threading.get_ident()} and len(set(made_on[2:])) == (count > 2)
    assert len(pools) == (count > 1)


@pytest.mark.parametrize(
    ("name", "value", "inside"),
    [("rating", "5", 5), ("rating", "5", 5.0), ("user", "a%20b", "a b"), ("rating", "x", 1), ("user", "7", 8),
     ("rating", "__HIVE_DEFAULT_PARTITION__", 5), ("timestamp", "2024-05-01", 1600000000)],
)  # fmt: skip
@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_a_column_that_stands_in_the_file_and_in_its_folder_is_the_same(
    tmp_path, name, value, inside, suffix
):
    (tmp_path / f"{name}={value}").mkdir()
    row = {"user": 1, "item": 2, "timestamp": 1600000001, "rating": 3.0, name: inside}
    table = pa.table({column: [each] for column, each in row.items()})
    file = tmp_path / f"{name}={value}/a.{suffix}"
    pq.write_table(table, file) if suffix == "parquet" else pa_csv.write_csv(table, file)
    own = LogFormat(time_unit="s", ids="words" if inside == "a b" else "integers")
    if inside in (5, "a b") and "_" not in value:
        assert len(load(tmp_path, own)) == 1
        return
    with pytest.raises(
        ValueError, match=rf"a\.{suffix}, \w+ [012]: column {name} has .*, as its folder {name}="
    ):
        load(tmp_path, own)


def test_tables_that_are_not_read_are_not_left_out_in_silence(tmp_path):
    pq.write_table(pa.table({"user": [1], "item": [2], "timestamp": [3]}), tmp_path / "a.parquet")
    (tmp_path / "b.orc").write_bytes(b"ORC")
    for place in (tmp_path, tmp_path / "b.orc"):
        with pytest.raises(ValueError, match=r"b\.orc: files of ORC are not read: load the table that"):
            load(place, STEP)


@pytest.mark.parametrize(
    ("end", "whole"),
    {
        "cut": ("3,4,88174845", False),
        "cut to one digit": ("3,4,8", False),
        "whole": ("3,4,881748453", True),
        "whole by its end": ("3,4,88174845\n", True),
        "cut behind a field of two lines": ('"3\n",4,88174845', False),
        "an item, which may be short": ("881748453,4,8", True),
    }.values(),
)
def test_a_file_that_ends_in_the_middle_of_a_time_is_an_error(tmp_path, end, whole):
    item = end.startswith("8")
    rows = "881748451,4,87\n881748452,5,88\n" * 2 if item else "1,4,881748451\n2,5,881748452\n" * 2
    path = tmp_path / "log.csv"
    path.write_text(f"{'time,user,item' if item else 'user,item,time'}\n{rows}{end}")
    if whole:
        assert len(load(f"csv:{path}?multiline=true")) == 5
        return
    with pytest.raises(ValueError, match=r"line 6: the file ends in the middle of a time, it seems: '8"):
        load(f"csv:{path}?multiline=true")
