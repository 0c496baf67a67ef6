"""Promise: every page is in the site's navigation, every link of the documents leads to a file or heading,
and links out of docs/ become links inside of the site, of each minor release. `make docs` builds it; here it
is only read."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import docs_site
import pytest
import yaml

from tritonrec.harness.cli import COMMANDS

ROOT = Path(__file__).resolve().parent.parent

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "traces/README.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
]


def navigation(nav):
    for entry in nav:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        yield from [value] if isinstance(value, str) else navigation(value)


def settings():
    class Loader(yaml.SafeLoader):
        """Knows no tags of Python or mkdocs."""

    Loader.add_multi_constructor("", lambda loader, suffix, node: None)
    return yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)


def anchors(page):
    """Of a page's headings as GitHub makes them, and as mkdocs.yml has them made."""
    text = docs_site.FENCE.sub("", (ROOT / page).read_text())
    found = set()
    for heading in re.findall(r"^#+ +(.*?) *$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        repeated = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", each) is not None for each in found)
        found.add(f"{slug}-{repeated}" if repeated else slug)
    return found


def broken(page, text):
    """Links that lead nowhere."""
    for target, anchor in re.findall(r"\]\(([^)\s#]*)(#[^)\s]*)?\)", docs_site.FENCE.sub("", text)):
        if "://" in target:
            continue
        path = docs_site.target_of(page, target) if target else page
        if not (ROOT / path).is_file():
            yield f"{page}: {target} is not there"
        elif anchor and anchor[1:] not in anchors(path):
            yield f"{page}: {path} has no heading {anchor}"


def test_the_navigation_names_every_page_once():
    named = list(navigation(settings()["nav"]))
    there = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(named) == sorted(there)


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page):
    assert list(broken(page, (ROOT / page).read_text())) == []


def test_every_test_that_a_page_names_is_in_its_file():
    pages = "".join((ROOT / page).read_text() for page in PAGES)
    named = set(re.findall(r"\[(test_\w+)\]\(\.\./([^)#]+)", pages))
    assert len(named) > 40  # one of each kind of docs/verifying.md
    assert [each for each in named if f"def {each[0]}(" not in (ROOT / each[1]).read_text()] == []


@pytest.mark.parametrize("link", ["gone.md", "ops.md#gone", "#gone", "../ci/baselines/gone.json"])
def test_a_link_to_nothing_is_found(link):
    assert list(broken("docs/index.md", f"[text]({link})"))


def test_links_out_of_docs_are_files_of_the_site():
    added = docs_site.linked()
    assert {"README.md", "CONTRIBUTING.md", "ci/baselines/lab.json", "traces/nestpipe.png"} <= set(added)
    text = "[a](../ci/baselines/lab.json) [b](ops.md#a-step) [c](https://a.org/x)\n```\n[d](../e)\n```\n"
    assert docs_site.rewritten("docs/lab.md", text) == text.replace("../ci", "source/ci")
    assert docs_site.rewritten("docs/reference/ops.md", "[a](../ops.md)") == "[a](../ops.md)"
    assert docs_site.rewritten("README.md", "[a](docs/ops.md#b) ![c](traces/d.png)") == (
        "[a](../ops.md#b) ![c](traces/d.png)"
    )
    assert docs_site.rewritten("traces/README.md", "[a](../docs/lab.md)") == "[a](../../lab.md)"


def test_the_index_names_every_page_and_the_commands_page_every_command():
    index = (ROOT / "docs/index.md").read_text()
    pages = [path.name for path in (ROOT / "docs").glob("*.md") if path.name != "index.md"]
    assert [page for page in pages if f"]({page})" not in index] == []
    commands = (ROOT / "docs/commands.md").read_text()
    assert [name for name in COMMANDS if f"| `tritonrec {name}` |" not in commands] == []


def test_the_reference_names_packages():
    for path in (ROOT / "docs/reference").glob("*.md"):
        for name in re.findall(r"^::: (.*)$", path.read_text(), re.MULTILINE):
            part = ROOT / name.replace(".", "/")
            assert part.with_suffix(".py").is_file() or (part / "__init__.py").is_file()
    assert len(list((ROOT / "docs/reference").glob("*.md"))) > 5


def test_the_readme_is_a_screen_or_two():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_the_readme_trains_with_the_lines_of_the_first_example():
    (lines,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert (ROOT / "docs/examples/train.py").read_text().endswith('"""\n\n' + lines)


def test_the_last_patch_of_each_minor_release_is_a_version(tmp_path):
    """By a stand-in for mike, which notes what it is asked to deploy."""
    for folder in ("repository/ci", "bin"):
        (tmp_path / folder).mkdir(parents=True)
    script = tmp_path / "repository/ci/docs_versions.sh"
    shutil.copy(ROOT / "ci/docs_versions.sh", script)
    mike = tmp_path / "bin/mike"
    mike.write_text(
        f'#!/bin/bash\necho "$1 $4 $(git log -1 --format=%s)" >> {tmp_path}/asked\n'
        "git update-ref refs/heads/docs-versions HEAD\n"
    )
    mike.chmod(0o755)
    own = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environment = {**os.environ, **own, "PATH": f"{mike.parent}:{os.environ['PATH']}"}

    def run(*command):
        subprocess.run(command, cwd=script.parent, env=environment, check=True)

    run("git", "init", "--quiet", "--initial-branch", "main", "..")
    run("git", "add", ".")
    run("git", "commit", "--quiet", "-m", "before")
    run(script, tmp_path / "none")
    for tag in ("v0.2.0", "v0.1.2", "v0.10.0", "v0.1.10", "v0.11.0rc1", "version"):
        run("git", "commit", "--quiet", "--allow-empty", "-m", tag)
        run("git", "tag", tag)
    run("git", "commit", "--quiet", "--allow-empty", "-m", "now")
    run(script, tmp_path / "all")
    assert (tmp_path / "asked").read_text().splitlines() == [
        "deploy dev before", "set-default dev before",
        "deploy 0.1 v0.1.10", "deploy 0.2 v0.2.0", "deploy 0.10 v0.10.0", "deploy dev now",
        "set-default 0.10 now",
    ]  # fmt: skip
    assert (tmp_path / "all/ci/docs_versions.sh").is_file()  # of the branch that mike has written
    assert len(list((tmp_path / "repository/.git/worktrees").glob("*"))) == 0
