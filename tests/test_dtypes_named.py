"""The package names dtype and device of what it makes: no default of torch changes a bit of training."""

import ast
from pathlib import Path

import pytest
import torch
from speeds import slow_except

from tritonrec.distributed import Communicators
from tritonrec.embedding import FeatureConfig, HashTableCollection, Placement
from tritonrec.harness.job import Job
from tritonrec.nn import HSTUConfig
from tritonrec.pipeline import DenseModel, Trainer, WindowConfig

PACKAGE = Path(__file__).resolve().parent.parent / "tritonrec"

# Functions of torch whose result takes the default dtype, with a float argument at least.
BY_DEFAULT = {"as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "normal"}
BY_DEFAULT |= {"logspace", "ones", "rand", "randn", "range", "scalar_tensor", "tensor", "zeros"}
OF_INTEGERS = {"arange", "randint", "randperm"}  # int64 for integers
NEVER = {"Tensor", "FloatTensor", "get_default_dtype", "set_default_dtype", "set_default_tensor_type"}
SIZES = HSTUConfig(dim=8, layers=1, heads=2, qk_dim=3, v_dim=4, max_seq_len=9, dropout=0.2)
ZIPF = "zipf:users=40,items=100,seed=1"
JOBS = {
    "hstu": Job(ZIPF, "hstu", 7, 9, 2, sizes=SIZES),
    "fuxi": Job(ZIPF, "fuxi", 7, 9, 2, sizes=SIZES),
    "dlrm": Job("criteo:samples=60,seed=2", "dlrm", 7, sizes=SIZES, bottom=(6,), top=(5,)),
    "grm": Job("csv:{folder}/log.csv", "grm", 7, 9, max_exposed=3, sizes=SIZES),
}


def unnamed(source: str) -> list[str]:
    """Calls that leave the dtype of a tensor to torch's default."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name = node.func.attr
        if name not in BY_DEFAULT | OF_INTEGERS | NEVER or ast.unparse(node.func.value) != "torch":
            continue
        named = any(keyword.arg == "dtype" for keyword in node.keywords)
        numbers = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
        whole = not any(isinstance(number, float) for number in numbers)
        if name in NEVER or not (named or (name in OF_INTEGERS and whole)):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_every_tensor_is_made_on_a_device():
    """But parts of models, which follow the default device as torch's do, and commands, which set none."""
    makers = BY_DEFAULT - {"as_tensor", "asarray"} | OF_INTEGERS
    follow = ("harness/", "nn/", "kernels/hstu_attention/", "kernels/relative_aggregate/")
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        for node in () if name.startswith(follow) else ast.walk(ast.parse(path.read_text())):
            made = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            made = made and node.func.attr in makers and ast.unparse(node.func.value) == "torch"
            if made and not {"device", None} & {keyword.arg for keyword in node.keywords}:
                found.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


def test_every_tensor_is_made_with_a_dtype():
    found = {str(path.relative_to(PACKAGE)): unnamed(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert len(found) > 200
    assert {path: calls for path, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    "source",
    [
        "torch.empty(3, device=x.device)",
        "torch.full((3,), 1)",
        "y = [torch.tensor(values) for values in lists]",
        "torch.arange(0, 1.5)",
        "torch.arange(0, n, 0.5)",
        "torch.Tensor(3)",
        "torch.set_default_dtype(torch.float32)",
    ],
)
def test_a_tensor_without_one_is_seen(source):
    assert len(unnamed(source)) == 1


@pytest.mark.parametrize("source", ["torch.empty(3, dtype=torch.int64)", "torch.arange(n)", "x.new_empty(3)"])
def test_a_tensor_with_one_passes(source):
    assert unnamed(source) == []


def train(job, mode):
    """Losses, dense parameters, keys and rows after three steps; all that is drawn is drawn from the job."""
    made = job.build("adam")
    loader = job.loader()
    with Trainer(*made, Communicators.local(), mode, WindowConfig(micro_batches=2, seed=1)) as trainer:
        losses = [result.losses for result in trainer.run(loader.batch(step) for step in range(3))]
    model, tables, optimizer = made
    rows = [part for pair in tables.export().values() for part in pair]
    return [*losses, *model.state_dict().values(), *DenseModel(model, optimizer).tensors().values(), *rows]


@pytest.mark.parametrize("name", slow_except(["hstu"], JOBS))
def test_training_keeps_its_bits(name, tmp_path):
    lines = [f"{i % 11},{i * i % 17},{i},{i % 5 + 1}" for i in range(150)]
    (tmp_path / "log.csv").write_text("\n".join(["user,item,timestamp,rating", *lines]))
    job = JOBS[name].on(JOBS[name].data.format(folder=tmp_path))
    expected = train(job, "nestpipe")
    for default in (torch.float64, torch.bfloat16, torch.float16):
        torch.set_default_dtype(default)
        try:
            found = train(job, "nestpipe")
        finally:
            torch.set_default_dtype(torch.float32)
        assert len(found) == len(expected) > 10
        for got, want in zip(found, expected, strict=True):
            assert got.dtype == want.dtype and torch.equal(got, want), default


@pytest.mark.parametrize("placement", ["host", "cached"])
def test_a_default_device_keeps_bits_of_loaders_tables_and_checkpoints(placement, tmp_path):
    def trained(folder):
        with torch.device("cpu"):
            model, _tables, optimizer = JOBS["hstu"].build("adam")
        tables = HashTableCollection(
            [FeatureConfig("item", dim=8)], placement=Placement(placement, device="cpu")
        )
        loader = JOBS["hstu"].loader()
        with Trainer(model, tables, optimizer, Communicators.local(), "nestpipe") as trainer:
            losses = [result.losses for result in trainer.run(loader.batch(step) for step in range(3))]
            trainer.save(tmp_path / folder)
            trainer.load(tmp_path / folder)
            return [*losses, *trainer.evaluate(loader).values(), *tables.export()["item"]]

    with torch.device("meta"):
        found = trained("found")
    for got, want in zip(found, trained("expected"), strict=True):
        assert got == want if isinstance(want, float) else torch.equal(got, want)
