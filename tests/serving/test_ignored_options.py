"""Promise: no option of `serve`, `score` and `export` is ignored in silence: it has a meaning whatever else
is given, or is refused by name where it has none.
"""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import uvicorn
from served_models import SIZES, export_dlrm, export_hstu
from typer.testing import CliRunner

from tritonrec.harness import cli
from tritonrec.nn import HSTU
from tritonrec.serving import export
from tritonrec.serving.server import ServerConfig
from tritonrec.serving.server.run import Source, serve

ALWAYS = {
    "serve": {
        "port", "batch", "latency", "queue", "timeout", "max_body", "max_values", "max_connections", "model",
        "host", "token_file", "follow",
    },
    "score": {"source", "out", "model", "batch", "part"},
    "export": {"checkpoint", "out", "step", "format", "metadata", "shard_rows", "weights"},
}  # fmt: skip
"""Options with a meaning beside all others."""
REFUSED = [
    ("serve", "items", ["--memory", "1GiB"], "--memory goes with --cached"),
    ("serve", "items", ["--host-memory", "1GiB"], "--host-memory goes with --cached"),
    ("serve", "items", ["--max-lag", "3"], "--max-lag goes with --follow"),
    ("serve", "items", ["--max-users", "9", "--workers", "2"], "--max-users does not go with --workers"),
    ("serve", "clicks", ["--max-users", "9"], "--max-users goes with users' events"),
    ("serve", "items", ["--ranks", "2", "--workers", "2"], "--ranks does not go with --workers"),
    ("serve", "items", ["--ranks", "2", "--approximate", "hnsw"], "--ranks does not go with --approximate"),
    ("serve", "items", ["--ranks", "2", "--device", "cuda"], "--device does not go with --ranks"),
    ("serve", "items", ["--follow", "x", "--approximate", "ivf"], "--approximate does not go with --follow"),
    ("serve", "clicks", ["--approximate", "ivf"], "an approximate retrieval needs a dense model of kind"),
    ("score", "clicks", ["--history", "row"], "history has no meaning with a model of clicks"),
    ("score", "clicks", ["--timestamps", "row"], "timestamps has no meaning with a model of clicks"),
    ("score", "clicks", ["--candidates", "row"], "candidates has no meaning with a model of clicks"),
    ("score", "clicks", ["--k", "3"], "k has no meaning with a model of clicks"),
    ("score", "clicks", ["--no-exclude-history"], "exclude_history has no meaning with a model of clicks"),
    ("score", "items", ["--dense", "row"], "dense has no meaning with a model of the next item"),
    ("score", "items", ["--timestamps", "row"], "timestamps has no meaning with a model without times"),
    ("score", "items", ["--candidates", "c", "--k", "5"], "k has no meaning with candidates"),
    ("score", "items", ["--candidates", "c", "--no-exclude-history"], "exclude_history has no meaning with"),
    ("export", "run", ["--tables-only", "--compiled"], "compiled goes with a model"),
    ("export", "run", ["--tables-only", "--onnx", "x.onnx"], "--onnx does not go with --tables-only"),
]  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    (folder / "clicks").mkdir()
    found = {"items": export_hstu(folder)[0], "clicks": export_dlrm(folder / "clicks")[0]}
    pq.write_table(pa.table({"history": [[1]], "row": [1], "c": [[2]]}), folder / "in.parquet")
    return found | {"run": folder / "run", "in": folder / "in.parquet"}


@pytest.mark.every_case
@pytest.mark.parametrize(("command", "model", "options", "says"), REFUSED)
def test_an_option_without_a_meaning_is_refused(models, tmp_path, monkeypatch, command, model, options, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRITONREC_TOKEN", raising=False)
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_: pytest.fail("it serves"))
    words = {
        "serve": [models[model]],
        "score": [models["in"], "out", "--model", models[model]],
        "export": [models[model], "out"],
    }[command]
    result = CliRunner(env={"COLUMNS": "400"}).invoke(cli.app, [command, *map(str, words), *options])
    told = " ".join(result.output.replace("│", " ").split())
    assert result.exit_code == 2 and says in told, told


def test_every_option_is_refused_somewhere_or_has_a_meaning_beside_all_others():
    for command, always in ALWAYS.items():
        named = {
            word[2:].removeprefix("no-").replace("-", "_")
            for of, _, options, _ in REFUSED if of == command for word in options if word[:2] == "--"
        }  # fmt: skip
        elsewhere = {"cached"} if command == "serve" else set()  # below
        params = {each.name.removeprefix("no_") for each in cli.load(command).params}
        assert params == always | named | elsewhere, command


def test_what_of_python_has_no_meaning(models, tmp_path):
    with pytest.raises(ValueError, match="--cached needs a dense model of kind next_item"):
        Source(models["clicks"], HSTU(SIZES)).open(ServerConfig())
    with pytest.raises(ValueError, match="needs one worker"):
        serve(Source(models["items"], HSTU(SIZES)), ServerConfig(workers=2))
    none = torch.nn.Identity()
    for given in ({"scorer": none}, {"examples": [(torch.ones(1),)]}, {"precision": "bf16"}):
        with pytest.raises(ValueError, match=f"{next(iter(given))} goes with a model"):
            export(models["run"], tmp_path / "out", **given)
    with pytest.raises(ValueError, match="examples goes with a scorer"):
        export(models["run"], tmp_path / "out", HSTU(SIZES), examples=[(torch.ones(1),)])
