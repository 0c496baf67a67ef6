"""A log of events in Parquet as users' sequences or windows, written once into a folder of the cache.

A user's events stand anywhere in a log, and a sample needs all of them. So the first run deals the rows to
buckets by user and writes sequences (`convert_sequences`) or windows of impressions (`convert_windows`), in
the memory of one bucket; later runs stream what is there. The folder's name comes from path, size and time of
change of each file, so a log that has changed is grouped anew. Folders stay until somebody removes them.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from tritonrec.data.movielens import cache_directory
from tritonrec.files import check_writable

FILE_USERS, GROUP_USERS = 1 << 17, 1 << 9
"""Users of a file, and of a row group, which is what a reader of a stream reads."""


def sequences_of(path: str, report: Callable[[int], None] = lambda rows: None) -> Path:
    """The folder with the sequences of the log at `path`, for `NextItemStream`; written where it is missing.

    Of several processes that want it one writes, and the others wait.

    Args:
        path: as `ParquetRows` takes it. report: called with numbers of interactions that were read.

    Raises the errors of `tritonrec.data.parquet.parts`, and OSError naming the folder where the cache
    (``$TRITONREC_CACHE`` or ``~/.cache/tritonrec``) cannot be written to.
    """

    def write(scratch: Path) -> None:
        from tritonrec.data.convert_sequences import buckets_of, write_sequences
        from tritonrec.data.parquet import parts

        write_sequences(parts(path), scratch, FILE_USERS, GROUP_USERS, report, buckets_of(path))

    return _made("sequences", _name(path, FILE_USERS, GROUP_USERS), write)


def windows_of(
    path: str, max_history: int, max_exposed: int, report: Callable[[int], None] = lambda rows: None
) -> Path:
    """The folder with the windows of the log at `path`, for `ImpressionStream`, as `sequences_of`.

    Args:
        max_history, max_exposed: as `ImpressionLoader`, whose errors are raised.
    """

    def write(scratch: Path) -> None:
        from tritonrec.data.convert_sequences import buckets_of
        from tritonrec.data.convert_windows import write_windows
        from tritonrec.data.parquet import features_beside, parts

        sizes = (max_history, max_exposed, GROUP_USERS)
        write_windows(parts(path), scratch, *sizes, report, buckets_of(path), *features_beside(path))

    return _made("windows", _name(path, max_history, max_exposed, GROUP_USERS), write)


def _made(kind: str, name: str, write: Callable[[Path], None]) -> Path:
    """The folder `name` of the cache, made by `write` where it is missing."""
    from tritonrec.data.convert import new_folder

    folder = cache_directory() / kind / name
    if folder.is_dir():
        return folder
    check_writable(folder, folder=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            with new_folder(folder) as scratch:
                write(scratch)
    return folder


def _name(path: str, *settings: int) -> str:
    """Of the folder: the same for the same files and settings."""
    from tritonrec.data.parquet import ITEMS_FILE, USERS_FILE
    from tritonrec.data.parquet_rows import filesystem_of, shards

    filesystem, place = filesystem_of(path)
    root, files = shards(filesystem, place, path)
    beside = [f"{root.rstrip('/')}/{name}" for name in (USERS_FILE, ITEMS_FILE)]
    digest = sha256(f"{settings} {filesystem.type_name}".encode())
    for about in filesystem.get_file_info([*files, *beside]):
        where = Path(about.path).resolve() if filesystem.type_name == "local" else about.path
        digest.update(f"\n{where} {about.size} {about.mtime_ns}".encode())
    return digest.hexdigest()[:16]
