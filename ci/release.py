"""What a release needs beside a tag.

    python ci/release.py check v0.1.0 out/verify.json     the versions agree, and so do the contracts
    python ci/release.py metadata v0.1.0 URL              absolute links, project URLs, before a build

`check` compares the digest of a report of this run with that of ci/baselines/verify.json, and prints it.
`metadata` changes files of a clone that is thrown away: a package index shows README.md where its relative
links lead nowhere.
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

from docs_site import target_of, with_links

from tritonrec.harness.report import contract_digest
from tritonrec.version import __version__

ROOT = Path(__file__).resolve().parent.parent


def absolute(text: str, repository: str, tag: str) -> str:
    """README.md with links to the files of `tag` at `repository`, pictures among them."""

    def there(link: str) -> str:
        kind = "raw" if link.endswith((".png", ".svg")) else "blob"
        return f"{repository}/{kind}/{tag}/{target_of('README.md', link)}"

    return with_links(text, there)


def with_urls(pyproject: str, repository: str, tag: str) -> str:
    """pyproject.toml with a table of URLs; ValueError where it has one."""
    if "[project.urls]" in pyproject:
        raise ValueError("pyproject.toml has [project.urls] already")
    table = f'''[project.urls]
Repository = "{repository}"
Documentation = "{repository}/blob/{tag}/docs/index.md"
Changelog = "{repository}/blob/{tag}/CHANGELOG.md"
Issues = "{repository}/issues"

'''
    return pyproject.replace("[project.scripts]", f"{table}[project.scripts]", 1)


def check(tag: str, report: Path) -> str:
    """The contract's digest; ValueError where a version or the digest is another."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    if not tag == f"v{__version__}" == f"v{declared}":
        raise ValueError(
            f"tag {tag}, tritonrec.__version__ {__version__}, pyproject.toml {declared}: not the same"
        )
    found = contract_digest(json.loads(report.read_text()))
    recorded = contract_digest(json.loads((ROOT / "ci/baselines/verify.json").read_text()))
    if found != recorded:
        raise ValueError(
            f"{report} has the contract {found}, ci/baselines/verify.json {recorded}: run make verify, "
            "copy its out/verify.json there, run make results, and commit"
        )
    return found


def main(arguments: list[str]) -> None:
    """As the module's docstring says."""
    match arguments:
        case ["check", tag, report]:
            print(check(tag, Path(report)))
        case ["metadata", tag, repository]:
            for name, change in (("README.md", absolute), ("pyproject.toml", with_urls)):
                path = ROOT / name
                path.write_text(change(path.read_text(), repository.rstrip("/"), tag))
        case _:
            raise ValueError("usage: python ci/release.py check TAG REPORT | metadata TAG REPOSITORY")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"error: {error}")
