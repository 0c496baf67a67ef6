"""The formats that `files.py` damages: how a small original is written, and how it is read."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from tritonrec.checkpoint import save
from tritonrec.data import (
    ClickStream,
    ImpressionStream,
    ali_ccp,
    kuairand,
    load,
    parquet,
)
from tritonrec.data.convert_sequences import write_sequences
from tritonrec.data.convert_windows import write_windows
from tritonrec.data.interactions import Interactions, ItemGenres, UserFeatures
from tritonrec.data.log_format import LogFormat
from tritonrec.data.presets import CRITEO_CATEGORIES, CRITEO_COUNTS
from tritonrec.data.sequences import NextItemStream
from tritonrec.serving import Predictor, export
from tritonrec.serving.shards import Format as ShardFormat
from tritonrec.trace import reader

TRACES = Path(__file__).resolve().parents[2] / "traces"


@dataclass(frozen=True)
class Format:
    """A kind of files.

    Args:
        write: makes a folder's files from a draw. read: their content, in parts that compare with ``==``.
        sealed: whether checksums tell every other content. text: whether fields are words of text.
    """

    name: str
    write: Callable[[Path, random.Random], None]
    read: Callable[[Path], list[Any]]
    sealed: bool = False
    text: bool = False


def _content(value: Any) -> Any:
    """Arrays and tensors as bytes, whatever holds them."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.contiguous().numpy().tobytes()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, dict):
        return {name: _content(each) for name, each in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        return {name: _content(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, list | tuple):
        return [_content(each) for each in value]
    return repr(value)


def _log(draw: random.Random, rows: int = 60) -> Interactions:
    numbers = np.random.default_rng(draw.getrandbits(32))
    user, item = numbers.integers(0, 9, rows), numbers.integers(-3, 20, rows)
    users = UserFeatures(np.arange(9), {"age": numbers.integers(0, 7, 9)})
    genres = ItemGenres(np.arange(-3, 20), np.arange(24) * 2, numbers.integers(0, 5, 46))
    rating = numbers.integers(1, 6, rows).astype(np.float64)
    return Interactions(user, item, np.arange(rows) * 7, rating, user_features=users, genres=genres)


def _write_export(format: ShardFormat) -> Callable[[Path, random.Random], None]:
    def write(folder: Path, draw: random.Random) -> None:
        made = torch.Generator().manual_seed(draw.getrandbits(32))
        tables, about = {}, {}
        for number, (name, rows) in enumerate({"item": 40, "none": 0}.items()):
            keys = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=made).unique()
            weights = torch.randn(len(keys), 4, generator=made)
            tables[name] = {"keys": keys, "rows": weights, "score": torch.arange(len(keys)).int()}
            about[name] = {"dim": 3, "seed": 5, "table_id": number, "scale": 0.5}
        features = {name: {"table": name, "pooling": "none"} for name in tables}
        meta = {"embedding": {"tables": about, "features": features}}
        checkpoint = folder.with_name(f"{folder.name}.checkpoint")
        save(checkpoint, 3, {}, tables, meta, rank=0, world_size=1, gather=lambda text: [text])
        folder.rmdir()
        export(checkpoint, folder, format=format, metadata=True, shard_rows=15)
        shutil.rmtree(checkpoint)

    return write


def _read_export(folder: Path) -> list[Any]:
    loaded = Predictor.load(folder)
    return [_content(table) for table in loaded.tables.values()]


def _write_parquet(folder: Path, draw: random.Random) -> None:
    log = _log(draw)
    table = parquet.table_of(log)
    for number, compression in enumerate(("snappy", "none", "zstd")):
        part = table.slice(20 * number, 20)
        pq.write_table(part, folder / f"part-{number}.parquet", row_group_size=7, compression=compression)
    parquet.write_features(log, folder)


def _write_sequences(folder: Path, draw: random.Random) -> None:
    write_sequences([_log(draw)], folder, 4, 2)


def _read_sequences(folder: Path) -> list[Any]:
    return _batches(NextItemStream(folder, 4, 5, 2, seed=3, readers=2), ())


def _write_windows(folder: Path, draw: random.Random) -> None:
    log = _log(draw)
    clicks = np.random.default_rng(draw.getrandbits(32)).integers(0, 2, (2, len(log)))
    log = replace(log, feedback={"is_click": clicks[0], "long_view": clicks[1]})
    write_windows([log], folder, 5, 2, 6, buckets=2, users=log.user_features, genres=log.genres)


def _read_windows(folder: Path) -> list[Any]:
    stream = ImpressionStream(folder, 4, seed=3, readers=2)
    return _batches(stream, stream.evaluation_batches(4))


def _write_clicks(folder: Path, draw: random.Random) -> None:
    numbers = np.random.default_rng(draw.getrandbits(32))
    for number, compression in enumerate(("snappy", "none")):
        columns = {"label": numbers.integers(0, 2, 20), "price": numbers.normal(size=20)}
        columns |= {name: numbers.integers(-(2**40), 2**40, 20) for name in ("site", "device")}
        path = folder / f"part-{number}.parquet"
        pq.write_table(pa.table(columns), path, row_group_size=7, compression=compression)


def _read_clicks(folder: Path) -> list[Any]:
    stream = ClickStream(folder, 4, seed=3, readers=2)
    return _batches(stream, stream.evaluation_batches(4))


def _batches(stream: Any, held_out: Iterable[Any]) -> list[Any]:
    steps = min(stream.steps_per_epoch, 50)
    return [_content(vars(batch)) for batch in (*itertools.islice(stream, steps), *held_out)]


def _write_csv(folder: Path, draw: random.Random) -> None:
    log = _log(draw)
    lines = ["user_id:token,item_id:token,rating:float,timestamp:float"]
    for user, item, rating, time in zip(log.user, log.item, log.rating, log.timestamp, strict=True):
        lines.append(f"u{user},{item},{rating},{time}.5")
    (folder / "log.csv").write_text("\n".join(lines) + "\n")


def _write_packed_csv(folder: Path, draw: random.Random) -> None:
    _write_csv(folder, draw)
    plain = folder / "log.csv"
    with pa.output_stream(str(folder / "log.csv.gz"), compression="gzip") as packed:
        packed.write(plain.read_bytes())
    plain.unlink()


def _write_criteo(folder: Path, draw: random.Random) -> None:
    for number in range(2):
        lines = []
        for _ in range(12):
            counts = [draw.choice(["", str(draw.randrange(-2, 9999))]) for _ in CRITEO_COUNTS]
            words = [draw.choice(["", f"{draw.getrandbits(32):08x}"]) for _ in CRITEO_CATEGORIES]
            lines.append("\t".join([str(draw.randrange(2)), *counts, *words]))
        (folder / f"day_{number}.txt").write_text("\n".join(lines) + "\n")


def _write_ali_ccp(folder: Path, draw: random.Random) -> None:
    def features(fields: tuple[str, ...]) -> tuple[int, str]:
        some = draw.sample(fields, 4)
        return 4, "\x01".join(f"{name}\x02{draw.randrange(10**7)}\x031.0" for name in some)

    common = [(f"c{n}", *features(ali_ccp.USER)) for n in range(3)]
    rows = [(n, draw.randrange(2), 0, f"c{draw.randrange(3)}", *features(ali_ccp.ITEM)) for n in range(12)]
    for name, lines in (("common_features_train", common), ("sample_skeleton_train", rows)):
        text = "".join(",".join(map(str, fields)) + "\n" for fields in lines)
        (folder / f"{name}.csv").write_text(text)


def _write_kuairand(folder: Path, draw: random.Random) -> None:
    lines = ["user_id,video_id,date,hourmin,time_ms,is_click,is_like,long_view,tab"]
    for row in range(30):
        ends = [draw.randrange(2) for _ in range(3)]
        numbers = [draw.randrange(7), draw.randrange(20), 20220408, 1600, 10**12 + row, *ends, 1]
        lines.append(",".join(map(str, numbers)))
    (folder / "log_standard_1.csv").write_text("\n".join(lines) + "\n")
    names = ",".join(kuairand.CONTEXT)
    rows = [
        f"{user}," + ",".join(f'"({draw.randrange(9)},10]"' for _ in kuairand.CONTEXT) for user in range(7)
    ]
    (folder / "user_features_1.csv").write_text("\n".join([f"user_id,{names}", *rows]) + "\n")
    rows = [f'{video},"{draw.randrange(9)},{draw.randrange(9)}"' for video in range(20)]
    (folder / "video_features_basic_1.csv").write_text("\n".join(["video_id,tag", *rows]) + "\n")


def _write_trace(folder: Path, draw: random.Random) -> None:
    shutil.copy(TRACES / f"{draw.choice(['dbp', 'fwp', 'nestpipe'])}.pftrace", folder / "run.pftrace")


def _read_trace(folder: Path) -> list[Any]:
    return [repr(reader.read(folder / "run.pftrace"))]


WORDS = LogFormat(ids="words", time_unit="step")
FORMATS = {
    each.name: each
    for each in (
        Format("export-parquet", _write_export("parquet"), _read_export, sealed=True),
        Format("export-safetensors", _write_export("safetensors"), _read_export, sealed=True),
        Format("parquet-log", _write_parquet, lambda folder: [_content(load(f"parquet:{folder}"))]),
        Format("sequence-shards", _write_sequences, _read_sequences),
        Format("window-shards", _write_windows, _read_windows),
        Format("click-shards", _write_clicks, _read_clicks),
        Format("clicks", _write_clicks, lambda folder: [_content(load(f"clicks:{folder}"))]),
        Format("csv", _write_csv, lambda folder: [_content(load(folder / "log.csv", WORDS))], text=True),
        Format("csv-gz", _write_packed_csv, lambda folder: [_content(load(folder / "log.csv.gz", WORDS))]),
        Format("criteo", _write_criteo, lambda folder: [_content(load(f"criteo-tsv:{folder}"))], text=True),
        Format("ali-ccp", _write_ali_ccp, lambda folder: [_content(load(f"ali-ccp:{folder}"))], text=True),
        Format("kuairand", _write_kuairand, lambda folder: [_content(load(f"kuairand:{folder}"))], text=True),
        Format("trace", _write_trace, _read_trace),
    )
}
