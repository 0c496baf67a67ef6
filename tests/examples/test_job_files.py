"""Promise: the job files of docs/examples start the same program on every machine: with stand-ins for
SLURM's and Kubernetes' part on one machine."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
SHOWS = '#!/bin/bash\necho "torchrun $*"\n'
RUNS = f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n'
# SLURM starts a task on every machine, with the machine's number, and waits for all of them.
SRUN = """#!/bin/bash
for id in $(seq 0 $((SLURM_NNODES - 1))); do SLURM_NODEID=$id "$@" & tasks="$tasks $!"; done
for task in $tasks; do wait "$task" || exit 1; done
"""
TINY = ["--data", "zipf:users=30,items=40,ratings=1", "--epochs", "1", "--precision", "float32"]


@pytest.fixture
def stand_ins(tmp_path):
    """Writes programs into a folder and returns an environment that finds them first."""

    def make(torchrun):
        for name, text in {
            "torchrun": torchrun,
            "srun": SRUN,
            "scontrol": "#!/bin/bash\necho localhost\nsleep 0.3\necho elsewhere\n",
        }.items():
            program = tmp_path / name
            program.write_text(text)
            program.chmod(0o755)
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        job = {"SLURM_JOB_NODELIST": "n[0-1]", "SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": "2"}
        return {**environment, **job, "OMP_NUM_THREADS": "1"}

    return make


def slurm(environment, *arguments):
    command = ["bash", str(EXAMPLES / "slurm.sh"), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)


def test_slurm_starts_torchrun_once_on_every_machine(stand_ins):
    done = slurm(stand_ins(SHOWS), "out/my run", "--data", "csv:a b.csv")
    assert done.returncode == 0, done.stderr
    port = 20000 + os.getpid() % 10000
    assert sorted(done.stdout.splitlines()) == [
        f"torchrun --nnodes 2 --node-rank {node} --master-addr localhost --master-port {port} "
        "--nproc-per-node 2 docs/examples/sasrec.py out/my run --data csv:a b.csv"
        for node in (0, 1)
    ]


def test_slurm_without_a_folder_says_what_is_missing(stand_ins):
    done = slurm(stand_ins(SHOWS))
    assert done.returncode != 0 and "where do checkpoints and events go?" in done.stderr


@pytest.mark.slow
@pytest.mark.multi_rank
def test_two_machines_under_slurm_train_and_go_on(stand_ins, tmp_path):
    environment = stand_ins(RUNS) | {"RANKS_PER_NODE": "1"}
    done = slurm(environment, str(tmp_path / "run"), *TINY)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("test: {") == 1 and "NDCG@10" in done.stdout and (tmp_path / "run").is_dir()
    again = slurm(environment, str(tmp_path / "run"), *TINY[:2], "--epochs", "2", *TINY[4:])
    assert again.returncode == 0 and again.stdout.count("test: {") == 1, again.stderr[-3000:]


def documents():
    return {each["kind"]: each for each in yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())}


def test_the_pods_of_the_job_find_each_other():
    found = documents()
    job, service = found["Job"], found["Service"]
    pod = job["spec"]["template"]["spec"]
    name, size = job["metadata"]["name"], job["spec"]["completions"]
    assert job["spec"]["completionMode"] == "Indexed" and job["spec"]["parallelism"] == size
    assert pod["subdomain"] == service["metadata"]["name"] and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    (container,) = pod["containers"]
    (line,) = container["args"]
    assert f"--master-addr {name}-0.{pod['subdomain']} " in line and f"--nnodes {size} " in line
    (mount,) = container["volumeMounts"]
    assert f" {mount['mountPath']}/" in line
    (volume,) = pod["volumes"]
    assert volume["name"] == mount["name"]
    assert volume["persistentVolumeClaim"]["claimName"] == found["PersistentVolumeClaim"]["metadata"]["name"]


def test_each_pod_starts_torchrun_with_its_number(stand_ins):
    (container,) = documents()["Job"]["spec"]["template"]["spec"]["containers"]
    environment = stand_ins(SHOWS) | {"JOB_COMPLETION_INDEX": "1"}
    command = [*container["command"], *container["args"]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "--node-rank 1 --master-addr tritonrec-0.tritonrec" in done.stdout
    words = done.stdout.split()
    assert (ROOT / words[words.index("2", words.index("--nproc-per-node")) + 1]).is_file()


def test_the_image_has_the_name_and_the_program():
    dockerfile = (EXAMPLES / "Dockerfile").read_text()
    (container,) = documents()["Job"]["spec"]["template"]["spec"]["containers"]
    tag = re.search(r"-t (\S+)", dockerfile)[1]
    assert container["image"] == tag and "COPY docs/examples docs/examples" in dockerfile
    assert f"docker build -f docs/examples/Dockerfile -t {tag} ." in (ROOT / "docs/tutorial.md").read_text()


def test_the_image_installs_the_wheel_that_has_compiled_kernels():
    build, run = (EXAMPLES / "Dockerfile").read_text().split("\nFROM ")[1:]
    assert "make wheel" in build and "COPY --from=build /tritonrec/dist " in run
    assert "make wheel" not in run and "COPY . ." not in run
    assert re.search(
        r"^wheel:.*\n(.*\n)*?\t.*ci/wheel.sh dist out/kernels", (ROOT / "Makefile").read_text(), re.M
    )
    assert (ROOT / "constraints.txt").is_file()


@pytest.mark.slow
def test_the_first_program_trains_the_same_on_two_ranks():
    command = [sys.executable, str(EXAMPLES / "train.py")]
    ranks = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        command[1],
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    printed = [
        subprocess.run(each, env=environment, capture_output=True, text=True, check=True).stdout
        for each in (command, ranks)
    ]
    assert printed[0] == printed[1] and printed[0].count("loss") == 4
