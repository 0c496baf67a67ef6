"""A server of exported models over HTTP; `run` and `app` need the packages of ``tritonrec[serve]``."""

from .settings import ServerConfig

__all__ = ["ServerConfig"]
