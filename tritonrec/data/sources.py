"""Sources of logs by name, as on the command line."""

from __future__ import annotations

from pathlib import Path

from tritonrec.data import csv_log, movielens, zipf
from tritonrec.data.ctr import ClickLog, clicks_from_ratings
from tritonrec.data.interactions import Interactions


def load(spec: str) -> Interactions | ClickLog:
    """Load the log that `spec` names: a `ClickLog` for clicks, `Interactions` for users' sequences.

    ========================================  ============================================================
    ``ml-100k``                               MovieLens-100K, fetched once (`tritonrec.data.movielens`)
    ``zipf``, ``zipf:users=1000,seed=1``      synthetic; options are the fields of `zipf.ZipfOptions`
    ``csv:PATH``                              a file with columns user, item, timestamp and maybe rating
    ``parquet:PATH``                          a log as Parquet, read whole (`tritonrec.data.parquet`)
    ``kuairand:PATH``                         the CSV files of KuaiRand (`tritonrec.data.kuairand`)
    ``criteo``, ``criteo:samples=1000``       synthetic clicks in Criteo's shape (`synthetic_clicks`)
    ``avazu``, ``avazu:samples=1000``         synthetic clicks in Avazu's shape
    ``criteo-tsv:PATH``                       clicks in Criteo's text format (`tritonrec.data.criteo`)
    ``criteo-parquet:PATH``                   the same columns as Parquet
    ``clicks:PATH``                           clicks as Parquet (`tritonrec.data.click_columns`)
    ``ali-ccp:PATH``                          clicks in Ali-CCP's format (`tritonrec.data.ali_ccp`)
    ========================================  ============================================================

    Raises ValueError for any other spec, and the errors of the source.
    """
    source, _, detail = spec.partition(":")
    if source == "ml-100k" and not detail:
        return movielens.load()
    if source == "zipf":
        return zipf.generate(zipf.ZipfOptions.parse(detail))
    if source == "csv" and detail:
        return csv_log.read(detail)
    if source == "parquet" and detail:
        from tritonrec.data import parquet  # pyarrow takes half a second to import

        return parquet.read(detail)
    if source == "kuairand" and detail:
        from tritonrec.data import kuairand

        return kuairand.read(detail)
    if source in ("criteo", "avazu"):
        from tritonrec.data import synthetic_clicks

        return synthetic_clicks.generate(source, synthetic_clicks.SyntheticClickOptions.parse(detail))
    if source in ("criteo-tsv", "criteo-parquet") and detail:
        from tritonrec.data import click_columns, criteo

        if source == "criteo-tsv":
            return criteo.read_tsv(detail)
        return click_columns.read_parquet(Path(detail).expanduser(), criteo.CRITEO)
    if source == "clicks" and detail:
        from tritonrec.data import click_columns

        return click_columns.read_parquet(Path(detail).expanduser())
    if source == "ali-ccp" and detail:
        from tritonrec.data import ali_ccp

        return ali_ccp.read(Path(detail).expanduser())
    raise ValueError(
        f"unknown data {spec!r}: expected 'ml-100k', 'zipf[:name=value,...]', 'csv:PATH', 'parquet:PATH', "
        "'kuairand:PATH', 'criteo[:name=value,...]', 'avazu[:name=value,...]', 'criteo-tsv:PATH', "
        "'criteo-parquet:PATH', 'clicks:PATH' or 'ali-ccp:PATH'"
    )


def load_interactions(spec: str) -> Interactions:
    """As `load`; raises ValueError for a log of clicks."""
    log = load(spec)
    if isinstance(log, ClickLog):
        raise ValueError(
            f"{spec} is a log of clicks without users' sequences, which this model needs: train dlrm with it"
        )
    return log


def load_clicks(spec: str) -> ClickLog:
    """As `load`, with ratings as clicks (`clicks_from_ratings`); ValueError for a log without ratings."""
    log = load(spec)
    return log if isinstance(log, ClickLog) else clicks_from_ratings(log)
