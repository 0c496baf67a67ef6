"""Promise: `tritonrec train` streams a log in Parquet or text, in the same bits at any number of ranks."""

import gzip
import itertools
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import invoke
from speeds import slow_except

from tritonrec.data import NextItemLoader, load
from tritonrec.data.parquet import table_of
from tritonrec.data.presets import CRITEO_CATEGORIES as CATEGORIES
from tritonrec.data.presets import CRITEO_COUNTS as COUNTS
from tritonrec.distributed import Communicators
from tritonrec.harness import streams
from tritonrec.harness.job import Job
from tritonrec.harness.train.loop import train
from tritonrec.harness.train.run import Run
from tritonrec.nn import HSTUConfig
from tritonrec.pipeline import WindowConfig

SIZES = HSTUConfig(dim=8, layers=1, heads=2, qk_dim=4, v_dim=4, max_seq_len=10)
pytestmark = pytest.mark.multi_rank


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITONREC_CACHE", str(tmp_path / "cache"))
    yield
    streams._grouped.cache_clear()
    streams._windows.cache_clear()
    streams._clicks.cache_clear()


@pytest.fixture
def events(tmp_path):
    """A job on a log of events."""
    (tmp_path / "log").mkdir()
    table = table_of(load("zipf:users=90,items=80,median_length=6,seed=3"))
    for number in range(2):
        pq.write_table(table.take(np.arange(number, len(table), 2)), tmp_path / "log" / f"{number}.parquet")
    return Job(f"parquet:{tmp_path}/log", batch_size=16, max_seq_len=10, num_negatives=2, sizes=SIZES)


@pytest.fixture
def clicks(tmp_path):
    """A job on clicks in Criteo's format."""
    log = load("criteo:samples=150,scale=0.0001,seed=3")
    columns = {"label": pa.array(log.labels)}
    columns |= {name: pa.array(np.expm1(log.dense[:, at])) for at, name in enumerate(COUNTS)}
    columns |= {name: pa.array(log.categories[:, at]) for at, name in enumerate(CATEGORIES)}
    (tmp_path / "clicks").mkdir()
    pq.write_table(pa.table(columns), tmp_path / "clicks" / "day.parquet", row_group_size=20)
    return Job(f"criteo-parquet:{tmp_path}/clicks", "dlrm", batch_size=16, sizes=SIZES, bottom=(8,), top=(8,))


@pytest.fixture
def impressions(tmp_path):
    """A job of GRM on a log of ratings."""
    (tmp_path / "ratings").mkdir()
    table = table_of(load("zipf:users=60,items=80,median_length=9,ratings=1,seed=3"))
    pq.write_table(table, tmp_path / "ratings" / "0.parquet", row_group_size=100)
    return Job(
        f"parquet:{tmp_path}/ratings", "grm", batch_size=16, max_seq_len=10, max_exposed=3, sizes=SIZES,
        context_dim=4,
    )  # fmt: skip


def as_text(table, path, names, delimiter, header=True):
    """The columns of a table as compressed text."""
    lines = [delimiter.join(names)] if header else []
    for row in zip(*(table[name].to_pylist() for name in names), strict=True):
        lines.append(delimiter.join("" if value is None else str(value) for value in row))
    path.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode()))


@pytest.fixture
def csv_events(events, tmp_path):
    """The job on the same log as compressed CSV."""
    table = pq.read_table(tmp_path / "log")
    as_text(table, tmp_path / "log.csv.gz", ("user", "item", "timestamp"), ",")
    return replace(events, data=f"csv:{tmp_path}/log.csv.gz")


@pytest.fixture
def csv_impressions(impressions, tmp_path):
    """The job on the same ratings as compressed CSV."""
    table = pq.read_table(tmp_path / "ratings")
    as_text(table, tmp_path / "ratings.csv.gz", ("user", "item", "timestamp", "rating"), "\t")
    return replace(impressions, data=f"csv:{tmp_path}/ratings.csv.gz")


@pytest.fixture
def kuairand(impressions, tmp_path):
    """A job of GRM on the same events in KuaiRand's columns, clicks for ratings from 4 on."""
    table = pq.read_table(tmp_path / "ratings")
    (tmp_path / "kuairand").mkdir()
    names = {"user_id": "user", "video_id": "item", "time_ms": "timestamp"}
    columns = {name: table[of] for name, of in names.items()}
    liked = np.asarray(table["rating"]) >= 4
    columns |= {"is_click": pa.array(liked.astype(int)), "long_view": pa.array((~liked).astype(int))}
    path = tmp_path / "kuairand" / "log_standard_a.csv.gz"
    as_text(pa.table(columns), path, tuple(columns), ",")
    return replace(impressions, data=f"kuairand:{tmp_path}/kuairand")


@pytest.fixture
def tsv_clicks(clicks, tmp_path):
    """The job on the same clicks as compressed text, whose counts are whole numbers."""
    table = pq.read_table(tmp_path / "clicks" / "day.parquet")
    whole = {name: np.asarray(table[name]).round().astype(int) for name in COUNTS}
    words = {name: [f"{number:08x}" for number in table[name].to_pylist()] for name in CATEGORIES}
    columns = {"label": table["label"]} | {name: pa.array(each) for name, each in (whole | words).items()}
    as_text(pa.table(columns), tmp_path / "day.gz", tuple(columns), "\t", header=False)
    return replace(clicks, data=f"criteo-tsv:{tmp_path}/day.gz")


@pytest.fixture
def plain_clicks(clicks, tmp_path):
    """The job on the same clicks in columns of other names."""
    table = pq.read_table(tmp_path / "clicks" / "day.parquet")
    plain = {f"site {name}": table[name] for name in CATEGORIES[:5]} | {"label": table["label"]}
    plain["count"] = np.asarray(table[COUNTS[3]], dtype=np.float32)
    pq.write_table(pa.table(plain), tmp_path / "plain.parquet", row_group_size=11)
    return replace(clicks, data=f"clicks:{tmp_path}/plain.parquet")


@pytest.fixture
def ali_ccp(clicks, tmp_path):
    """The job on categories of the same clicks in Ali-CCP's files, two to a user."""
    table = pq.read_table(tmp_path / "clicks" / "day.parquet")
    ids = {name: table[name].to_pylist() for name in CATEGORIES[:3]}
    folder = tmp_path / "ali"
    folder.mkdir()
    common = [f"u{row},1,101\x02{ids['C1'][row]}\x031.0" for row in range(0, len(table), 2)]
    rows = [
        f"{row},{int(label)},0,u{row // 2 * 2},2,"
        f"205\x02{ids['C2'][row]}\x031.0\x01301\x02{ids['C3'][row]}\x031.0"
        for row, label in enumerate(table["label"].to_pylist())
    ]
    (folder / "common_features_a.csv").write_text("\n".join(common) + "\n")
    (folder / "sample_skeleton_a.csv").write_text("\n".join(rows) + "\n")
    return replace(clicks, data=f"ali-ccp:{folder}")


TEXT = {"csv_events": "events", "csv_impressions": "impressions"}
KINDS = ["events", "clicks", "impressions", *TEXT, "kuairand", "tsv_clicks", "plain_clicks", "ali_ccp"]


@pytest.mark.if_changed
@pytest.mark.parametrize("kind", slow_except(["events", "tsv_clicks"], KINDS))
def test_a_run_goes_on_at_another_world_size_with_the_bits_of_the_reference(kind, request, pool, tmp_path):
    job = request.getfixturevalue(kind)
    reference = train(Communicators.local(), Run(job, "reference", WindowConfig(1), steps=8), quiet=True)
    run = Run(job, "nestpipe", WindowConfig(2), steps=5, checkpoint=tmp_path / "saved")
    assert pool.run(train, 2, run, True)[0]["step"] == 5
    ended = train(Communicators.local(), replace(run, steps=8, resume=True), quiet=True)
    assert ended["digest"] == reference["digest"] and ended["metrics"] == reference["metrics"]


def content(batch):
    lookups = batch.lookups()
    columns = (batch.sample_ids, batch.timestamps, batch.labels, *(each.ids for each in lookups.values()))
    return [*lookups, *(column.tolist() for column in columns)]


@pytest.mark.if_changed
@pytest.mark.parametrize("kind", TEXT)
def test_text_and_parquet_of_one_log_are_one_stream(kind, request):
    text, parquet = request.getfixturevalue(kind), request.getfixturevalue(TEXT[kind])
    ours, theirs = text.loader(), parquet.loader()
    assert ours.num_samples == theirs.num_samples > 0
    for step in range(ours.steps_per_epoch + 1):
        assert content(ours.batch(step)) == content(theirs.batch(step))


@pytest.mark.parametrize("kind", ["csv_events", "csv_impressions", "kuairand", "tsv_clicks", "ali_ccp"])
def test_text_is_written_as_shards_once(kind, request, tmp_path, capfd):
    job = request.getfixturevalue(kind)
    first = job.loader()
    said = capfd.readouterr().err
    assert said.count(": later runs stream from there") == 1 and job.data in said
    for cached in (streams._grouped, streams._windows, streams._clicks):
        cached.cache_clear()
    again = job.loader()
    assert capfd.readouterr().err == "" and again.rows.files == first.rows.files
    assert not isinstance(replace(job, stream=False).loader(), type(first))


@pytest.mark.if_changed
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_has_its_own_samples(kind, request):
    job = request.getfixturevalue(kind)
    ranks = [job.loader(rank, 3).batch(0).sample_ids.tolist() for rank in range(3)]
    assert sorted(itertools.chain(*ranks)) == sorted(job.loader().batch(0).sample_ids.tolist()) and all(ranks)


def test_the_first_run_says_where_the_sequences_are_and_the_second_reads_them(events, tmp_path, capfd):
    first = events.loader()
    said = capfd.readouterr().err
    assert f"{events.data} is grouped by user in {tmp_path}/cache/sequences/" in said
    streams._grouped.cache_clear()
    again = events.loader()
    assert capfd.readouterr().err == "" and again.rows.files == first.rows.files
    folder = said.partition(" in ")[2].partition(": later")[0]
    written = replace(events, data=f"parquet:{folder}").loader()
    assert np.array_equal(written.batch(3).sample_ids, first.batch(3).sample_ids)


def test_a_log_is_read_whole_where_that_is_wanted(events, clicks, tmp_path):
    assert isinstance(replace(events, stream=False).loader(), NextItemLoader)
    assert not (tmp_path / "cache").exists()
    for job in (events, clicks):
        with pytest.raises(ValueError, match="dynamic, or --no-stream for a log that can be read whole"):
            replace(job, balance=True).loader()
        assert replace(job, balance=True, stream=False).loader().batch(0).num_samples == 16
    with pytest.raises(ValueError, match="dynamic cuts streams of hstu, fuxi, sasrec: choose --no-stream"):
        replace(clicks, dynamic=True).loader()


def test_the_command_streams_unless_it_is_told_not_to(events):
    words = [
        "--data",
        events.data,
        "--steps",
        "2",
        "--batch-size",
        "16",
        "--dim",
        "8",
        "--micro-batches",
        "2",
    ]
    code, output, _error = invoke("train", *words)
    assert code == 0 and "is grouped by user in" in output
    code, output, _error = invoke("train", *words, "--no-stream", "--print-config")
    assert code == 0 and "stream = false" in output
