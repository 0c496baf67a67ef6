"""Parameters in two speeds: `make test` runs the quick ones, `make test-all` also those marked slow."""

from collections import defaultdict
from collections.abc import Collection, Iterable
from itertools import product
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import settings

LONGEST = (
    "harness/test_judges", "emulator/test_faults", "kernels/conformance/test_registration_of_ops",
    "kernels/conformance/test_agreement_of_ops", "kernels/conformance/test_refusals_of_ops",
    "nn/test_next_item_step", "emulator/test_assembled", "emulator/test_plugin", "pipeline/test_relays",
    "embedding/test_table_policies", "serving/test_export_grm", "harness/test_words_training",
)  # fmt: skip
"""Files of tests that take half a minute and more, the longest first."""

WHOLE = {
    "checkpoint": "checkpoint manifest parts saver surroundings",
    "data": """
        ali_ccp arrow_types click_columns click_stream clustering criteo event_log features gauc
        interactions jagged json_lines kuairand labels loader movielens parquet positions ranking
        sequences stream stream_plan vocabulary zipf
    """,
    "distributed": "environment",
    "embedding": """
        collection handles hash_optimizer key_index learning_rate modules pools
        rows_obey_torch select streams_of_tables table weighted_bags
    """,
    "harness": """
        bisect cli config lab_network lab_root lab_settings lab_torchrec options outputs plan
        profile simulator simulator_model simulator_plan train_judges urls wrong_options
    """,
    "metrics": "streaming_metrics",
    "nn": "conversion losses nn",
    "pipeline": "agreement attributes by_place check check_bounds precision sums warm_start",
    "serving": "bounded_lag export_manifest exporter retrieval server vetting",
    "slipstream": "slipstream_run threshold",
    "torchrec_names": "torchrec_behaviours",
    "trace": "analysis trace",
}
"""Files, by folder, whose cases cost `make test` a few seconds: it runs every one."""


def of_whole_files() -> set[str]:
    """`WHOLE` as paths."""
    return {f"tests/{folder}/test_{name}.py" for folder, names in WHOLE.items() for name in names.split()}


def longest_first(items: list[pytest.Item], root: Path) -> None:
    """Files begin in the order of `items`: no process of tests is left alone at the end with a long one."""
    places = {root / f"{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(LONGEST)))


def examples(count: int) -> int:
    """So many of a property whose example is dear, and half of them in `make test`."""
    return count if settings().max_examples >= 100 else -(-count // 2)


def slow_except(quick: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """`values` for ``parametrize``: all but those in `quick` are marked slow."""
    values = list(values)
    assert all(one in values for one in quick), f"{quick}: a quick value that is none of {values}"
    return [value if value in quick else _slow(value) for value in values]


def slow_on_triton(impls: Iterable[Any], names: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Pairs (impl, name): under Triton, which is interpreted here, all names but `quick` are marked slow."""
    names = list(names)
    assert all(one in names for one in quick), f"{quick}: a quick name that is none of {names}"
    pairs = []
    for impl, name in product(impls, names):
        if isinstance(impl, str):
            pairs.append((impl, name))
        else:  # a parameter with a mark: Triton
            marks = [*impl.marks, *([] if name in quick else [pytest.mark.slow])]
            pairs.append(pytest.param(*impl.values, name, marks=marks))
    return pairs


def thinned(items: Iterable[pytest.Item], most: int, draw: str = "") -> set[pytest.Item]:
    """Of the cases of a test, and of an op in it, `most` and a sixteenth of the others.

    They are spread over the parameters, and follow from `draw` and their names. Those marked ``every_case``
    stay whole: a case of a judge that is left out is a judge that nobody watches. So do those of `WHOLE`.
    """
    cases, kept, whole = defaultdict(list), set(), of_whole_files()
    for item in items:
        if item.get_closest_marker("every_case") or item.nodeid.partition("::")[0] in whole:
            kept.add(item)
            continue
        op = item.callspec.params.get("op") if hasattr(item, "callspec") else None
        cases[item.nodeid.partition("[")[0], op].append(item)
    for each in cases.values():
        each.sort(key=lambda item: (crc32(f"{draw}{item.nodeid}".encode()), item.nodeid))
        kept.update(each[: most + max(0, len(each) - most) // 16])
    return kept


def _slow(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
