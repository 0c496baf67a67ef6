"""Promise: workflows call what exists and store no secret; a release's links and versions are whole, every
Python that it names is built for and tried, its bill of materials is what a wheel brings, and its changes are
a screen with a page of all behind; the package has no upper bounds, and our own machines have one for torch.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path
from zipfile import ZipFile

import pytest
import release
import yaml

from tritonrec.harness.cli import COMMANDS, load
from tritonrec.version import __version__

ROOT = Path(__file__).resolve().parent.parent

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
URL = "https://host.example/owner/name"


def jobs(path):
    return yaml.safe_load(path.read_text())["jobs"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_what_exists(path):
    makefile = (ROOT / "Makefile").read_text()
    for job in jobs(path).values():
        if "uses" in job:
            assert "workflow_call:" in (ROOT / job["uses"]).read_text()
            continue
        assert job["timeout-minutes"] <= (360 if path.stem == "nightly" else 60)
        commands = "\n".join(step.get("run", "") for step in job["steps"])
        for line in re.sub(r"\$\{\{ (github\.run_(number|id)|matrix\.part) \}\}", "1", commands).splitlines():
            for target in re.findall(r"\bmake ([\w./-]+)", line) if "gh release" not in line else []:
                assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), target
            for file in re.findall(r"\bci/[\w./]+", line):
                assert (ROOT / file).exists(), file
            found = re.match(r"\.venv/bin/tritonrec (\S+) ?(.*)", line)
            if found:
                assert found[1] in COMMANDS
                load(found[1]).make_context(found[1], found[2].split())


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_stores_no_secret(path):
    assert not re.search(r"secrets\.|password|api-token", path.read_text())


def test_only_the_job_that_uploads_can_upload():
    found = jobs(ROOT / ".github/workflows/release.yml")
    uploading = [name for name, job in found.items() if "pypi-publish" in json.dumps(job)]
    assert uploading == ["publish"] and found["publish"]["permissions"] == {"id-token": "write"}
    assert found["publish"]["environment"] and "contents" not in found["verify"].get("permissions", {})
    assert found["build"]["needs"] == ["verify", "kernels"] and found["publish"]["needs"] == "first-contact"


def test_the_wheel_that_is_uploaded_is_tried_before():
    found = jobs(ROOT / ".github/workflows/release.yml")["first-contact"]
    assert found["needs"] == "build" and found["with"] == {"wheel": "dist"}
    contact = jobs(ROOT / found["uses"])["first-contact"]
    assert contact["steps"][1]["with"]["name"].startswith("${{ inputs.wheel ||")
    assert "ci/first_contact.sh dist/*.whl" in contact["steps"][-1]["run"]


def test_the_package_has_no_upper_bounds_and_our_machines_have_one():
    everything = list(chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()))
    assert [each for each in everything if "<" in each or "==" in each] == []
    assert re.search(r"^torch<", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert makefile.count("pip install ") == makefile.count("-c constraints.txt") == 1
    assert "-c constraints.txt" in makefile and "pyproject.toml constraints.txt" in makefile


def test_the_metadata_names_no_person_and_matches_the_version():
    assert PROJECT["authors"] == [{"name": "tritonrec developers"}] and PROJECT["version"] == __version__
    assert PROJECT["classifiers"] and "urls" not in PROJECT


def test_links_and_pictures_of_a_release_are_absolute():
    text = release.absolute((ROOT / "README.md").read_text(), URL, "v1")
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert targets and all(each.startswith("https://") for each in targets)
    assert f"{URL}/raw/v1/traces/nestpipe.png" in targets
    assert f"{URL}/blob/v1/docs/verifying.md#your-own-model" in targets
    files = [each.split("/v1/")[1].split("#")[0] for each in targets]
    assert all((ROOT / file).is_file() for file in files)
    assert text.count("```") == (ROOT / "README.md").read_text().count("```")


def test_the_changelog_has_a_screen_for_each_release_and_a_page_of_all_its_changes():
    head, *releases = (ROOT / "CHANGELOG.md").read_text().split("\n## ")
    assert releases and head.count("\n") < 15
    for release_notes in releases:
        title = release_notes.partition("\n")[0]
        assert release_notes.count("\n") <= 60 and len(release_notes) <= 7000, title
        minor = re.search(r"\d+\.\d+", title)[0]
        assert (ROOT / f"docs/changes/{minor}.md").is_file(), title
    assert f"docs/changes/{minor}.md" in head + releases[-1]


def test_every_supported_python_is_declared_built_and_tried():
    declared = [
        each.rpartition(" ")[2] for each in PROJECT["classifiers"] if re.search(r"Python :: 3\.", each)
    ]
    assert declared[0] == PROJECT["requires-python"].removeprefix(">=")
    matrices = [
        job["strategy"]["matrix"]["python"]
        for path in WORKFLOWS
        for job in jobs(path).values()
        if "python" in job.get("strategy", {}).get("matrix", {})
    ]
    assert (
        len(matrices) == 4 and matrices == [declared] * 4
    )  # tests, kernels of a release, its wheel, a first contact
    assert f"| Python | {', '.join(declared)} |" in (ROOT / "docs/versions.md").read_text()


@pytest.mark.if_changed
def test_the_bill_of_materials_has_what_a_wheel_brings(tmp_path):
    """By the command of the workflow, for a wheel without dependencies."""
    about = {"METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 3\n", "RECORD": "",
             "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}  # fmt: skip
    with ZipFile(tmp_path / "tiny-3-py3-none-any.whl", "w") as wheel:
        for name, text in about.items():
            wheel.writestr(f"tiny-3.dist-info/{name}", text)
    command = [ROOT / "ci/sbom.sh", tmp_path / "tiny-3-py3-none-any.whl", tmp_path / "new/sbom.json"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(command, check=True, env={**os.environ, "PATH": path, "PYTHON": sys.executable})
    found = json.loads((tmp_path / "new/sbom.json").read_text())
    assert (found["metadata"]["component"]["name"], found["bomFormat"]) == ("tritonrec", "CycloneDX")
    assert [(each["name"], each["version"]) for each in found["components"]] == [("tiny", "3")]
    (build,) = (job for name, job in jobs(ROOT / ".github/workflows/release.yml").items() if name == "build")
    assert "ci/sbom.sh dist/*.whl sbom/sbom.cdx.json" in json.dumps(build)


def test_the_dockerfile_is_clean():
    """By hadolint; a workflow builds and runs the image."""
    done = subprocess.run(
        [Path(sys.executable).with_name("hadolint"), ROOT / "docs/examples/Dockerfile"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_urls_of_a_release():
    source = (ROOT / "pyproject.toml").read_text()
    found = tomllib.loads(release.with_urls(source, URL, "v1"))["project"]
    assert found.pop("urls")["Repository"] == URL and found == PROJECT
    with pytest.raises(ValueError, match="already"):
        release.with_urls(release.with_urls(source, URL, "v1"), URL, "v1")


def test_a_release_whose_version_or_contract_is_another_is_refused(tmp_path, monkeypatch):
    report = json.loads((ROOT / "ci/baselines/verify.json").read_text())
    file = tmp_path / "verify.json"
    file.write_text(json.dumps(report))
    assert re.fullmatch("[0-9a-f]{64}", release.check(f"v{__version__}", file))
    with pytest.raises(ValueError, match="not the same"):
        release.check("v99", file)
    with monkeypatch.context() as patch:  # the package's own version is another than the project's
        patch.setattr(release, "__version__", "99")
        for tag in (f"v{__version__}", "v99"):
            with pytest.raises(ValueError, match="not the same"):
                release.check(tag, file)
    report["cases"].pop()
    file.write_text(json.dumps(report))
    with pytest.raises(ValueError, match=r"run make verify, copy its out/verify.json there"):
        release.check(f"v{__version__}", file)
    with pytest.raises(ValueError, match="usage"):
        release.main(["publish"])
