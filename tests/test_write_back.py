"""Promise: what a disk did not keep, though the system took it, is an error before it is read."""

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tritonrec.data.parquet_rows import DecodedGroups, ParquetRows, RowReader
from tritonrec.embedding.index_file import IndexFile
from tritonrec.embedding.row_file import RowFile
from tritonrec.files import write_back


@pytest.fixture
def failing(monkeypatch):
    """The disk's next error, which is told once, as the kernel tells it."""
    disk = SimpleNamespace(error=0)

    def told(_file):
        error, disk.error = disk.error, 0
        return error

    monkeypatch.setattr(write_back, "write_back_error", told)
    return disk


def test_a_file_that_is_whole_has_no_error(tmp_path):
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        file.write(os.urandom(1 << 20))
        file.flush()
        assert write_back.write_back_error(file.fileno()) == 0


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize(
    "number, advice", [(errno.EIO, "check that disk"), (errno.ENOSPC, "free space there")]
)
def test_rows_that_a_disk_lost_are_an_error_from_then_on(tmp_path, failing, write, number, advice):
    file, rows = RowFile(str(tmp_path), 24), torch.arange(5, dtype=torch.int64)
    file.grow(5)
    values = torch.randn(5, 6)
    file.write(rows, values, rows)
    failing.error = number
    for _ in range(2):
        with pytest.raises(OSError, match=rf"rows are lost: .*{advice}.*go on from the last") as raised:
            (file.write if write else file.read)(rows, values, rows)
        assert raised.value.errno == number
        assert str(tmp_path) in str(raised.value)


def test_keys_that_a_disk_lost_are_an_error(tmp_path, failing):
    index = IndexFile(str(tmp_path), 64)
    keys = np.arange(9, dtype=np.uint64)
    index.put(keys, np.arange(9))
    failing.error = errno.EIO
    with pytest.raises(OSError, match=r"file of keys .* rows are lost"):
        index.find(keys)


def test_rows_of_a_log_that_a_disk_lost_are_an_error(tmp_path, failing):
    pq.write_table(pa.table({"x": np.arange(100)}), tmp_path / "a.parquet")
    rows = ParquetRows(tmp_path)
    reader = RowReader(rows, at_once=16, decoded=DecodedGroups(rows, [0], 16))
    (whole,) = rows.stretches([0])
    assert reader.read(whole)["x"].to_pylist() == list(range(100))
    failing.error = errno.EIO
    with pytest.raises(
        ValueError, match=r"a\.parquet: row group 0 cannot be read: .*0\.arrow, where .* lost rows"
    ):
        reader.read(whole)


def mounted(folder, script):
    """Run a script with the argument ``DISK``, a file system of 300 MB on a device that takes but 24."""
    (folder / "run.py").write_text(textwrap.dedent(script))
    (folder / "run.sh").write_text(
        textwrap.dedent(
            f"""
            set -e
            mkdir small disk
            mount -t tmpfs -o size=24m tmpfs small
            truncate -s 300M small/device
            mkfs.ext4 -q -O ^has_journal small/device
            mount -o loop small/device disk || {{ echo NO LOOP DEVICE; exit 0; }}
            {sys.executable} run.py disk
            """
        )
    )
    command = ["unshare", "--mount", "bash", "run.sh"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("mkfs.ext4"), reason="a disk that fails is mounted by root"
)
def test_a_disk_that_fails_after_the_write_is_named(tmp_path):
    run = mounted(
        tmp_path,
        """
        import subprocess, sys, torch
        from tritonrec.embedding.row_file import RowFile

        file, rows = RowFile(sys.argv[1], 4096), torch.arange(12_000)
        file.grow(len(rows))
        values = torch.randn(len(rows), 1024)
        file.write(rows, values, rows)
        subprocess.run(["sync", "-f", sys.argv[1]], stderr=subprocess.DEVNULL)
        with open("/proc/sys/vm/drop_caches", "w") as caches:
            caches.write("1")
        found = torch.empty_like(values)
        try:
            file.read(rows, found, rows)
        except OSError as error:
            print("NAMED", error.errno, error)
        print("LOST", not torch.equal(found, values))
        """,
    )
    if "NO LOOP DEVICE" in run.stdout:
        pytest.skip("no loop device can be mounted here")
    assert "LOST True" in run.stdout, run.stdout + run.stderr
    assert f"NAMED {errno.EIO}" in run.stdout and "rows are lost" in run.stdout
