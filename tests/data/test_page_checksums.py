"""Promise: each Parquet file that we write has checksums of its pages, and readers hold it to them."""

import ast
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import tritonrec
from tritonrec.data import Vocabulary, load
from tritonrec.data.convert import convert
from tritonrec.data.parquet_rows import ParquetRows

WANTED = {
    "ParquetWriter": "write_page_checksum",
    "write_table": "write_page_checksum",
    "read_table": "page_checksum_verification",
    "ParquetFile": "page_checksum_verification",
}
FOOTERS = {
    ("tables.py", "found = pq.ParquetFile(source)"),
    ("parquet_rows.py", "found = pq.ParquetFile(source)"),
}
"""Of which no page is read."""


def without_checksums(path: Path) -> list[str]:
    """Calls of pyarrow.parquet in a file that neither name checksums nor take constants."""
    text, found = path.read_text(), []
    for call in ast.walk(ast.parse(text)):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
            continue
        of, name = ast.unparse(call.func.value), call.func.attr
        if of not in ("pq", "parquet", "pyarrow.parquet") or name not in WANTED:
            continue
        named = {word.arg for word in call.keywords}
        line = text.splitlines()[call.lineno - 1].strip()
        if not named & {WANTED[name], None} and (path.name, line) not in FOOTERS:
            found.append(f"{path.name}:{call.lineno}: {line}")
    return found


def test_no_call_of_the_package_leaves_them_out(tmp_path):
    package = Path(tritonrec.__file__).parent
    files = [path for path in package.rglob("*.py") if "pq." in (t := path.read_text()) or "parquet" in t]
    assert len(files) > 10
    assert [line for path in files for line in without_checksums(path)] == []
    (tmp_path / "new.py").write_text(
        "pq.write_table(rows, path)\npq.read_table(path)\npq.ParquetFile(path, x=1)\n"
    )
    assert len(without_checksums(tmp_path / "new.py")) == 3


def flipped(path: Path, column: str) -> None:
    """Flip a bit of the last byte of a column's first chunk, which is of a page and not of its header."""
    group = pq.ParquetFile(path).metadata.row_group(0)
    chunk = next(
        group.column(n) for n in range(group.num_columns) if group.column(n).path_in_schema.startswith(column)
    )
    first = chunk.dictionary_page_offset or chunk.data_page_offset
    with path.open("r+b") as file:
        file.seek(first + chunk.total_compressed_size - 1)
        last = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([last ^ 4]))


@pytest.mark.parametrize("sequences", [False, True])
def test_a_flipped_bit_of_a_converted_log_is_an_error(tmp_path, sequences):
    convert("zipf:users=30,items=40,seed=3", tmp_path / "log", sequences=sequences)
    (path,) = tmp_path.glob("log/part-*")
    flipped(path, "item")
    with pytest.raises(ValueError, match=r"part-00000\.parquet: row group 0 cannot be read: .*CRC checksum"):
        [rows for _, rows in ParquetRows(tmp_path / "log").batches()]
    if not sequences:
        with pytest.raises(ValueError, match=r"part-00000\.parquet.*CRC checksum"):
            load(f"parquet:{tmp_path / 'log'}")


def test_a_flipped_bit_of_words_is_an_error(tmp_path):
    Vocabulary(["some", "words", "of a log"]).save(tmp_path / "words.parquet")
    flipped(tmp_path / "words.parquet", "word")
    with pytest.raises((ValueError, OSError), match="CRC checksum"):
        Vocabulary.load(tmp_path / "words.parquet")
