"""The command `serve`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ...nn import NextItemModel
from ...optional import require
from ...serving.approximate import Index
from ...serving.server import ServerConfig
from ...serving.server.settings import token_of
from .export import trained_model
from .options import with_options
from .outputs import checked

CONFIG = ServerConfig()


@with_options(first=("port",))
def serve(
    model: Annotated[Path | None, typer.Argument(help="Folder or URL of tritonrec export.")] = None,
    config: ServerConfig = CONFIG,
    host: Annotated[
        str, typer.Option(help="Address to listen at; one that others reach needs a token.")
    ] = "127.0.0.1",
    token_file: Annotated[
        Path | None, typer.Option(help="File of the token; by default the variable TRITONREC_TOKEN.")
    ] = None,
    follow: Annotated[
        str | None, typer.Option(help="URL that a trainer publishes to; its versions are served.")
    ] = None,
    cached: Annotated[
        Path | None,
        typer.Option(help="Checkpoint of the training, hstu or sasrec: keep keys and values of users."),
    ] = None,
    memory: Annotated[str, typer.Option(help="Of --cached, such as 512MiB.")] = "2GiB",
    device: Annotated[str, typer.Option(help="That computes and has --memory: cpu, or as cuda.")] = "cpu",
    host_memory: Annotated[
        str, typer.Option(help="Of --cached, for what the --device's memory has no room for.")
    ] = "0",
    approximate: Annotated[
        Index | None, typer.Option(help="Let faiss propose the items to score; prints its recall.")
    ] = None,
) -> None:
    """Serve an exported model over HTTP, with the bits of its Predictor.

    Items and scores, in batches of all that ask at one time; users' events; clicks of a DLRM.
    SIGTERM ends it when all requests are answered, SIGHUP reads the folder again. A page to try it is at /,
    the description of all paths at /docs. Python: tritonrec.serving.server.
    """

    def run() -> None:
        for package in ("fastapi", "uvicorn", "prometheus_client"):
            require(package, "tritonrec serve")
        if model is None and follow is None:
            raise ValueError("give a MODEL, or --follow URL")
        if approximate is not None:
            require("faiss", "--approximate")
            if follow is not None:
                raise ValueError("--approximate does not go with --follow: each version needs a new index")
        from ...serving.server.run import Source, serve

        trained = None if cached is None else trained_model(cached, None, "serve without --cached")
        if not (trained is None or isinstance(trained, NextItemModel)):
            raise ValueError(f"--cached takes a model of the next item, and {cached} has none")
        source = Source(model, trained, memory, follow, approximate, device, host_memory)
        serve(source, replace(config, host=host), token_of(token_file))

    checked(run)
