"""Errors of the server: each has a name, a status, and one form of body."""

from __future__ import annotations

from typing import Any

from ...distributed import RankDiedError

STATUS = {
    "malformed": 400,
    "unauthorized": 401,
    "no_token": 403,
    "unknown_host": 403,
    "not_found": 404,
    "unknown_user": 404,
    "method_not_allowed": 405,
    "slow_client": 408,
    "following": 409,
    "one_worker_only": 409,
    "body_too_large": 413,
    "too_large": 413,
    "invalid": 422,
    "queue_full": 429,
    "too_many_users": 429,
    "model_error": 500,
    "reload_failed": 500,
    "not_ready": 503,
    "stopping": 503,
    "timeout": 503,
    "rank_died": 503,
    "too_many_connections": 503,
}
"""Of HTTP, by name of the error."""


class ServerError(Exception):
    """An error of `STATUS`, with a sentence for the caller."""

    def __init__(self, name: str, message: str):
        super().__init__(message)
        self.name, self.status = name, STATUS[name]

    @property
    def body(self) -> dict[str, Any]:
        """As JSON."""
        return body_of(self.name, str(self))


def body_of(name: str, message: str) -> dict[str, Any]:
    """The body of every error."""
    return {"error": {"name": name, "message": message}}


def named(error: BaseException) -> ServerError:
    """The error of a request by what was raised for it."""
    if isinstance(error, ServerError):
        return error
    if isinstance(error, KeyError):
        return ServerError("unknown_user", str(error.args[0]))
    if isinstance(error, RankDiedError):
        return ServerError("rank_died", str(error))
    if isinstance(error, ValueError):
        return ServerError("invalid", str(error))
    return ServerError("model_error", f"the model failed: {type(error).__name__}; the server's log says more")
