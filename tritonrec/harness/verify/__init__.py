"""Equality of every bit between a pipelined mode and its reference; `verify` checks a model of yours."""

from .user_model import ModelReport, verify

__all__ = ["ModelReport", "verify"]
