"""The command `score`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ...serving import Predictor
from ...serving.score_file import ScoreConfig, score_file
from ..progress import CommandProgress
from ..shown import say
from .options import with_options
from .outputs import checked, require_writable

CONFIG = ScoreConfig()


@with_options(first=("k",))
def score(
    source: Annotated[Path, typer.Argument(help="Parquet file of histories, clicks or impressions.")],
    out: Annotated[Path, typer.Argument(help="Parquet file to write.")],
    model: Annotated[Path, typer.Option(help="Folder or URL of tritonrec export.")],
    config: ScoreConfig = CONFIG,
) -> None:
    """Score the rows of a Parquet file into another one; a killed run goes on.

    The best items of each user, or scores of candidates; probabilities of a DLRM and of a GRM. Called again,
    a killed run goes on behind its last whole part, and leaves the same bytes.
    Python: tritonrec.serving.score_file.
    """
    require_writable({"OUT": out}, inputs={"SOURCE": source})
    console = Console()

    def run() -> int:
        predictor = Predictor.load(model)
        with CommandProgress(console) as bars:
            bar = bars.add_task("scoring", total=None)
            return score_file(
                source,
                out,
                predictor,
                config,
                lambda done, rows: bars.update(bar, completed=done, total=rows),
            )

    rows = checked(run)
    say(console, f"scored {rows:,} rows into {out}")
