"""Writes what the command line knows of its options without loading torch.

python ci/declared.py      after an option has changed; a test compares
"""

from __future__ import annotations

import json
from typing import Any

from tritonrec.harness import cli
from tritonrec.harness.cli.declared import FILE, declaration_of


def text() -> str:
    """What the file holds: an option a line."""
    parts = []
    for name in cli.COMMANDS:
        declared: dict[str, Any] = declaration_of(cli.function_of(name))
        options = ",\n  ".join(map(json.dumps, declared["options"]))
        doc, keys = json.dumps(declared["doc"]), json.dumps(declared["keys"])
        parts.append(f' "{name}": {{"doc": {doc}, "keys": {keys}, "options": [\n  {options}\n ]}}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(text())
