"""Promise: the examples of the documentation run as they stand."""

import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jagged_standin
import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def run(name, *args):
    command = [sys.executable, str(EXAMPLES / name), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ})
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def losses(text):
    return [float(line.split()[1]) for line in text.splitlines() if line.startswith("loss")]


@pytest.mark.slow
def test_plain_pytorch():
    found = losses(run("plain.py"))
    assert len(found) == 3 and found[0] > found[1] > found[2]


@pytest.mark.slow
def test_a_plain_loop_over_dynamic_tables():
    text = run("plain_loop.py")
    found = losses(text)
    assert len(found) == 3 and 4.8 > found[0] > found[1] > found[2]
    assert "scores of a new user: (1, 5)" in text and "rows: 100 users" in text


@pytest.mark.slow
def test_torch_compile_traces_every_op_with_its_backward():
    assert run("compiled.py", "aot_eager").count("agrees") == 3


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler; aot_eager runs above")
def test_torch_compile_with_inductor():
    assert run("compiled.py").count("agrees") == 3


@pytest.fixture
def example(monkeypatch):
    """The example's module over the stand-in."""
    monkeypatch.setitem(sys.modules, "torchrec", jagged_standin)
    spec = importlib.util.spec_from_file_location("torchrec_model_example", EXAMPLES / "torchrec_model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_torchrec_example_over_a_stand_in_for_its_jagged_tensors(example, capsys):
    """The example as it stands, where TorchRec is not installed; `test_torchrec` runs it with TorchRec."""
    example.main()
    text = capsys.readouterr().out
    found = losses(text)
    assert len(found) == 3 and found[0] > found[1] > found[2]
    assert "{'clicked': [3, 0, 1], 'bought': [1, 2, 0]}" in text


def test_torchrec_example_attends_inside_each_feature_of_each_sample(example):
    torch.manual_seed(1)
    model = example.SequenceModel({"a": 40, "b": 40}, dim=8, heads=2, max_seq_len=5)
    lengths = torch.tensor([2, 0, 4, 1, 3, 0])
    values = torch.randint(40, (10,))
    result = model(jagged_standin.KeyedJaggedTensor(["a", "b"], values, lengths=lengths))
    alone = []
    for sample, part in enumerate(values.split(lengths.tolist())):
        rows = model.embeddings.tables["t_a" if sample < 3 else "t_b"](part)
        q, k, v = model.qkv(rows).unflatten(1, (3, 2, -1)).unbind(1)
        scores = torch.nn.functional.silu(torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5) / 5
        attended = torch.einsum("hqk,khd->qhd", scores.tril(), v).flatten(1)
        alone.append((rows + attended).norm(dim=1))
    torch.testing.assert_close(result.weights(), torch.cat(alone), rtol=1e-5, atol=1e-6)


def test_torchrec():
    pytest.importorskip("torchrec", reason="not installed: bash ci/benchmarks/torchrec.sh installs it")
    text = run("torchrec_model.py")
    found = losses(text)
    assert len(found) == 3 and found[0] > found[1] > found[2]
    assert "{'clicked': [3, 0, 1], 'bought': [1, 2, 0]}" in text


def test_torchrec_sasrec(tmp_path):
    """Two runs: the second goes on from the first's checkpoint."""
    pytest.importorskip("torchrec", reason="not installed: bash ci/benchmarks/torchrec.sh installs it")
    arguments = (str(tmp_path), "--data", "zipf:users=60,items=90,seed=2", "--patience", "9", "--epochs")
    lines = run("torchrec_sasrec.py", *arguments, "2").splitlines()
    lines += run("torchrec_sasrec.py", *arguments, "4").splitlines()
    names = [line.split(":")[0] for line in lines]
    assert names == ["step 1", "step 2", "test", "step 3", "step 4", "test"]
    assert all("NDCG@10" in line for line in lines)
    lines = [line for line in lines if line.startswith("step")]
    found = [float(line.split("'loss': ")[1].split(",")[0]) for line in lines]
    assert 3.8 > found[0] > found[-1] > 3.3


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_under_torchrun_the_others_go_on_without_a_rank_that_is_killed(tmp_path, victim):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = ["bash", "docs/examples/elastic.sh", str(tmp_path / "ranks"), "40"]
    where = {"PORT": str(port), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    where |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    lines, begun, killed = [], {}, False
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=EXAMPLES.parents[1],
        env={**os.environ, **where}, start_new_session=True,
    ) as agents:  # fmt: skip
        for line in agents.stdout:
            lines.append(line)
            if found := re.fullmatch(r"process (\d+) begins: (rank \d of \d), step \d+\n", line):
                begun[found[2]] = int(found[1])
            if line.startswith("step 12:") and not killed:  # the others print it again
                os.kill(begun[f"rank {victim} of 3"], signal.SIGKILL)
                killed = True
            if line.startswith("step 40:"):
                break
        deadline = time.monotonic() + 30
        while any(Path(f"/proc/{process}").exists() for process in begun.values()):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.killpg(agents.pid, signal.SIGTERM)  # they wait for the agent of the lost rank
    text = "".join(lines)
    assert {"rank 0 of 2", "rank 1 of 2"} < set(begun) and len(begun) == 5, text
    assert f"lost rank {victim}: rank {victim} " in text
    undisturbed = run("elastic.py", str(tmp_path / "alone"), "40").splitlines(keepends=True)[1:]
    assert len(undisturbed) == 40 and set(re.findall(r"^step \d+: loss \S+\n", text, re.M)) == {*undisturbed}
