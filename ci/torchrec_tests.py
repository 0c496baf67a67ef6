"""TorchRec's own tests with our classes in place of TorchRec's, by their import:

    bash ci/benchmarks/torchrec.sh own-tests CLONE

CLONE is TorchRec's repository, a clone with or without a work tree, or its unpacked sdist; the installed
TorchRec is what the tests import beside our classes. Each test runs twice:
with TorchRec's jagged tensors, and with ours too. Tests that name none of our modules are left out. A test
that does not pass as it is may pass with one of `CHANGES`, and `NOT_APPLICABLE` has those that cannot; the
exit status is 1 for any other failure, and where a listed test passes.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import subprocess
import sys
import types
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from inspect import signature
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tritonrec import EmbeddingBagCollection

FILES = (
    "torchrec/modules/tests/test_embedding_modules.py",
    "torchrec/models/tests/test_dlrm.py",
    "torchrec/models/tests/test_deepfm.py",
    "torchrec/schema/api_tests/test_embedding_module_schema.py",
)
MODULES = {
    "DataType": "tritonrec.embedding",
    "EmbeddingBagCollection": "tritonrec",
    "EmbeddingBagConfig": "tritonrec",
    "EmbeddingCollection": "tritonrec",
    "EmbeddingConfig": "tritonrec",
    "PoolingType": "tritonrec",
}
TENSORS = {
    "JaggedTensor": "tritonrec.embedding",
    "KeyedJaggedTensor": "tritonrec",
    "KeyedTensor": "tritonrec.embedding",
}
OUTCOMES = ("passed", "passed with a change", "not applicable", "failed")
IMPORTS = {"modules": MODULES, "modules and tensors": MODULES | TENSORS}
"""Which names come from ours."""


def their_weights() -> AbstractContextManager[Any]:
    """Rows of our bags begin as TorchRec's own, drawn from torch's generator as TorchRec draws them."""
    ours = EmbeddingBagCollection.__init__

    def with_theirs(self: Any, tables: Any, *args: Any, **options: Any) -> None:
        import torchrec

        with torch.random.fork_rng(devices=[]):
            ours(self, tables, *args, **options)
        configs = [
            torchrec.EmbeddingBagConfig(
                num_embeddings=each.num_embeddings,
                embedding_dim=each.embedding_dim,
                name=each.name,
                feature_names=each.feature_names,
                init_fn=each.init_fn,
            )
            for each in tables
        ]
        theirs = torchrec.EmbeddingBagCollection(configs)
        for name, bag in theirs.embedding_bags.items():
            rows = torch.arange(bag.num_embeddings), bag.weight.detach()
            self.embeddings.tables.load_weights(name, *rows)

    return mock.patch.object(EmbeddingBagCollection, "__init__", with_theirs)


def unannotated(function: Any) -> inspect.Signature:
    """Names, kinds and defaults of the parameters."""
    found = signature(function)
    parameters = [each.replace(annotation=each.empty) for each in found.parameters.values()]
    return found.replace(parameters=parameters, return_annotation=found.empty)


CHANGES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "without torch.jit.script, as tables that grow have no type in TorchScript": lambda: mock.patch(
        "torch.jit.script", lambda module, *args, **kwargs: module
    ),
    "from TorchRec's initial weights, as ours depend on seed, table and id alone": their_weights,
    "without type annotations, as ours name our classes": lambda: mock.patch(
        "inspect.signature", unannotated
    ),
}
"""With what change a test passes that does not pass as it is, and why."""
NOT_APPLICABLE = {
    r"test_embedding_modules\..*\.test_device": (
        "embedding_bags|HashEmbeddingCollection",
        "reads the parameter weight of a table; rows are no parameters here",
    ),
    r"test_dlrm\.DLRMTest\.test_no_sparse|test_deepfm\..*\.test_no_sparse": (
        "features need distinct names, got",
        "a collection without tables is refused when it is made, not when a model takes it",
    ),
    r"test_dlrm\..*\.test_export_serialization": (
        "is not defined",
        "needs torchrec.ir, which TorchRec's wheel lacks",
    ),
}
"""By pattern of ``file.Class.test`` the error that it ends with, and the reason."""


def source_of(clone: Path, file: str) -> str:
    """Text of a test file."""
    if (clone / file).is_file():
        return (clone / file).read_text()
    shown = subprocess.run(["git", "-C", clone, "show", f"HEAD:{file}"], capture_output=True, text=True)
    if shown.returncode:
        raise SystemExit(f"{clone} has no {file}: give TorchRec's repository or its unpacked sdist")
    return shown.stdout


def with_ours(source: str, ours: dict[str, str]) -> ast.Module:
    """The file with names of `ours` imported from us."""

    class Imports(ast.NodeTransformer):
        def visit_ImportFrom(self, node: ast.ImportFrom) -> list[ast.ImportFrom]:
            if not (node.module or "").startswith("torchrec"):
                return [node]
            theirs = [each for each in node.names if each.name not in ours]
            found = [ast.ImportFrom(node.module, theirs, 0)] if theirs else []
            found += [ast.ImportFrom(ours[each.name], [each], 0) for each in node.names if each.name in ours]
            return found

    return ast.fix_missing_locations(Imports().visit(ast.parse(source)))


def users_of(source: str, names: Iterable[str]) -> set[str]:
    """``Class.test`` of the tests whose code names one of `names`."""
    pattern = re.compile(rf"\b({'|'.join(names)})\b")
    return {
        f"{each.name}.{test.name}"
        for each in ast.parse(source).body
        if isinstance(each, ast.ClassDef)
        for test in each.body
        if isinstance(test, ast.FunctionDef) and pattern.search(ast.get_source_segment(source, test) or "")
    }


def tests_of(file: str, source: str, ours: dict[str, str]) -> tuple[list[unittest.TestCase], list[str]]:
    """The tests of a file that use our modules, and the modules of its imports that are not installed."""
    module, tree, missing = types.ModuleType(Path(file).stem), with_ours(source, ours), []
    sys.modules[module.__name__] = module
    while True:
        try:
            exec(compile(tree, file, "exec"), module.__dict__)
            break
        except ModuleNotFoundError as error:
            assert error.name is not None and error.name not in missing
            missing.append(error.name)
            tree.body = [
                each
                for each in tree.body
                if not f"{getattr(each, 'module', '')}.".startswith(f"{error.name}.")
            ]
    users = users_of(source, MODULES)
    suites = unittest.defaultTestLoader.loadTestsFromModule(module)
    tests = [test for suite in suites for test in suite]  # type: ignore[union-attr]
    return [test for test in tests if test.id().split(".", 1)[1] in users], missing


def error_of(test: unittest.TestCase) -> str:
    """The error of a test's run, or an empty string."""
    result = unittest.TestResult()
    test.run(result)
    if result.skipped:
        return f"skipped: {result.skipped[0][1]}"
    found = [text for _, text in result.errors + result.failures]
    return found[0].strip().splitlines()[-1] if found else ""


def outcome(test: unittest.TestCase) -> tuple[str, str]:
    """One of `OUTCOMES`, and the reason."""
    name, error = test.id(), error_of(test)
    listed = [each for pattern, each in NOT_APPLICABLE.items() if re.fullmatch(pattern, name)]
    if not error:
        return ("failed", f"it passes, and is listed: {listed[0][1]}") if listed else ("passed", "")
    for expected, reason in listed:
        if re.search(expected, error):
            return "not applicable", reason
    for change, made in CHANGES.items():
        with made():
            if not error_of(test):
                return "passed with a change", change
    return "failed", error


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("clone", type=Path, help="TorchRec's repository, or its unpacked sdist")
    parser.add_argument("--files", nargs="+", default=FILES, help="paths of test files in it")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    failed = False
    for imports, ours in IMPORTS.items():
        for file in options.files:
            torch.manual_seed(0)
            counts: Counter[str] = Counter()
            print(f"\n{file}, with our {imports}")
            tests, missing = tests_of(file, source_of(options.clone, file), ours)
            for name in missing:
                print(f"  the installed TorchRec has no {name}")
            for test in tests:
                found, reason = outcome(test)
                counts[found] += 1
                if found != "passed":
                    print(f"  {found}: {test.id()}: {reason}")
            print("  " + ", ".join(f"{counts[each]} {each}" for each in OUTCOMES))
            failed |= counts["failed"] > 0
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
