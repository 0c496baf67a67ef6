"""The application: what is asked under which path, on FastAPI."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import FastAPI, Path, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException

from ...version import __version__
from .batching import Batcher
from .bodies import (
    Clicks,
    Events,
    Failed,
    Impressions,
    Judged,
    Kept,
    Predicted,
    Retrieve,
    Retrieved,
    Score,
    Scored,
    UserName,
)
from .errors import STATUS, ServerError, body_of, named
from .follow import Following
from .guard import Guard
from .metrics import Metrics
from .model import Change, Served
from .settings import ServerConfig

if TYPE_CHECKING:
    from ..live import Follower

log = logging.getLogger("tritonrec.server")
OF_STATUS = {400: "malformed", 404: "not_found", 405: "method_not_allowed"}
User = Annotated[UserName, Path(description="Any name.")]
DEFAULTS = ServerConfig()
FAILURES: dict[int | str, dict[str, Any]] = {status: {"model": Failed} for status in set(STATUS.values())}


def create_app(
    load: Callable[[], Served],
    config: ServerConfig = DEFAULTS,
    token: str | None = None,
    follow: Callable[[], Follower] | None = None,
) -> FastAPI:
    """A server of one model, for uvicorn and for tests.

    Args:
        load: reads the model; called when the server starts. token: that requests must bring, if any.
        follow: opens a follower of a trainer, whose versions take the model's place.
    """
    metrics = Metrics()
    app = FastAPI(
        title="tritonrec", version=__version__,
        lifespan=lambda app: _lifespan(app, load, config, metrics, follow),
        description="Items and scores of an exported model, with the bits of `tritonrec.serving.Predictor`. "
        "Every error is `{\"error\": {\"name\": ..., \"message\": ...}}`.",
    )  # fmt: skip
    app.add_middleware(Guard, config=config, token=token, metrics=metrics)
    state = app.state

    async def ask(request: Any, size: int = 1, values: int = 0) -> JSONResponse:
        """The answer of the batch with this request."""
        if size > config.queue or values > config.max_values:
            raise ServerError(
                "too_large",
                f"a request has {config.queue} users and its answer {config.max_values} numbers at most",
            )
        waiting = asyncio.wrap_future(state.batcher.submit(request, size))
        try:
            return JSONResponse(await asyncio.wait_for(waiting, config.timeout))
        except TimeoutError:
            raise ServerError("timeout", f"no answer within {config.timeout} s: come back later") from None
        except Exception as error:
            found = named(error)
            if found.name == "model_error":
                log.error("a request failed", exc_info=error)
            raise found from error

    def change(request: Change) -> Any:
        if config.workers > 1:
            raise ServerError(
                "one_worker_only", "each worker would have histories of its own: serve with one"
            )
        return ask(request)

    @app.post("/retrieve", response_model=Retrieved, responses=FAILURES)
    async def retrieve(body: Retrieve) -> Any:
        """The k items of the highest scores of each user, best first; of equal scores the smaller id."""
        return await ask(body, len(body), body.values)

    @app.post("/score", response_model=Scored, responses=FAILURES)
    async def score(body: Score) -> Any:
        """Scores of candidates for each user."""
        return await ask(body, len(body), body.values)

    @app.post("/predict", response_model=Predicted, responses=FAILURES)
    async def predict(body: Clicks) -> Any:
        """Probabilities of a click, of an exported DLRM."""
        return await ask(body, len(body), body.values)

    @app.post("/impressions", response_model=Judged, responses=FAILURES)
    async def impressions(body: Impressions) -> Any:
        """Probabilities of each task for items shown to users, of an exported GRM."""
        return await ask(body, len(body), body.values)

    @app.post("/user/{user:path}/events", response_model=Kept, responses=FAILURES)
    async def append(user: User, body: Events) -> Any:
        """Add events behind those of a user."""
        return await change(Change(user, body.items, body.timestamps))

    @app.put("/user/{user:path}/events", response_model=Kept, responses=FAILURES)
    async def replace(user: User, body: Events) -> Any:
        """Make these the events of a user."""
        return await change(Change(user, body.items, body.timestamps, whole=True))

    @app.delete("/user/{user:path}/events", response_model=Kept, responses=FAILURES)
    async def forget(user: User) -> Any:
        """Remove the events of a user."""
        return await change(Change(user))

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> dict[str, str]:
        """That the process lives."""
        return {"status": "ok"}

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready")
    async def ready() -> Any:
        """Whether there is a model, and how old it is. 503 where there is none, or it lags too far behind."""
        version, following = state.served.version, state.following
        lag = None if following is None else following.lag_seconds
        late = bool(config.max_lag) and following is not None and (lag is None or lag > config.max_lag)
        failed = version is not None and version.predictor.failure
        status = "rank_died" if failed else "not_ready" if version is None else "lagging" if late else "ready"
        return JSONResponse(
            {
                "status": status,
                "kind": None if version is None else (version.predictor.manifest["dense"] or {}).get("kind"),
                "step": None if version is None else version.predictor.step,
                "sequence": None if version is None else version.sequence,
                "published_at": None if version is None else version.published_at,
                "lag_seconds": lag,
                "follow_error": None if following is None else following.error,
            },
            200 if status == "ready" else 503,
        )

    @app.get("/metrics")
    async def show() -> Response:
        """For Prometheus."""
        version, following = state.served.version, state.following
        metrics.queue.set(state.batcher.waiting)
        if version is not None:
            metrics.step.set(version.predictor.step)
            metrics.sequence.set(version.sequence or 0)
            metrics.users.set(0 if version.users is None else len(version.users))
        if following is not None and following.lag_seconds is not None:
            metrics.lag.set(following.lag_seconds)
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.post("/reload", responses=FAILURES)
    async def reload() -> Any:
        """Read the folder again; the model before serves until the new one is whole. Needs a token."""
        if token is None:
            raise ServerError("no_token", "a server without a token is reloaded by SIGHUP alone")
        await state.reload()
        if config.workers > 1:
            os.kill(os.getppid(), signal.SIGHUP)  # the others too
        return state.served.version.told

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        """To try it."""
        return HTMLResponse(files(__package__).joinpath("page.html").read_text("utf-8"))

    @app.exception_handler(ServerError)
    async def of_ours(_: Request, error: ServerError) -> JSONResponse:
        headers = {"retry-after": "1"} if error.status in (429, 503) else None
        return JSONResponse(error.body, error.status, headers)

    @app.exception_handler(RequestValidationError)
    async def of_bodies(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]  # without what was given, which may be anything
        place = ".".join(str(each)[:40] for each in first["loc"][:6])
        name = "malformed" if first["type"] == "json_invalid" else "invalid"
        return JSONResponse(body_of(name, f"{place}: {first['msg'][:200]}"), STATUS[name])

    @app.exception_handler(HTTPException)
    async def of_starlette(_: Request, error: HTTPException) -> JSONResponse:
        name = OF_STATUS.get(error.status_code, "malformed")
        return JSONResponse(body_of(name, str(error.detail)), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def of_others(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse(named(RuntimeError(type(error).__name__)).body, 500)

    return app


@asynccontextmanager
async def _lifespan(
    app: FastAPI,
    load: Callable[[], Served],
    config: ServerConfig,
    metrics: Metrics,
    follow: Callable[[], Follower] | None,
) -> AsyncIterator[None]:
    state = app.state
    state.served = served = load()
    state.batcher = Batcher(
        served.answer, config.batch, config.latency / 1e3, config.queue, metrics.batches.observe
    )
    state.following = None if follow is None else Following(served, follow)

    async def reload() -> None:
        try:
            version = await asyncio.to_thread(served.reload)
        except Exception as error:
            metrics.reloads.labels("failed").inc()
            log.error("the model was not reloaded, the one before serves on: %s", error)
            if isinstance(error, ServerError):
                raise
            raise ServerError("reload_failed", f"the model before serves on: {error}") from error
        metrics.reloads.labels("done").inc()
        log.warning("the model was reloaded, step %d", version.predictor.step)

    async def by_signal() -> None:
        with suppress(ServerError):
            await reload()

    state.reload = reload
    loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()
    with suppress(ValueError, RuntimeError):  # in a thread, as in tests, no signal comes
        loop.add_signal_handler(signal.SIGHUP, lambda: tasks.add(loop.create_task(by_signal())))
    yield
    if state.following is not None:
        state.following.close()
    await asyncio.to_thread(state.batcher.close)
