"""Promise: `tritonrec score` writes what `Predictor` gives, row by row; a run killed at any part goes on, and
leaves the same bytes.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from served_models import LONGEST, export_hstu
from typer.testing import CliRunner

from tritonrec.files.places import place_of
from tritonrec.harness.cli import app
from tritonrec.serving import Predictor
from tritonrec.serving.score_file import ScoreConfig, score_file

SMALL = ScoreConfig(batch=3, part=4, k=5)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scored")
    (folder / "words").mkdir()
    paths = [*export_hstu(folder), export_hstu(folder / "words", words=True)[0]]
    return paths, [Predictor.load(path) for path in paths]


def histories(count, seed=1):
    draw = np.random.default_rng(seed)
    return [draw.choice(60, draw.integers(1, LONGEST + 1), replace=False).tolist() for _ in range(count)]


def written(path, rows, **columns):
    table = pa.table({"user": [f"user {n}" for n in range(len(rows))], "history": rows, **columns})
    pq.write_table(table, path, row_group_size=3)
    return path


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.if_changed
@pytest.mark.parametrize("count", [1, 4, 11])
def test_the_best_items_of_each_row(models, tmp_path, count):
    full, rows = models[1][0], histories(count)
    out = tmp_path / "out.parquet"
    assert score_file(written(tmp_path / "in.parquet", rows), out, full, SMALL) == count
    table = pq.read_table(out)
    assert (
        table.column_names == ["user", "items", "scores"]
        and table["user"].to_pylist()[-1] == f"user {count - 1}"
    )
    items, scores = full.retrieve(rows, 5)
    assert table["items"].to_pylist() == items.tolist()
    found = torch.from_numpy(table["scores"].combine_chunks().flatten().to_numpy().copy()).reshape(-1, 5)
    assert torch.equal(found, scores)
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []


def test_candidates_words_and_no_rows(models, tmp_path):
    full, worded = models[1][0], models[1][2]
    rows, candidates = histories(7), [*histories(6, seed=2), []]
    source = written(tmp_path / "in.parquet", rows, wanted=candidates)
    score_file(source, tmp_path / "out.parquet", full, ScoreConfig(candidates="wanted", batch=3, part=4))
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.column_names == ["user", "scores"]
    for row, items, scores in zip(rows, candidates, table["scores"].to_pylist(), strict=True):
        want = full.scores(row, torch.tensor(items, dtype=torch.int64))[0]
        assert torch.equal(torch.tensor(scores, dtype=torch.float32), want)
    words = [[f"item {n}" for n in row] for row in rows]
    score_file(written(tmp_path / "w.parquet", words), tmp_path / "w-out.parquet", worded, SMALL)
    assert pq.read_table(tmp_path / "w-out.parquet")["items"].to_pylist() == worded.retrieve(words, 5)[0]
    empty = pa.table({"history": pa.array([], pa.list_(pa.int64()))})
    pq.write_table(empty, tmp_path / "none.parquet")
    assert score_file(tmp_path / "none.parquet", tmp_path / "none-out.parquet", full, SMALL) == 0
    assert pq.read_table(tmp_path / "none-out.parquet").column_names == ["items", "scores"]


@pytest.mark.if_changed
def test_a_model_with_times_goes_by_the_column_of_timestamps(tmp_path):
    timed, rows = Predictor.load(export_hstu(tmp_path, timed=True)[1]), histories(5)
    times = [[100 * each for each in row] for row in rows]  # back and forth, as a log may have them
    source, out = written(tmp_path / "in.parquet", rows, at=times), tmp_path / "out.parquet"
    score_file(source, out, timed, replace(SMALL, timestamps="at"))
    items, scores = timed.retrieve(rows, 5, timestamps=times)
    assert pq.read_table(out)["items"].to_pylist() == items.tolist()
    found = torch.tensor(pq.read_table(out)["scores"].to_pylist(), dtype=torch.float32)
    at_once = timed.retrieve(rows, 5, timestamps=[[7] * len(row) for row in rows])[1]
    assert torch.equal(found, scores) and not torch.equal(found, at_once)
    with pytest.raises(ValueError, match="goes by times: name the column of the histories' timestamps"):
        score_file(source, out, timed, SMALL)
    written(source, rows, at=[times[0][1:], *times[1:]])
    with pytest.raises(ValueError, match="row 0: columns 'history' and 'at' have lists of other lengths"):
        score_file(source, out, timed, replace(SMALL, timestamps="at"))


@pytest.mark.parametrize("killed_at", [0, 1, 2, 3])
def test_a_killed_run_goes_on_with_the_same_bytes(models, tmp_path, monkeypatch, killed_at):
    full, source = models[1][0], written(tmp_path / "in.parquet", histories(14))
    score_file(source, tmp_path / "whole.parquet", full, SMALL)
    best, calls = Predictor.best_of, []

    def dies(self, *given):
        calls.append(1)
        if len(calls) == 2 * killed_at + 1:  # two batches a part
            raise KeyboardInterrupt
        return best(self, *given)

    monkeypatch.setattr(Predictor, "best_of", dies)
    out = tmp_path / "out.parquet"
    with pytest.raises(KeyboardInterrupt):
        score_file(source, out, full, SMALL)
    assert not out.exists()
    calls.clear()
    monkeypatch.setattr(Predictor, "best_of", lambda self, *given: calls.append(1) or best(self, *given))
    score_file(source, out, full, SMALL)
    assert len(calls) == 7 - 2 * killed_at and digest(out) == digest(tmp_path / "whole.parquet")


@pytest.mark.parametrize("inside", ["a part", "the output"])
def test_a_run_killed_in_a_write_leaves_no_half_of_it(models, tmp_path, monkeypatch, inside):
    full, source = models[1][0], written(tmp_path / "in.parquet", histories(14))
    score_file(source, tmp_path / "whole.parquet", full, SMALL)
    out, writes, write = tmp_path / "out.parquet", [], pq.ParquetWriter.write_table

    def dies(writer, table, *given, **options):
        write(writer, table, *given, **options)
        writes.append(len(table))
        if writes == (
            [4, 4] if inside == "a part" else [4, 4, 4, 2, 4, 4]
        ):  # of parts, and again of the output
            raise KeyboardInterrupt

    with monkeypatch.context() as killed:
        killed.setattr(pq.ParquetWriter, "write_table", dies)
        with pytest.raises(KeyboardInterrupt):
            score_file(source, out, full, SMALL)
    whole = [*(tmp_path / ".out.parquet.parts").glob("*.parquet")]
    assert not out.exists() and len(whole) == (1 if inside == "a part" else 4)
    score_file(source, out, full, SMALL)
    assert digest(out) == digest(tmp_path / "whole.parquet")


def test_parts_of_another_run_are_refused(models, tmp_path, monkeypatch):
    source, out = written(tmp_path / "in.parquet", histories(9)), tmp_path / "out.parquet"
    with monkeypatch.context() as broken:
        broken.setattr("tritonrec.serving.score_file._join", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            score_file(source, out, models[1][0], SMALL)
    for model, config, name in (
        (models[1][1], SMALL, "model"), (models[1][0], ScoreConfig(batch=3, part=4, k=6), "settings"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"another {name}: remove it"):
            score_file(source, out, model, config)
    os.utime(source, (1, 1))  # written again, of as many bytes
    with pytest.raises(ValueError, match="unfinished run with another source: remove it"):
        score_file(source, out, models[1][0], SMALL)


def test_a_run_without_a_whole_part_leaves_none_in_the_way_and_the_source_is_kept(models, tmp_path):
    source, out = written(tmp_path / "in.parquet", [[1], []]), tmp_path / "out.parquet"
    with pytest.raises(ValueError, match="row 1"):
        score_file(source, out, models[1][0], SMALL)
    before = written(source, [[1], [2]]).read_bytes()
    (tmp_path / "link.parquet").symlink_to(source)
    for same in (source, tmp_path / "link.parquet"):
        with pytest.raises(ValueError, match="would replace"):
            score_file(source, same, models[1][0], SMALL)
    assert source.read_bytes() == before
    assert score_file(source, out, models[1][0], SMALL) == 2


@pytest.fixture
def nothing_here(tmp_path, monkeypatch):
    """No folder ``memory:`` is made."""
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    yield
    assert os.listdir(here) == []


@pytest.mark.usefixtures("nothing_here")
def test_a_source_may_be_at_a_url_and_an_output_is_local(models, tmp_path):
    source = written(tmp_path / "in.parquet", histories(5))
    assert score_file(str(source), str(tmp_path / "want.parquet"), models[1][0], SMALL) == 5
    place_of("memory://scored/in.parquet").upload(source)
    for number, (given, out) in enumerate(
        [("memory://scored/in.parquet", tmp_path / "0"), (f"file://{source}", f"file://{tmp_path}/1")]
    ):
        words = ["score", given, str(out), "--model", str(models[0][0]), "--k", "5"]
        assert CliRunner().invoke(app, [*words, "--part", "4"]).exit_code == 0
        assert pq.read_table(tmp_path / str(number)) == pq.read_table(tmp_path / "want.parquet")
    words = ["score", str(source), "memory://scored/out.parquet", "--model", str(models[0][0])]
    result = CliRunner(env={"COLUMNS": "400"}).invoke(app, words)
    assert result.exit_code == 2 and "/out.parquet: a file of scores cannot be at a URL" in result.output


def test_a_source_that_is_no_file_or_is_not_what_was_written_is_refused(models, tmp_path):
    out, full = tmp_path / "out.parquet", models[1][0]
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for number in range(2):
        written(tmp_path / "folder" / f"{number}.parquet", [[1]])
    for name, says in (("pipe", "neither a file nor a folder"), ("folder", "has 2 files: score one")):
        with pytest.raises(ValueError, match=f"{name}.*{says}"):
            score_file(tmp_path / name, out, full, SMALL)
    source = tmp_path / "in.parquet"
    table = pa.table({"history": histories(9), "other": pa.array(range(9), pa.int32())})
    pq.write_table(table, source, write_page_checksum=True, compression="none", use_dictionary=False)
    content = bytearray(source.read_bytes())
    at = content.index(np.arange(9, dtype=np.int32).tobytes())
    content[at] ^= 1  # of a column that is kept
    source.write_bytes(content)
    with pytest.raises(ValueError, match=r"in\.parquet cannot be read as Parquet: .*CRC"):
        score_file(source, out, full, SMALL)
    assert not out.exists()


def test_views_of_lists_are_lists(models, tmp_path):
    rows = pa.array(histories(5), pa.list_view(pa.int64()))
    score_file(written(tmp_path / "in.parquet", rows), tmp_path / "views.parquet", models[1][0], SMALL)
    score_file(
        written(tmp_path / "in2.parquet", histories(5)), tmp_path / "lists.parquet", models[1][0], SMALL
    )
    assert digest(tmp_path / "views.parquet") == digest(tmp_path / "lists.parquet")


def test_a_source_that_changes_meanwhile_and_damaged_parts_are_named(models, tmp_path, monkeypatch):
    source, out = written(tmp_path / "in.parquet", histories(9)), tmp_path / "out.parquet"
    with pytest.raises(ValueError, match=r"in\.parquet has changed while it was scored: remove"):
        score_file(source, out, models[1][0], SMALL, lambda *_: os.utime(source, (1, 1)))
    parts = tmp_path / ".out.parquet.parts"
    assert not out.exists() and len(list(parts.glob("*.parquet"))) == 3
    (parts / "plan.json").write_text("")  # as after a power cut
    with pytest.raises(ValueError, match="unfinished run with another model, settings, source: remove it"):
        score_file(source, out, models[1][0], SMALL)
    for each in parts.glob("*.parquet"):
        each.unlink()
    with monkeypatch.context() as broken:
        broken.setattr("tritonrec.serving.score_file._join", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            score_file(source, out, models[1][0], SMALL)
    (parts / "00000001.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match=r"00000001\.parquet is damaged .*: remove it, and call it again"):
        score_file(source, out, models[1][0], SMALL)
    (parts / "00000001.parquet").unlink()
    assert score_file(source, out, models[1][0], SMALL) == 9 and not parts.exists()


@pytest.mark.if_changed
@pytest.mark.every_case
@pytest.mark.parametrize(
    ("rows", "columns", "options", "says"),
    [
        ([[1], [2], [*range(LONGEST + 1)]], {}, ["--part", "1"], "row 2: history 0 has 13 items"),
        ([[1], [], [3]], {}, ["--batch", "1"], "row 1: history 0 has 0 items"),
        ([[1], None], {}, [], "row 1: column 'history' has no list"),
        ([[1], [2, None]], {}, [], "row 1: ids of the history must all be int64, or all words, got None"),
        ([[1], [2]], {"c": [[3], None]}, ["--candidates", "c"], "row 1: column 'c' has no list"),
        ([[1]], {}, ["--history", "events"], "no column 'events'"),
        ([1, 2], {}, [], "column 'history' of"),
        ([[1]], {}, ["--candidates", "history"], "named twice"),
        ([[1]], {"scores": [1.0]}, [], "has a column 'scores' already"),
        ([[1]], {}, ["--k", "61"], "error: k must be in [1, 59]"),
    ],
)
def test_what_cannot_be_scored_is_named(models, tmp_path, rows, columns, options, says):
    source, out = written(tmp_path / "in.parquet", rows, **columns), tmp_path / "out.parquet"
    words = ["score", str(source), str(out), "--model", str(models[0][0]), *options]
    result = CliRunner(env={"COLUMNS": "400"}).invoke(app, words)
    assert result.exit_code == 2 and says in " ".join(result.output.split()), result.output
    assert not out.exists()


def test_the_command(models, tmp_path):
    source, out = written(tmp_path / "in.parquet", histories(5)), tmp_path / "out.parquet"
    words = ["score", str(source), str(out), "--model", str(models[0][0]), "--k", "3"]
    result = CliRunner(env={"COLUMNS": "400"}).invoke(app, words)
    assert result.exit_code == 0 and "scored 5 rows" in result.output, result.output
    assert pq.read_table(out)["items"].to_pylist() == models[1][0].retrieve(histories(5), 3)[0].tolist()
