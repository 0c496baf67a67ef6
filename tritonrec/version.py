"""The version of this package, which every layer may import."""

__version__ = "0.1.0"
