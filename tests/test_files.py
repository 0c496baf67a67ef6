"""Promise: a file is written whole, or what was there before stays."""

import gc
import json
import os
import subprocess
import sys
import threading
import warnings

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tritonrec.files import ScratchFolder, atomic_write, save_json
from tritonrec.serving.shards import write_shard


def test_a_file_is_replaced_at_the_end_and_nothing_lies_beside_it(tmp_path):
    target = tmp_path / "new" / "report.json"
    save_json({"a": [1]}, target)
    with atomic_write(target) as part:
        part.write_text("{}")
        assert json.loads(target.read_text()) == {"a": [1]}
    assert target.read_text() == "{}" and os.listdir(target.parent) == ["report.json"]


def test_an_error_keeps_what_was_there(tmp_path):
    target = tmp_path / "trace"
    target.write_text("before")
    with pytest.raises(KeyboardInterrupt), atomic_write(target) as part:
        part.write_text("half")
        raise KeyboardInterrupt
    assert target.read_text() == "before" and os.listdir(tmp_path) == ["trace"]
    with pytest.raises(TypeError, match="not JSON serializable"):
        save_json({"a": object()}, target)
    assert target.read_text() == "before"


@pytest.mark.parametrize("format", ["text", "arrow", "parquet", "safetensors"])
def test_a_full_disk_is_named_by_its_file(tmp_path, limited_files, format):
    target = tmp_path / "out"
    columns = {"a": torch.arange(9999)}
    table = pa.table({"a": columns["a"].numpy()})
    with limited_files(100), pytest.raises(OSError, match="File too large") as full:
        if format in ("parquet", "safetensors"):
            write_shard(target, columns, format)
        with atomic_write(target) as part:
            part.write_text("x" * 200) if format == "text" else pq.write_table(table, part)
    assert full.value.filename == str(target)


def test_what_leads_elsewhere_is_not_replaced(tmp_path):
    """A device or a pipe would be gone for everybody, and a link would no longer lead where it led."""
    pipe, target, link = tmp_path / "pipe", tmp_path / "target", tmp_path / "link"
    os.mkfifo(pipe)
    came = []
    reader = threading.Thread(target=lambda: came.append(pipe.read_text()), daemon=True)
    reader.start()
    save_json([1], pipe)
    reader.join(10)
    assert json.loads(came[0]) == [1] and pipe.is_fifo()
    link.symlink_to(target)
    save_json([2], link)
    assert link.is_symlink() and json.loads(target.read_text()) == [2]


def test_long_names_and_permissions_stay(tmp_path):
    target = tmp_path / ("x" * 250 + ".json")
    save_json([1], target)
    target.chmod(0o640)
    save_json([2], target)
    assert json.loads(target.read_text()) == [2] and target.stat().st_mode & 0o777 == 0o640


def test_writers_of_one_file_do_not_see_each_other(tmp_path):
    target = tmp_path / "report.json"
    texts = [json.dumps([number] * 20_000) for number in range(4)]
    mine = tmp_path / "report.json.part"
    mine.write_text("a user's own")
    found = []

    def write(text):
        for _ in range(50):
            with atomic_write(target) as part:
                part.write_text(text)
            found.append(target.read_text() in texts)

    threads = [threading.Thread(target=write, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 200 and all(found)
    assert sorted(os.listdir(tmp_path)) == ["report.json", mine.name] and mine.read_text() == "a user's own"


def test_what_the_output_goes_to_is_not_replaced(tmp_path):
    """As in ``tritonrec plan --json /dev/stdout >> file``: what stands there was not written here."""
    target = tmp_path / "out"
    target.write_text("before\n")
    code = (
        "from tritonrec.files import atomic_write\n"
        "with atomic_write('/dev/stdout') as part: part.open('a').close()"
    )
    with target.open("a") as out:
        inode = os.fstat(out.fileno()).st_ino
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True, timeout=60)
    assert target.stat().st_ino == inode and target.read_text() == "before\n"


@pytest.mark.if_changed
@pytest.mark.parametrize("cleaned", [True, False])
def test_a_scratch_folder_that_is_dropped_leaves_no_process(cleaned, tmp_path):
    folder = ScratchFolder(folder=tmp_path)
    remover = folder._remover
    (tmp_path / os.path.basename(folder.name) / "file").touch()
    assert remover.poll() is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of a folder that is cleaned up without its asking
        if cleaned:
            folder.cleanup()
        del folder
        gc.collect()
    assert remover.poll() == 0 and not os.listdir(tmp_path)


def test_a_scratch_folder_goes_with_its_process(tmp_path):
    code = "import sys; from tritonrec.files import ScratchFolder; kept = ScratchFolder(folder=sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True)
    assert not os.listdir(tmp_path)
