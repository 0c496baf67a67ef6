"""Where deltas go: a folder, a URL, or streams of Redis.

::

    FOLDER/                                     redis://HOST:PORT/DB?key=KEY
      delta-000000000007.00000                    KEY:deltas:0          a stream per part, the id is 7-1
      snapshot-000000000006/                      KEY:snapshots         a hash of the documents
        manifest.json, item.00000.parquet, ...    KEY:snapshot:6:FILE   an export
        live.json                                 in KEY:snapshots

An object appears whole, and a snapshot is there when its document is, which is written last.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from ...checkpoint.files import flush, names_in, partial_of, publish
from ...files import check_writable
from ...files.places import Place, RemotePath, check_protocol, place_of
from ...optional import require
from ...settings import typed
from .wire import LiveError, SinkError

REDIS_SECONDS = 5.0
"""That a command of Redis, or a connection, may take."""

LARGEST = 512 << 20
"""Bytes of a value in Redis."""

DOCUMENT = "live.json"
_DELTA = re.compile(r"delta-(\d{12})\.(\d{5})")
_SNAPSHOT = re.compile(r"snapshot-(\d{12})")


class Sink(Protocol):
    """A place of one run's deltas and snapshots. All raise SinkError where it cannot be reached.

    Attributes:
        name: for messages.
    """

    name: str

    def prepare(self) -> None:
        """Make the place where it is not there, and see that it can be written to; called once, by rank 0."""
        ...

    def put(self, part: int, sequence: int, content: bytes) -> None:
        """Write a part of a delta; again, if it is there already with these bytes."""

    def get(self, part: int, sequence: int) -> bytes | None:
        """A part of a delta; None where it is not there."""

    def last(self, part: int) -> int:
        """The greatest sequence number of a part; 0 without any."""

    def truncate(self, part: int, after: int) -> None:
        """Remove a part of all deltas `after` a sequence number."""

    def put_file(self, sequence: int, name: str, file: Path) -> None:
        """Write a file of a snapshot."""

    def get_file(self, sequence: int, name: str) -> bytes | None:
        """A file of a snapshot; None where it is not there."""

    def put_document(self, sequence: int, text: str) -> None:
        """Write a snapshot's document, which makes it one."""

    def document(self, sequence: int) -> str | None:
        """A snapshot's document."""

    def snapshots(self) -> list[int]:
        """Sequence numbers of the snapshots, ascending."""

    def opened(self, sequence: int) -> Any:
        """A context manager for the place of a snapshot's files."""

    def prune(self, parts: int, before: int) -> None:
        """Remove snapshots before a sequence number, and the deltas that lead to its state."""


def sink_of(url: str | Place | Sink) -> Sink:
    """A `Sink` from a folder, a URL of fsspec, or ``redis://HOST:PORT/DB?key=KEY``.

    Raises ValueError for a protocol that no package here knows. No store is asked.
    """
    if isinstance(url, str) and url.partition("://")[0] in ("redis", "rediss", "unix"):
        return RedisSink(url)
    return DirectorySink(url) if isinstance(url, (str, Path, RemotePath)) else url


class DirectorySink(Sink):
    """A `Sink` in a folder, or at a URL."""

    def __init__(self, place: Place | str):
        self._place = place_of(place).absolute()
        if isinstance(self._place, RemotePath):
            check_protocol(self._place.url)
        self.name = str(self._place)

    def prepare(self) -> None:
        with self._errors():
            check_writable(self._place, folder=True)
            if not isinstance(self._place, RemotePath):
                self._place.mkdir(parents=True, exist_ok=True)

    def put(self, part: int, sequence: int, content: bytes) -> None:
        self._write(self._delta(part, sequence), content)

    def get(self, part: int, sequence: int) -> bytes | None:
        return self._read(self._delta(part, sequence))

    def last(self, part: int) -> int:
        return max((number for number, own in self._deltas() if own == part), default=0)

    def truncate(self, part: int, after: int) -> None:
        with self._errors():
            for number, own in self._deltas():
                if own == part and number > after:
                    self._delta(part, number).unlink(missing_ok=True)

    def put_file(self, sequence: int, name: str, file: Path) -> None:
        with self._errors():
            place = self._folder(sequence) / name
            place.parent.mkdir(parents=True, exist_ok=True)
            with partial_of(place.parent, name) as partial:
                shutil.copyfile(file, partial)
                publish(partial, place)

    def get_file(self, sequence: int, name: str) -> bytes | None:
        return self._read(self._folder(sequence) / name)

    def put_document(self, sequence: int, text: str) -> None:
        self._write(self._folder(sequence) / DOCUMENT, text.encode())

    def document(self, sequence: int) -> str | None:
        found = self._read(self._folder(sequence) / DOCUMENT)
        return None if found is None else found.decode(errors="replace")

    def snapshots(self) -> list[int]:
        with self._errors():
            found = [int(match[1]) for match in map(_SNAPSHOT.fullmatch, self._names()) if match]
            return sorted(each for each in found if (self._folder(each) / DOCUMENT).is_file())

    @contextmanager
    def opened(self, sequence: int) -> Iterator[Place]:
        yield self._folder(sequence)

    def prune(self, parts: int, before: int) -> None:
        with self._errors():
            for number, part in self._deltas():
                if number <= before:
                    self._delta(part, number).unlink(missing_ok=True)
            for match in map(_SNAPSHOT.fullmatch, self._names()):
                if match and int(match[1]) < before:
                    folder = self._folder(int(match[1]))
                    (folder / DOCUMENT).unlink(missing_ok=True)  # first: it is none from here on
                    flush(folder)  # or a power cut could bring back the document without its files
                    for name in names_in(folder):
                        (folder / name).unlink(missing_ok=True)
                    folder.rmdir()

    def _delta(self, part: int, sequence: int) -> Place:
        return self._place / f"delta-{sequence:012d}.{part:05d}"

    def _folder(self, sequence: int) -> Place:
        return self._place / f"snapshot-{sequence:012d}"

    def _names(self) -> list[str]:
        return names_in(self._place) if self._place.is_dir() else []

    def _deltas(self) -> list[tuple[int, int]]:
        with self._errors():
            return [(int(match[1]), int(match[2])) for match in map(_DELTA.fullmatch, self._names()) if match]

    def _read(self, place: Place) -> bytes | None:
        with self._errors():
            try:
                return place.read_bytes()
            except FileNotFoundError:
                return None

    def _write(self, place: Place, content: bytes) -> None:
        with self._errors():
            if isinstance(place, RemotePath):
                place.write_bytes(content)
                return
            place.parent.mkdir(parents=True, exist_ok=True)
            with partial_of(place.parent, place.name) as partial:
                partial.write_bytes(content)
                publish(partial, place)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SinkError(f"{self.name} cannot be used: {error}") from error


@typed
class RedisSink(Sink):
    """A `Sink` in Redis, by the package redis (extra ``redis``)."""

    def __init__(self, url: str):
        require("redis", f"{url.partition('?')[0]} as a sink")
        import redis

        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query))
        self._key = options.pop("key", "tritonrec")
        self.name = f"{parts.scheme}://{parts.hostname or ''}:{parts.port or 6379}{parts.path} ({self._key})"
        self._redis: Any = redis.Redis.from_url(
            urlunsplit(parts._replace(query=urlencode(options))),
            socket_timeout=REDIS_SECONDS, socket_connect_timeout=REDIS_SECONDS,
        )  # fmt: skip
        self._failure, self._refused = redis.exceptions.RedisError, redis.exceptions.ResponseError

    def prepare(self) -> None:
        with self._errors():
            self._redis.ping()

    def put(self, part: int, sequence: int, content: bytes) -> None:
        self._check_size(f"part {part} of delta {sequence}", len(content))
        with self._errors():
            try:
                self._redis.xadd(self._stream(part), {"delta": content}, id=f"{sequence}-1")
            except self._refused:  # the id is there: of this call, whose answer was lost, or of another's
                if self.get(part, sequence) != content:
                    raise

    def get(self, part: int, sequence: int) -> bytes | None:
        with self._errors():
            found = self._redis.xrange(self._stream(part), f"{sequence}-1", f"{sequence}-1")
            return found[0][1][b"delta"] if found else None

    def last(self, part: int) -> int:
        with self._errors():
            found = self._redis.xrevrange(self._stream(part), count=1)
            return int(found[0][0].split(b"-")[0]) if found else 0

    def truncate(self, part: int, after: int) -> None:
        with self._errors():
            stream = self._stream(part)
            if self.last(part) <= after:
                return
            left = self._redis.xrange(stream, max=f"{after}-1")
            with self._redis.pipeline(transaction=True) as steps:  # a stream takes no id below its greatest
                steps.delete(stream)
                for number, fields in left:
                    steps.xadd(stream, fields, id=number)
                steps.execute()

    def put_file(self, sequence: int, name: str, file: Path) -> None:
        self._check_size(f"{name} of snapshot {sequence}", file.stat().st_size)
        with self._errors():
            self._redis.set(self._file(sequence, name), file.read_bytes())
            self._redis.sadd(self._file(sequence, ""), name)

    def get_file(self, sequence: int, name: str) -> bytes | None:
        with self._errors():
            return self._redis.get(self._file(sequence, name))

    def put_document(self, sequence: int, text: str) -> None:
        with self._errors():
            self._redis.hset(f"{self._key}:snapshots", str(sequence), text)

    def document(self, sequence: int) -> str | None:
        with self._errors():
            found = self._redis.hget(f"{self._key}:snapshots", str(sequence))
            return None if found is None else found.decode(errors="replace")

    def snapshots(self) -> list[int]:
        with self._errors():
            return sorted(int(each) for each in self._redis.hkeys(f"{self._key}:snapshots"))

    @contextmanager
    def opened(self, sequence: int) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="tritonrec-") as folder:
            with self._errors():
                for name in self._redis.smembers(self._file(sequence, "")):
                    content = self._redis.get(self._file(sequence, name.decode()))
                    if content is not None and Path(name.decode()).name == name.decode():
                        Path(folder, name.decode()).write_bytes(content)
            yield Path(folder)

    def prune(self, parts: int, before: int) -> None:
        with self._errors():
            for part in range(parts):
                self._redis.xtrim(self._stream(part), minid=f"{before + 1}-0", approximate=False)
            for sequence in self.snapshots():
                if sequence < before:
                    self._redis.hdel(
                        f"{self._key}:snapshots", str(sequence)
                    )  # first: it is none from here on
                    names = self._redis.smembers(self._file(sequence, ""))
                    keys = [self._file(sequence, name.decode()) for name in names]
                    self._redis.delete(self._file(sequence, ""), *keys)

    def _stream(self, part: int) -> str:
        return f"{self._key}:deltas:{part}"

    def _file(self, sequence: int, name: str) -> str:
        return f"{self._key}:snapshot:{sequence}:{name}"

    def _check_size(self, what: str, size: int) -> None:
        if size > LARGEST:
            raise LiveError(
                f"{what} has {size} bytes, and a value in Redis at most {LARGEST}: use a folder or a URL"
            )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (self._failure, OSError) as error:
            with suppress(Exception):
                self._redis.connection_pool.disconnect()
            raise SinkError(f"{self.name} cannot be used: {type(error).__name__}: {error}") from error
