"""Promise: an export comes back from the Hugging Face Hub with its bits, in one commit each way; an altered,
foreign or incomplete repository is refused. The hub is a fake of its HTTP API on this machine."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import pytest
import torch
import yaml
from huggingface_hub import constants
from trainer_parts import adam_trainer

from tritonrec import FeatureConfig
from tritonrec.data import NextItemLoader, load
from tritonrec.nn import HSTU, HSTUConfig
from tritonrec.serving import Predictor, export, hub

REPO = "somebody/films"


class FakeHub(BaseHTTPRequestHandler):
    """What `HfApi` asks of the hub: repositories as lists of commits, large files by LFS."""

    commits: list  # of {name: bytes}
    objects: dict  # of LFS, by sha256

    def log_message(self, *_):
        pass

    def answer(self, body=b"", status=200, **headers):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def files(self, revision):
        number = len(self.commits) if revision == "main" else int(revision, 16)
        return number, self.commits[number - 1] if number else {}

    def do_GET(self):
        path = unquote(self.path.split("?")[0])
        if found := re.fullmatch(rf"/api/models/{REPO}(?:/revision/(.+))?", path):
            number, files = self.files(found[1] or "main")
            siblings = [{"rfilename": name} for name in files]
            return self.answer({"id": REPO, "modelId": REPO, "sha": f"{number:040x}", "siblings": siblings})
        if found := re.fullmatch(rf"/api/models/{REPO}/tree/([^/]+)", path):
            _, files = self.files(found[1])
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in files.items()
            ]
            return self.answer(entries)
        if found := re.fullmatch(rf"/{REPO}/resolve/([^/]+)/(.+)", path):
            number, files = self.files(found[1])
            if found[2] in files:
                content = files[found[2]]
                etag = f'"{hashlib.sha256(content).hexdigest()}"'
                return self.answer(content, ETag=etag, X_Repo_Commit=f"{number:040x}")
        return self.answer({"error": "not found"}, 404, X_Error_Code="EntryNotFound")

    do_HEAD = do_GET

    def do_PUT(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.objects[hashlib.sha256(content).hexdigest()] = content
        self.answer()

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/api/repos/create":
            return self.answer({"url": f"{self.server.url}/{REPO}"})
        if self.path == "/api/validate-yaml":
            head = yaml.safe_load(json.loads(body)["content"].split("---")[1])
            wrong = [] if head["library_name"] == "tritonrec" else [{"message": f"{head}"}]
            return self.answer({"errors": wrong, "warnings": []}, 400 if wrong else 200)
        if "/preupload/" in self.path:
            names = [each["path"] for each in json.loads(body)["files"]]
            modes = ["lfs" if name.endswith((".safetensors", ".pt2")) else "regular" for name in names]
            files = [
                {"path": name, "uploadMode": mode, "shouldIgnore": False, "oid": None}
                for name, mode in zip(names, modes, strict=True)
            ]
            return self.answer({"files": files})
        if self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**each, "actions": {"upload": {"href": f"{self.server.url}/lfs/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]
            return self.answer({"transfer": "basic", "objects": objects})
        if "/commit/" in self.path:
            files = dict(self.commits[-1]) if self.commits else {}
            for line in body.splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "lfsFile":
                    files[value["path"]] = self.objects[value["oid"]]
                elif entry["key"] == "deletedFile":
                    del files[value["path"]]
            self.commits.append(files)
            oid = f"{len(self.commits):040x}"
            return self.answer({"commitOid": oid, "commitUrl": f"{self.server.url}/{REPO}/commit/{oid}"})
        return self.answer({"error": "not found"}, 404)


@pytest.fixture
def commits(monkeypatch):
    """Of a fake hub that is empty: {name: bytes} by commit."""
    handler = type("Handler", (FakeHub,), {"commits": [], "objects": {}})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", server.url)  # as $HF_ENDPOINT does before the import
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE",
            server.url + "/{repo_id}/resolve/{revision}/{filename}",
        )  # fmt: skip
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True, raising=False)
        monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
        yield handler.commits
        server.shutdown()


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Two exports of one training, the first in more files."""
    folder = tmp_path_factory.mktemp("exports")
    loader = NextItemLoader(load("zipf:users=30,items=60,seed=3"), 16, 10, 4, seed=0)
    torch.manual_seed(0)
    model = HSTU(HSTUConfig(dim=8, heads=2, qk_dim=4, v_dim=4, max_seq_len=10, layers=1))
    with adam_trainer(model, [FeatureConfig("item", 8)], lr=3e-3) as trainer:
        for step in range(2):
            trainer.step(loader.batch(step))
            trainer.save(folder / "checkpoints")
            given = {"format": "safetensors", "shard_rows": 20} if step == 0 else {"format": "safetensors"}
            export(folder / "checkpoints", folder / f"step{step + 1}", model, **given)
    return folder


HISTORY = torch.tensor([3, 7, 12])


def test_an_export_comes_back_with_its_bits(commits, exported, tmp_path):
    first = hub.push(exported / "step1", REPO, metrics={"NDCG@10": 0.125}, license="mit")
    assert len(commits) == 1 and first == f"{1:040x}"
    card = commits[0]["README.md"].decode()
    assert "license: mit" in card and "| NDCG@10 | 0.1250 |" in card
    assert "library_name: tritonrec" in card and "| item |" in card and "after 1 steps" in card
    found = hub.pull(REPO, tmp_path / "model")
    theirs = {path.name: path.read_bytes() for path in (exported / "step1").iterdir()}
    assert {path.name: path.read_bytes() for path in found.iterdir()} == theirs
    ours, other = (Predictor.load(path).retrieve(HISTORY, k=5) for path in (found, exported / "step1"))
    assert torch.equal(ours[0], other[0]) and torch.equal(ours[1], other[1])


def test_a_push_replaces_the_export_and_leaves_what_is_others(commits, exported, tmp_path):
    hub.push(exported / "step1", REPO)
    commits[0] |= {"notes.md": b"mine", "README.md": b"# my own text"}
    hub.push(exported / "step2", REPO)
    names = {path.name for path in (exported / "step2").iterdir()}
    assert commits[1].keys() == {*names, "notes.md", "README.md"} and len(commits[0]) > len(commits[1])
    assert commits[1]["README.md"] == b"# my own text"
    assert Predictor.load(hub.pull(REPO, tmp_path / "new")).step == 2
    assert Predictor.load(hub.pull(REPO, tmp_path / "old", revision=f"{1:040x}")).step == 1


def test_what_is_altered_missing_or_no_export_is_refused_and_leaves_nothing(commits, exported, tmp_path):
    hub.push(exported / "step1", REPO)
    table = next(name for name in commits[0] if name.endswith(".safetensors"))
    for change, words in (
        ({table: commits[0][table][:-1] + b"!"}, "was altered"),
        ({table: None}, f"has no {table}"),
        ({"manifest.json": None}, "it is no export"),
    ):
        files = {**commits[0], **change}
        commits.append({name: content for name, content in files.items() if content is not None})
        with pytest.raises(ValueError, match=words):
            hub.pull(REPO, tmp_path / "model")
        assert not any(tmp_path.iterdir())
    (tmp_path / "model").mkdir()
    with pytest.raises(ValueError, match="pull into a new folder"):
        hub.pull(REPO, tmp_path / "model")


def test_nothing_is_pushed_of_a_folder_that_is_no_export_or_altered(commits, exported, tmp_path):
    with pytest.raises(ValueError, match="is no export"):
        hub.push(tmp_path, REPO)
    for path in (exported / "step1").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    table = next(path for path in tmp_path.iterdir() if path.suffix == ".safetensors")
    table.write_bytes(table.read_bytes()[:-1] + b"!")
    with pytest.raises(ValueError, match="was altered"):
        hub.push(tmp_path, REPO)
    assert not commits


def test_what_is_no_metric_and_an_export_at_a_url_are_named(commits, exported):
    with pytest.raises(TypeError, match=r"metrics\['AUC'\] must be a number, got 'good'"):
        hub.push(exported / "step1", REPO, metrics={"AUC": "good"})
    with pytest.raises(ValueError, match=r"memory://step1 is at a URL: copy the export into a folder"):
        hub.push("memory://step1", REPO)
    assert not commits


def test_a_push_that_ends_in_its_uploads_leaves_the_export_before(commits, exported, tmp_path, monkeypatch):
    hub.push(exported / "step1", REPO)

    def refuse(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({"error": "no"}, 403)

    monkeypatch.setattr(FakeHub, "do_PUT", refuse)
    with pytest.raises(RuntimeError, match="Error while uploading"):
        hub.push(exported / "step2", REPO)
    assert len(commits) == 1 and Predictor.load(hub.pull(REPO, tmp_path / "model")).step == 1


def test_a_card_that_was_made_is_made_anew(commits, exported):
    hub.push(exported / "step1", REPO)
    hub.push(exported / "step2", REPO)
    assert b"after 2 steps" in commits[1]["README.md"]
