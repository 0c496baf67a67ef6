"""`tritonrec.verify` as a fixture of pytest, in every test run where tritonrec is installed.

    @pytest.mark.tritonrec_verify(world_sizes=(1, 2), micro_batches=(1, 4))
    def test_my_model(tritonrec_verify):
        tritonrec_verify(build_model, batches, [FeatureConfig("item", 64)])

Options of the marker are those of `tritonrec.verify`, for a test, a class or a module; the call's own come
first. The test fails with the report where it has not passed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "tritonrec_verify(**options): options of `tritonrec.verify` for the fixture of this name"
    )


@pytest.fixture
def tritonrec_verify(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`tritonrec.verify` with the marker's options; fails the test, or returns the report."""
    options: dict[str, Any] = {}
    for marker in reversed(list(request.node.iter_markers("tritonrec_verify"))):  # the closest one last
        if marker.args:
            raise pytest.UsageError("tritonrec_verify takes options by name, such as world_sizes=(1, 2)")
        options |= marker.kwargs

    def checked(*arguments: Any, **own: Any) -> Any:
        from .verify import verify  # torch is loaded by the tests that need it

        report = verify(*arguments, **{**options, **own})
        if not report.passed:
            pytest.fail(str(report), pytrace=False)
        return report

    return checked
