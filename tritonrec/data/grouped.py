"""A log as the shards that are streamed, written once into a folder of the cache.

A user's events stand anywhere in a log, and a sample needs all of them. So the first run deals the rows to
buckets by user and writes sequences (`convert_sequences`) or windows of impressions (`convert_windows`), in
the memory of one bucket; clicks as text become Parquet row by row (`convert_clicks`). Later runs stream from
there. The folder's name comes from path, size and time of change of each file, so a log that has changed is
written anew. Folders stay until somebody removes them.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from tritonrec.data.loader import LEAVE_ONE_OUT
from tritonrec.data.movielens import cache_directory
from tritonrec.data.sources import Source, source_of
from tritonrec.data.splits import Split
from tritonrec.data.vocabulary import Vocabulary, kept_on_error, save_words, words_of
from tritonrec.files import check_writable

if TYPE_CHECKING:
    import pyarrow.fs as pafs

    from tritonrec.data.event_log import EventLog
    from tritonrec.data.log_format import LogFormat

FILE_USERS, GROUP_USERS = 1 << 17, 1 << 9
"""Users of a file, and of a row group, which is what a reader of a stream reads."""
FILE_CLICKS, GROUP_CLICKS = 1 << 20, 1 << 13
"""The same of clicks."""
LAYOUT = 2
"""Of the folders: a reader that understands a log otherwise writes it anew."""


def sequences_of(
    source: str,
    report: Callable[[int], None] = lambda rows: None,
    format: LogFormat | None = None,
    words: dict[str, Vocabulary] | None = None,
) -> Path:
    """The folder with the sequences of a log, for `NextItemStream`; written where it is missing.

    Of several processes that want it one writes, and the others wait.

    Args:
        source, format: of a log of events in files, as `tritonrec.data.load` takes them.
        report: called with numbers of interactions that were read.
        words: for ``ids="words"`` the vocabularies of ``"user"`` and ``"item"``, which get the log's new
            words; those of the log are beside its shards too (`words_of`).

    Raises the errors of `load`, ValueError where the log changes meanwhile, and OSError naming the folder
    where the cache (``$TRITONREC_CACHE`` or ``~/.cache/tritonrec``) cannot be written to.
    """

    def write(log: EventLog, scratch: Path) -> None:
        from tritonrec.data.convert_sequences import buckets_of, write_sequences

        buckets = buckets_of(log.rows())
        write_sequences(log.parts(), scratch, FILE_USERS, GROUP_USERS, report, buckets)

    return _events_made("sequences", source, format, words, write, FILE_USERS, GROUP_USERS)


def windows_of(
    source: str,
    max_history: int,
    max_exposed: int,
    report: Callable[[int], None] = lambda rows: None,
    format: LogFormat | None = None,
    words: dict[str, Vocabulary] | None = None,
    split: Split = LEAVE_ONE_OUT,
) -> Path:
    """The folder with the windows of a log, for `ImpressionStream`, as `sequences_of`.

    Args:
        max_history, max_exposed, split: as `ImpressionLoader`, whose errors are raised.
    """
    sizes = (max_history, max_exposed, GROUP_USERS)

    def write(log: EventLog, scratch: Path) -> None:
        from tritonrec.data.convert_sequences import buckets_of
        from tritonrec.data.convert_windows import write_windows

        buckets = buckets_of(log.rows())
        write_windows(log.parts(), scratch, *sizes, report, buckets, *log.features(), split)

    other = ("label rule",) if split == LEAVE_ONE_OUT else ("label rule", str(split))
    return _events_made("windows", source, format, words, write, *sizes, *other)


def _events_made(
    kind: str,
    source: str,
    format: LogFormat | None,
    words: dict[str, Vocabulary] | None,
    write: Callable[[EventLog, Path], None],
    *settings: int | str,
) -> Path:
    """The folder of a log of events; `words` get those of the log."""
    known = {} if words is None else words
    log = _in_files(source, format).events(known)
    assert log.place is not None
    place = (log.place.filesystem, log.files)
    return _made(known, kind, source, *place, lambda scratch: write(log, scratch), *settings, log.format)


def _digest(vocabulary: Vocabulary) -> str:
    digest = sha256()
    for tensor in vocabulary.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def clicks_of(
    source: str,
    report: Callable[[int], None] = lambda rows: None,
    format: LogFormat | None = None,
    words: dict[str, Vocabulary] | None = None,
) -> Path:
    """The folder with clicks as Parquet in plain columns, for `ClickStream`, as `sequences_of`.

    Args:
        source, format: of a log of clicks in files.
        words: for ``ids="words"`` a vocabulary of each category.
    """
    from tritonrec.data.convert_clicks import write_clicks

    found, known = _in_files(source, format), {} if words is None else words
    log = found.clicks(known)
    assert log.place is not None

    def write(scratch: Path) -> None:
        write_clicks(log.tables(), scratch, FILE_CLICKS, GROUP_CLICKS, report)

    about = log.place.filesystem, log.place.files, write, FILE_CLICKS, GROUP_CLICKS, found.format
    return _made(known, "clicks", source, *about)


def _in_files(source: str, format: LogFormat | None) -> Source:
    found = source_of(source, format)
    if found is None:
        raise ValueError(f"{source} is not in files: load it whole")
    return found


def _made(
    words: dict[str, Vocabulary],
    kind: str,
    source: str,
    filesystem: pafs.FileSystem,
    files: list[str],
    write: Callable[[Path], None],
    *settings: object,
) -> Path:
    """The folder of the cache for these files and settings, made by `write` where it is missing.

    `write` numbers `words`, which are kept beside what it writes; they get those of the folder.
    """
    from tritonrec.data.convert import new_folder

    before = [(role, _digest(words[role])) for role in sorted(words)]
    name = _name(filesystem, files, (*settings, before))
    folder = cache_directory() / kind / name
    if not folder.is_dir():
        check_writable(folder, folder=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with kept_on_error(words), open(f"{folder}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                with new_folder(folder) as scratch:
                    write(scratch)
                    save_words(words, scratch)
                    if _name(filesystem, files, (*settings, before)) != name:
                        raise ValueError(
                            f"{source} has changed while it was read: begin again when it is complete"
                        )
    for role, vocabulary in words_of(folder).items():
        words.setdefault(role, vocabulary).load_state_dict(vocabulary.state_dict())
    return folder


def _name(filesystem: pafs.FileSystem, files: list[str], settings: tuple[object, ...]) -> str:
    """Of the folder: the same for the same files and settings."""
    digest = sha256(f"{LAYOUT} {settings} {filesystem.type_name}".encode())
    for about in filesystem.get_file_info(files):
        where = Path(about.path).resolve() if filesystem.type_name == "local" else about.path
        changed = about.mtime_ns
        if changed is None and about.is_file:  # fsspec's file systems have their own word for a file's state
            changed = filesystem.handler.fs.ukey(about.path)
        digest.update(f"\n{where} {about.size} {changed}".encode())
    return digest.hexdigest()[:16]
