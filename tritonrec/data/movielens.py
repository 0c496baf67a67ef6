"""MovieLens-100K: 100,000 ratings of 1,682 films by 943 people (Harper and Konstan, TiiS 2015).

The log and two files about users and films are part of the recbole 1.2.1 wheel. They are extracted from the
wheel once, without an installation, checked by their checksums, and cached in ``$TRITONREC_CACHE`` or
``~/.cache/tritonrec``; afterwards no network is needed. ``tritonrec fetch`` does this ahead of time.
"""

from __future__ import annotations

import csv
import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from tritonrec.data.interactions import Interactions, ItemGenres, UserFeatures, numbered
from tritonrec.data.log_format import LogFormat
from tritonrec.files import ScratchFolder
from tritonrec.files.places import local_path, read_document

PACKAGE = "recbole==1.2.1"
FOLDER = "recbole/dataset_example/ml-100k/"
FILES = {
    "ml-100k.inter": "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",
    "ml-100k.user": "4f670007d9cfbeb9807e757209af1555b9bcc186bde25e767f67cb67c6dd5972",
    "ml-100k.item": "51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532",
}
DOWNLOAD_SECONDS = 300
AGE_BUCKETS = (18, 25, 35, 45, 50, 56)  # first year of the second bucket and on, as in MovieLens-1M


def cache_directory() -> Path:
    """``$TRITONREC_CACHE`` if it is set, else ``~/.cache/tritonrec``. ValueError for a URL."""
    chosen = os.environ.get("TRITONREC_CACHE") or "~/.cache/tritonrec"
    try:
        return local_path(chosen, "the cache that TRITONREC_CACHE names").expanduser()
    except RuntimeError as error:
        raise RuntimeError(f"{chosen}: {error} Set TRITONREC_CACHE to a folder for data") from error


def load() -> Interactions:
    """The log with features of users and films, fetched first if needed; raises the errors of `fetch`.

    User features: ``age`` (1 to 7, `AGE_BUCKETS`), ``gender`` and ``occupation`` (words numbered from 1 in
    alphabetical order). Genres: the words of a film's class, numbered in the same way.
    """
    path = fetch()
    from tritonrec.data.event_log import EventLog  # pyarrow takes half a second to import

    log = EventLog(str(path), LogFormat(time_unit="s"), "csv").read()
    features = _users(path.with_name("ml-100k.user"))
    return replace(log, user_features=features, genres=_genres(path.with_name("ml-100k.item")))


def fetch() -> Path:
    """Path of ``ml-100k.inter`` in the cache, beside the other `FILES`, all of them verified.

    Fills the cache by ``pip download`` if needed. Raises RuntimeError with advice where the download fails or
    a checksum differs.
    """
    cache = cache_directory()
    missing = [name for name in FILES if not (cache / name).exists()]
    for name in FILES.keys() - missing:
        found = hashlib.sha256(read_document(cache / name, "file of the log")).hexdigest()
        if found != FILES[name]:
            raise RuntimeError(
                f"{cache / name} is damaged: its sha256 is {found}, expected {FILES[name]}. "
                "Delete the file and run again"
            )
    if missing:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            # In the cache folder, so that the final rename stays on one file system.
            folder = ScratchFolder("ml-100k-", cache)
        except OSError as error:
            raise RuntimeError(
                f"MovieLens-100K cannot be cached in {cache}: {error.strerror}. Set TRITONREC_CACHE to a "
                "writable folder, or to one with the files"
            ) from error
        with folder as scratch:
            wheel = _download(Path(scratch))
            for name in missing:
                _keep(wheel, name, Path(scratch))
    return cache / "ml-100k.inter"


def _keep(wheel: Path, name: str, scratch: Path) -> None:
    """Move one of `FILES` from the wheel into the cache, if its checksum is right."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(FOLDER + name)
    except (KeyError, zipfile.BadZipFile) as error:
        raise RuntimeError(f"{wheel.name} does not hold {FOLDER}{name}: {error}") from error
    found = hashlib.sha256(content).hexdigest()
    if found != FILES[name]:
        raise RuntimeError(
            f"{FOLDER}{name} of {PACKAGE} has sha256 {found}, expected {FILES[name]}: it was not kept"
        )
    (scratch / name).write_bytes(content)
    # Several processes may do this at once, with the same bytes.
    os.replace(scratch / name, cache_directory() / name)


def _users(path: Path) -> UserFeatures:
    columns = _columns(path)
    ids = np.array(columns["user_id"], dtype=np.int64)
    features = {
        "age": np.searchsorted(AGE_BUCKETS, np.array(columns["age"], dtype=np.int64), side="right") + 1,
        "gender": numbered(columns["gender"]),
        "occupation": numbered(columns["occupation"]),
    }
    order = np.argsort(ids)
    return UserFeatures(ids[order], {name: column[order] for name, column in features.items()})


def _genres(path: Path) -> ItemGenres:
    columns = _columns(path)
    ids = np.array(columns["item_id"], dtype=np.int64)
    return ItemGenres.of_words(ids, [own.split() for own in columns["class"]])


def _columns(path: Path) -> dict[str, list[str]]:
    """The columns of a tab-separated file with a header of ``name:type``."""
    with path.open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
    return {name.partition(":")[0]: [row[at] for row in rows] for at, name in enumerate(header)}


def _download(directory: Path) -> Path:
    """Download the wheel into `directory` by pip; its path."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(directory), PACKAGE]
    advice = (
        "MovieLens-100K is not in the cache and could not be downloaded. Where pip works, run "
        f"`pip download --no-deps {PACKAGE}`, take {', '.join(FILES)} from {FOLDER} in the wheel (a zip "
        f"file), and put them into {cache_directory()}"
    )
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{advice}. pip gave no answer for {DOWNLOAD_SECONDS} seconds") from error
    wheels = sorted(directory.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        last_lines = "\n".join(result.stderr.strip().splitlines()[-3:])
        raise RuntimeError(f"{advice}. pip ended with {result.returncode}:\n{last_lines}")
    return wheels[0]
