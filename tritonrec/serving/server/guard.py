"""What stands before every request: who may ask, how much, and for how long."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import ServerError, body_of
from .metrics import Metrics
from .settings import ServerConfig

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
OPEN = ("/", "/health", "/ready")
"""What needs no token."""
LOCAL = ("localhost", "127.0.0.1", "[::1]")
"""Names of this machine. A page of another site that has its own name lead here is refused."""


class Guard:
    """Middleware: token or host, a body of limited size and time, a client that reads, and counts."""

    def __init__(self, app: Any, config: ServerConfig, token: str | None, metrics: Metrics):
        self._app, self._config, self._metrics = app, config, metrics
        self._token = None if token is None else token.encode()

    async def __call__(self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Send) -> None:
        """As ASGI has it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), [500]

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                status[0] = message["status"]
            # Raises for a client that does not read, and the connection is closed.
            async with asyncio.timeout(self._config.timeout):
                await send(message)

        try:
            headers = dict(scope["headers"])
            self._check(scope["path"], headers)
            body = await self._body(headers, receive)
        except ServerError as error:
            await self._refuse(error, sent)
        else:
            parts = [{"type": "http.request", "body": body, "more_body": False}]

            async def replay() -> Message:
                return parts.pop() if parts else await receive()

            await self._app(scope, replay, sent)
        finally:
            endpoint = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(endpoint, status[0]).inc()
            self._metrics.seconds.labels(endpoint).observe(time.monotonic() - began)

    def _check(self, path: str, headers: dict[bytes, bytes]) -> None:
        if "\ufffd" in path:  # several names of users would be one
            raise ServerError("malformed", "the path is no UTF-8")
        if self._token is None:
            host = headers.get(b"host", b"").decode("latin-1")
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            if self._config.is_loopback and name.lower() not in LOCAL:
                raise ServerError("unknown_host", f"this server answers to {', '.join(LOCAL)} alone")
        elif path not in OPEN:
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, b"Bearer " + self._token):
                raise ServerError("unauthorized", "give the header Authorization: Bearer TOKEN")

    async def _body(self, headers: dict[bytes, bytes], receive: Callable[[], Awaitable[Message]]) -> bytes:
        most = self._config.max_body
        size = headers.get(b"content-length", b"0")
        too_large = ServerError("body_too_large", f"a request has {most} bytes at most")
        if not size.isdigit() or len(size) > 18 or int(size) > most:
            raise too_large
        parts, total, more = [], 0, True
        try:
            async with asyncio.timeout(self._config.timeout):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ServerError("slow_client", "the client has gone")
                    parts.append(part := message.get("body", b""))
                    total, more = total + len(part), message.get("more_body", False)
                    if total > most:
                        raise too_large
        except TimeoutError:
            raise ServerError(
                "slow_client", f"the request was not here after {self._config.timeout} s"
            ) from None
        return b"".join(parts)

    async def _refuse(self, error: ServerError, send: Send) -> None:
        body = json.dumps(error.body).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        if error.name in ("body_too_large", "slow_client"):
            headers.append((b"connection", b"close"))  # the rest of the body is not read
        if error.name == "unauthorized":
            headers.append((b"www-authenticate", b"Bearer"))
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class Impatient(H11Protocol):
    """uvicorn's HTTP protocol with limits to connections, and to the time of a request's head."""

    _timer: asyncio.TimerHandle | None = None

    def __init__(self, *given: Any, limits: ServerConfig, **options: Any):
        super().__init__(*given, **options)
        self._limits = limits

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._refused = len(self.connections) > self._limits.max_connections
        # Who is refused is told so when the request comes: after a close its sender would see a reset alone.
        seconds = min(self._limits.timeout, 1.0) if self._refused else self._limits.timeout
        self._timer = self.loop.call_later(seconds, self._too_late)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self.send_error("too_many_connections", 503, "all connections are taken: come back later")
            return
        if self._timer is None:  # the next request of a connection that is kept
            self._timer = self.loop.call_later(self._limits.timeout, self._too_late)
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()  # from here the guard counts

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._stop_timer()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self.send_error("malformed", 400, msg)

    def send_error(self, name: str, status: int, message: str) -> None:
        """Before there is a request that the application could answer."""
        body = json.dumps(body_of(name, message))
        self.transport.write(
            f"HTTP/1.1 {status} {name}\r\ncontent-type: application/json\r\nconnection: close\r\n"
            f"content-length: {len(body)}\r\n\r\n{body}".encode()
        )
        self.transport.close()

    def _too_late(self) -> None:
        self._timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.send_error("slow_client", 408, f"no whole request came within {self._limits.timeout} s")

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
