"""Train large recommendation models with nested pipelining, and prove it bit for bit."""

__version__ = "0.1.0"
