"""Where logs come from, by a word on the command line."""

from __future__ import annotations

from pathlib import Path

from tritonrec.data import csv_log, movielens, zipf
from tritonrec.data.interactions import Interactions


def load(spec: str) -> Interactions:
    """The log that `spec` names.

    ========================================  ============================================================
    ``ml-100k``                               MovieLens-100K, fetched once (`tritonrec.data.movielens`)
    ``zipf``, ``zipf:users=1000,seed=1``      synthetic; options are the fields of `zipf.ZipfOptions`
    ``csv:PATH``                              a file with columns user, item, timestamp and maybe rating
    ``parquet:PATH``                          a file or a folder of them (`tritonrec.data.parquet`)
    ``kuairand:PATH``                         the CSV files of KuaiRand (`tritonrec.data.kuairand`)
    ========================================  ============================================================

    Raises ValueError for any other spec, and what the named source raises.
    """
    source, _, detail = spec.partition(":")
    if source == "ml-100k" and not detail:
        return movielens.load()
    if source == "zipf":
        return zipf.generate(zipf.ZipfOptions.parse(detail))
    if source == "csv" and detail:
        return csv_log.read(Path(detail).expanduser())
    if source == "parquet" and detail:
        from tritonrec.data import parquet  # pyarrow takes half a second to import

        return parquet.read(Path(detail).expanduser())
    if source == "kuairand" and detail:
        from tritonrec.data import kuairand

        return kuairand.read(Path(detail).expanduser())
    raise ValueError(
        f"unknown data {spec!r}: expected 'ml-100k', 'zipf[:name=value,...]', 'csv:PATH', 'parquet:PATH' "
        "or 'kuairand:PATH'"
    )
