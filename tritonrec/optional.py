"""Packages that training does without: pictures, traces, measurements. Their absence is one sentence."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

EXTRAS = {
    "confluent_kafka": "kafka",
    "faiss": "faiss",
    "fastapi": "serve",
    "huggingface_hub": "hub",
    "hypothesis": "fuzz",
    "matplotlib": "traces",
    "onnxruntime": "onnx",
    "onnxscript": "onnx",
    "opentelemetry": "telemetry",
    "perfetto": "traces",
    "prometheus_client": "serve",
    "pytest": "test",
    "pytest_benchmark": "bench",
    "redis": "redis",
    "tensorboard": "logging",
    "triton": "triton",
    "uvicorn": "serve",
}
"""By package the extra of tritonrec that installs it."""


class MissingPackageError(ModuleNotFoundError, ValueError):
    """A package that only some uses need is not installed; the message says how to install it."""


def require(package: str, what: str) -> None:
    """Raise `MissingPackageError` where `package` is not installed. `what` needs it, such as ``"--png"``."""
    if find_spec(package) is None:
        name = {"faiss": "faiss-cpu", "opentelemetry": "opentelemetry-sdk"}.get(
            package, package.replace("_", "-")
        )
        raise MissingPackageError(
            f"{what} needs the package {name}: pip install {name}, or pip install "
            f"'tritonrec[{EXTRAS[package]}]'",
            name=package,
        )


def pyplot() -> Any:
    """matplotlib's pyplot, which draws into files alone."""
    require("matplotlib", "a picture")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
