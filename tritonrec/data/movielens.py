"""MovieLens-100K: 100,000 ratings of 1,682 films by 943 people (Harper and Konstan, TiiS 2015).

The log is part of the recbole 1.2.1 wheel. It is taken out of the wheel once, without installing anything,
its checksum is verified, and it is kept under ``$TRITONREC_CACHE`` or ``~/.cache/tritonrec``; afterwards no
network is needed. ``python -m tritonrec.data.movielens`` does it ahead of time.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tritonrec.data import csv_log
from tritonrec.data.interactions import Interactions

PACKAGE = "recbole==1.2.1"
MEMBER = "recbole/dataset_example/ml-100k/ml-100k.inter"
SHA256 = "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff"
DOWNLOAD_SECONDS = 300


def cache_directory() -> Path:
    """``$TRITONREC_CACHE`` if it is set, else ``~/.cache/tritonrec``."""
    chosen = os.environ.get("TRITONREC_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "tritonrec"


def load() -> Interactions:
    """The log, fetched first if the cache has none. Raises what `fetch` raises."""
    return csv_log.read(fetch())


def fetch() -> Path:
    """Path of the verified ``ml-100k.inter`` in the cache, which is filled by ``pip download`` if need be.

    Raises RuntimeError, saying what to do, when the download fails or a checksum differs.
    """
    path = cache_directory() / "ml-100k.inter"
    if path.exists():
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != SHA256:
            raise RuntimeError(
                f"{path} is damaged: its sha256 is {found}, expected {SHA256}. Delete the file and run again"
            )
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the cache itself, so that the rename at the end stays on one file system.
    with tempfile.TemporaryDirectory(prefix="ml-100k-", dir=path.parent) as scratch:
        content = _member(_download(Path(scratch)))
        found = hashlib.sha256(content).hexdigest()
        if found != SHA256:
            raise RuntimeError(
                f"{MEMBER} of {PACKAGE} has sha256 {found}, expected {SHA256}: nothing was kept"
            )
        whole = Path(scratch) / path.name
        whole.write_bytes(content)
        os.replace(whole, path)  # several processes may do this at once: each puts the same bytes there
    return path


def _download(directory: Path) -> Path:
    """Path of the wheel that pip has put into `directory`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(directory), PACKAGE]
    advice = (
        "MovieLens-100K is not in the cache and could not be downloaded. Where pip works, run "
        f"`pip download --no-deps {PACKAGE}`, take {MEMBER} out of the wheel (a zip file), "
        f"and put it at {cache_directory() / 'ml-100k.inter'}"
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


def _member(wheel: Path) -> bytes:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(MEMBER)
    except (KeyError, zipfile.BadZipFile) as error:
        raise RuntimeError(f"{wheel.name} does not hold {MEMBER}: {error}") from error


def main() -> None:
    """Fetch the log; print its path and the number of its rows."""
    path = fetch()
    print(f"{path}: {len(csv_log.read(path)):,} interactions")


if __name__ == "__main__":
    main()
