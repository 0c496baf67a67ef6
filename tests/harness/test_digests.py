"""Promise: a change of structure moves no bit: every model ends at the SHA-256 recorded in digests.json.

torch's functions round differently on different processors, so the file has a record for each kind that was
at hand. `python tests/harness/test_digests.py` adds that of this processor, or makes it again; after a change
that is meant to move bits it also takes the digests that moved out of other processors' records.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from random import Random

import pytest
import torch
from numba.core.codegen import get_host_cpu_features

from tritonrec.distributed import Communicators, RankPool
from tritonrec.harness.job import Job
from tritonrec.harness.train.loop import train
from tritonrec.harness.train.run import Run
from tritonrec.kernels.kernel_cache import targets_of
from tritonrec.nn import HSTUConfig
from tritonrec.pipeline import WindowConfig

RECORDED = Path(__file__).with_name("digests.json")
WORLD_SIZES = (1, 2, 4)
CONSISTENCIES = ("batch", "window")
MODELS = ("hstu", "fuxi", "grm", "dlrm")
SPEEDS = [*(pytest.param(model, marks=pytest.mark.slow) for model in MODELS if model != "dlrm"), "dlrm"]
STEPS = 4

pytestmark = pytest.mark.multi_rank


def write_ratings(folder: Path) -> str:
    """A log with ratings, as GRM needs it; its path stands in no digest."""
    random, log = Random(5), folder / "ratings.csv"
    rows = [
        f"{user},{random.randint(0, 40)},{time},{random.randint(1, 5)}"
        for user in range(40)
        for time in range(random.randint(4, 25))
    ]
    log.write_text("\n".join(["user,item,timestamp,rating", *rows]))
    return f"csv:{log}"


def job_of(model: str, ratings: str) -> Job:
    sizes = HSTUConfig(dim=12, layers=2, heads=2, qk_dim=5, v_dim=7, max_seq_len=16, dropout=0.3)
    data = {"grm": ratings, "dlrm": "criteo:samples=400,seed=3"}.get(model, "zipf:users=120,items=200,seed=5")
    return Job(
        data, model, batch_size=21, max_seq_len=16, num_negatives=3, max_exposed=3, sizes=sizes, lr=0.01,
        bottom=(16, 8), top=(16, 8),
    )  # fmt: skip


def digests(
    pool: RankPool | None, model: str, ratings: str, sizes: tuple[int, ...] = WORLD_SIZES
) -> dict[str, str]:
    """By consistency and world size, the digest that `tritonrec train` prints."""
    found = {}
    for consistency in CONSISTENCIES:
        run = Run(job_of(model, ratings), "nestpipe", WindowConfig(3, consistency), steps=STEPS)
        for size in sizes:
            if pool is None or size == 1:
                summary = train(Communicators.local(), run, True)
            else:
                summary = pool.run(train, size, run, True)[0]
            found[f"{consistency} W={size}"] = summary["digest"]
    return found


def arithmetic() -> dict[str, str]:
    """By consistency, the digest of the torch functions that it rests on; they differ between processors."""
    x = torch.linspace(-9, 9, 4099)
    rows = x[:4096].view(64, 64)
    elementwise = [
        x.exp(), x.tanh(), x.abs().add(1e-3).rsqrt(), x.abs().add(1e-3).log(), rows.softmax(1),
        torch.nn.functional.layer_norm(rows, (64,)), x.exp().log1p(),
        *(x[:4092].view(-1, experts).softmax(1) for experts in (2, 3, 4)),
    ]  # fmt: skip
    products = [
        rows[:length, :columns].t() @ rows[:length, -width:]
        for length in range(65)
        for columns, width in ((12, 12), (12, 28), (12, 38), (38, 12), (52, 12), (8, 16))
    ]
    return {"batch": _sha(elementwise), "window": _sha(elementwise + products)}


def _sha(values: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(value.contiguous().numpy().tobytes() for value in values)).hexdigest()


def recorded() -> list[dict]:
    """A record for each kind of processor: its `arithmetic`, and for each model its `digests`."""
    return json.loads(RECORDED.read_text())


def record_of(consistency: str, here: dict[str, str]) -> dict | None:
    """The record of a processor that computes as this one does."""
    same = (each for each in recorded() if each["arithmetic"][consistency] == here[consistency])
    return next(same, None)


@pytest.fixture
def one_thread():
    """As the ranks of a pool: the order of a float32 sum may depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def ratings(tmp_path_factory):
    return write_ratings(tmp_path_factory.mktemp("ratings"))


@pytest.mark.parametrize("model", SPEEDS)
def test_the_digests_are_those_recorded(pool, ratings, model, one_thread):
    found = digests(pool, model, ratings)
    # On any processor the consistency "batch" gives one digest at every world size.
    assert len({digest for name, digest in found.items() if name.startswith("batch")}) == 1
    here = arithmetic()
    known = {consistency: record_of(consistency, here) for consistency in CONSISTENCIES}
    for name, digest in found.items():
        if (there := known[name.split()[0]]) is not None:
            assert digest == there[model].get(name, digest), name
    if not any(known.values()):
        pytest.skip("not recorded on a processor whose exp, rsqrt or layer_norm round as here")


TARGETS = ["x86-64", *targets_of(("", "", get_host_cpu_features()))]
COMPILED_FOR = """
import json, sys, torch
sys.path.insert(0, sys.argv[1])
import test_digests
torch.set_num_threads(1)
found = {model: test_digests.digests(None, model, sys.argv[2], (1,)) for model in test_digests.MODELS}
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compiled_for_another_processor_give_the_same_digests(ratings, target, one_thread, tmp_path):
    """From vectors of 128 bits and no multiply-add to 512: those of a wheel, and of the oldest processor."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILED_FOR, str(Path(__file__).parent), ratings],
        capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "NUMBA_CPU_NAME": target,
             "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(list(tmp_path.rglob("*.nbc"))) > 50  # compiled here, for this target
    assert json.loads(done.stdout.splitlines()[-1]) == {
        model: digests(None, model, ratings, (1,)) for model in MODELS
    }


def record() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, RankPool((2, 4)) as pool:
        ratings = write_ratings(Path(folder))
        found = {model: digests(pool, model, ratings) for model in MODELS}
    here = {"arithmetic": arithmetic(), **found}
    before = next((each for each in recorded() if each["arithmetic"] == here["arithmetic"]), here)
    others = [each for each in recorded() if each["arithmetic"] != here["arithmetic"]]
    for other, model in product(others, MODELS):
        moved = {name for name, digest in found[model].items() if digest != before[model].get(name, digest)}
        other[model] = {name: digest for name, digest in other[model].items() if name not in moved}
    RECORDED.write_text(json.dumps([*others, here], indent=1) + "\n")


if __name__ == "__main__":
    record()
