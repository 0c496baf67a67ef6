"""Exports on the Hugging Face Hub: a repository has an export's files and a model card, ``README.md``.

`push` makes one commit, and `pull` reads one: nobody sees tables of two trainings. What is pulled is an
export like any other, which `Predictor.load` checks and of which it runs no code.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, SupportsFloat

from ..files.places import Place, place_of
from ..optional import require
from ..settings import typed
from .exporter import published
from .manifest import MANIFEST, checked_file, read_manifest

MADE = "<!-- made by tritonrec.serving.hub: without this line a push leaves your text -->"


@typed
def push(
    export: Place | str,
    repo: str,
    *,
    metrics: Mapping[str, float] | None = None,
    license: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    message: str | None = None,
    token: str | None = None,
) -> str:
    """Commit an export to a repository, which is made if it is not there; returns the commit's hash.

    Files of the export that was there before leave the branch, other files stay.

    Args:
        export: a folder of `tritonrec.serving.export`. repo: ``"owner/name"``.
        metrics: of the model card, such as those of `Trainer.evaluate`. license: of the card, ``"mit"``.
        private: of a repository that is made. revision: a branch that is there. message: of the commit.
        token: by default the one that ``hf auth login`` has saved, or ``$HF_TOKEN``.

    Raises ValueError for a folder that is at a URL, is no export, or has an altered file, TypeError for a
    metric that is no number; errors of `huggingface_hub`.
    """
    require("huggingface_hub", "serving.hub")
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    folder = place_of(export)
    if not isinstance(folder, Path):
        raise ValueError(f"{folder} is at a URL: copy the export into a folder, and push that")
    for name, value in (metrics or {}).items():
        if not isinstance(value, SupportsFloat):
            raise TypeError(f"metrics[{name!r}] must be a number, got {value!r}")
    manifest = read_manifest(folder)
    paths = [folder / MANIFEST, *(checked_file(folder, entry) for entry in entries_of(manifest))]
    api = HfApi(token=token, library_name="tritonrec")
    api.create_repo(repo, private=private, exist_ok=True)
    there = set(api.list_repo_files(repo, revision=revision))
    added: dict[str, Any] = {path.name: path for path in paths}
    with tempfile.TemporaryDirectory() as scratch:

        def before(name: str) -> Path:
            return Path(api.hf_hub_download(repo, name, revision=revision, local_dir=scratch))

        if "README.md" not in there or MADE in before("README.md").read_text():
            added["README.md"] = model_card(manifest, repo, metrics or {}, license).encode()
        old = set()
        if MANIFEST in there:
            with suppress(ValueError):  # of another kind: its files stay
                old = {entry["file"] for entry in entries_of(read_manifest(before(MANIFEST).parent))}
    operations: list[Any] = [CommitOperationAdd(name, content) for name, content in added.items()]
    gone = (old & there) - added.keys() - {"README.md"}
    operations += [CommitOperationDelete(name) for name in sorted(gone)]
    message = message or f"Export of step {manifest['step']}"
    return api.create_commit(repo, operations, commit_message=message, revision=revision).oid


@typed
def pull(repo: str, out: Place | str, *, revision: str | None = None, token: str | None = None) -> Place:
    """Copy the export of a repository into a new folder, complete or absent; returns `out`.

    Args:
        repo, token: as of `push`. out: a folder that does not exist. revision: a branch, tag or commit.

    Raises ValueError where `out` exists, or the repository has no export or an altered file; errors of
    `huggingface_hub`.
    """
    require("huggingface_hub", "serving.hub")
    from huggingface_hub import HfApi

    out = place_of(out)
    if out.exists():
        raise ValueError(f"{out} exists: pull into a new folder")
    api = HfApi(token=token, library_name="tritonrec")
    info = api.model_info(repo, revision=revision)
    names = {each.rfilename for each in info.siblings or ()}
    if MANIFEST not in names:
        raise ValueError(f"{repo} has no {MANIFEST}: it is no export")
    with published(out) as folder:

        def fetch(name: str) -> None:  # all of one commit
            api.hf_hub_download(repo, name, revision=info.sha, local_dir=folder)

        fetch(MANIFEST)
        for entry in entries_of(read_manifest(folder)):
            if entry["file"] not in names:
                raise ValueError(f"{repo} has no {entry['file']}, but its manifest names it")
            fetch(entry["file"])
            checked_file(folder, entry)
        shutil.rmtree(
            folder / ".cache", ignore_errors=True
        )  # what huggingface_hub keeps beside its downloads
    return out


def entries_of(manifest: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The files that a manifest names, with their checksums."""
    for table in manifest["tables"].values():
        yield from table["files"]
    yield from manifest.get("vocabularies", {}).values()
    dense = manifest["dense"] or {}
    yield from (dense[name] for name in ("program", "compiled") if name in dense)


def model_card(
    manifest: Mapping[str, Any], repo: str, metrics: Mapping[str, float], license: str | None = None
) -> str:
    """The text of ``README.md``: what the export has, and how to load it."""
    from huggingface_hub import ModelCardData

    data = ModelCardData(library_name="tritonrec", license=license, tags=["recommendation"])
    lines = ["---", data.to_yaml(), "---", MADE, "", f"# {repo.rpartition('/')[2]}", ""]
    lines += [f"A recommendation model after {manifest['step']:,} steps, exported by tritonrec.", ""]
    lines += ["| table | rows | dim | format |", "| --- | --: | --: | --- |"]
    for name, table in manifest["tables"].items():
        lines.append(f"| {name} | {table['rows']:,} | {table['dim']} | {table['format']} |")
    if metrics:
        lines += ["", "| metric | value |", "| --- | --: |"]
        lines += [f"| {name} | {value:.4f} |" for name, value in metrics.items()]
    lines += ["", "```python", "from tritonrec.serving import Predictor, hub", ""]
    lines += [f'predictor = Predictor.load(hub.pull("{repo}", "model"))', "```", ""]
    return "\n".join(lines)
