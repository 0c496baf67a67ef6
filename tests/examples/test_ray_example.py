"""Promise: ray_train.py trains the digits of one process, also where a worker is killed and Ray starts all
anew: by Ray itself where it is installed, and always by a stand-in for the part of it that the example calls.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs/examples/ray_train.py"
STAND_IN = """
import os, socket, sys, torch.distributed as dist
from torch import multiprocessing
from pathlib import Path
from types import SimpleNamespace
ScalingConfig = RunConfig = FailureConfig = SimpleNamespace

def report(metrics):
    dies = Path(sys.argv[1]) / "died"
    if metrics["step"] == 10 and dist.get_rank() == 1 and not dies.exists():
        dies.touch()
        os._exit(1)

def work(rank, train, config, size, port):
    about = dict(RANK=rank, WORLD_SIZE=size, LOCAL_RANK=rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.environ.update({name: str(value) for name, value in about.items()})
    dist.init_process_group("gloo", rank=rank, world_size=size)
    train(config)
    dist.destroy_process_group()

class TorchTrainer:
    def __init__(self, train, train_loop_config, scaling_config, run_config):
        self.parts, self.size = (train, train_loop_config), scaling_config.num_workers
        self.failures = run_config.failure_config.max_failures

    def fit(self):
        for failures in range(self.failures + 1):
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            try:
                return multiprocessing.start_processes(
                    work, (*self.parts, self.size, port), self.size, start_method="fork"
                )
            except Exception as error:
                print(f"a worker is lost: {error}", flush=True)
"""


def environment(*paths):
    paths = os.pathsep.join(map(str, (*paths, ROOT)))
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0"}


def losses(text):
    """By step the digits that were printed, in train.py's places; a step that comes again has the same."""
    found = {}
    for step, loss in re.findall(r"step (\d+): loss (\d+\.\d+)", text):
        assert found.setdefault(int(step), loss) == loss
    return {step: f"{float(loss):.4f}" for step, loss in found.items() if step % 5 == 0}


def of_one_process():
    """What train.py prints, as README.md has it."""
    return losses((ROOT / "README.md").read_text())


@pytest.mark.if_changed
@pytest.mark.multi_rank
def test_workers_are_started_anew_and_go_on_with_the_digits_of_one_process(tmp_path):
    (tmp_path / "ray/train").mkdir(parents=True)
    (tmp_path / "ray/__init__.py").touch()  # else the package that is installed comes first
    (tmp_path / "ray/train/__init__.py").write_text(STAND_IN)
    (tmp_path / "ray/train/torch.py").write_text("from ray.train import TorchTrainer")
    command = [sys.executable, EXAMPLE, str(tmp_path)]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("a worker is lost") == 1 and (tmp_path / "died").exists()
    assert losses(done.stdout) == of_one_process()
    assert done.stdout.count("step 11:") == 1  # from the checkpoint of step 10 on


@pytest.mark.slow
@pytest.mark.timeout(900)  # Ray starts a dozen processes, twice
@pytest.mark.multi_rank
def test_ray_itself_starts_workers_anew(tmp_path):
    pytest.importorskip("ray", reason="240 MB: pip install 'tritonrec[heavy]'")
    command = [sys.executable, EXAMPLE, str(tmp_path)]
    running = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    text, killed = "", 0
    for line in running.stdout:
        text += line
        if not killed and "step 7:" in line:
            killed = int(re.search(r"pid=(\d+)", line)[1])
            os.kill(killed, signal.SIGKILL)
    assert running.wait() == 0 and killed, text[-3000:]
    assert losses(text) == of_one_process()
