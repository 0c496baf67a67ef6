"""Promise: a dense model that FSDP2 has sharded trains with the bits of the whole one, in every layout."""

import copy
import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from speeds import slow_except
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tritonrec.distributed import Communicators
from tritonrec.harness.job import Job, dense_optimizer
from tritonrec.nn import HSTUConfig
from tritonrec.pipeline import StageFailedError, Trainer, WindowConfig
from tritonrec.pipeline.sharded import Cut, Shards

pytestmark = pytest.mark.multi_rank

SIZES = HSTUConfig(dim=6, layers=2, heads=2, qk_dim=3, v_dim=4, max_seq_len=9, dropout=0.2)
JOB = Job(
    "zipf:users=60,items=200,seed=1", batch_size=5, max_seq_len=9, num_negatives=1, sizes=SIZES, lr=0.05
)
STEPS = 4


def mesh_of(communicators):
    """A mesh of these ranks, on a group that no lane uses."""
    group = communicators.control.group
    if group is None:
        group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return DeviceMesh.from_group(group, "cpu")


def shard(model, mesh, by="layer", **options):
    """All of the model, layer by layer or at once; "part" leaves all but the layers as they are."""
    if by != "whole":
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, **options)
    return model if by == "part" else fully_shard(model, mesh=mesh, **options)


def optimizer_of(model, rule="adam"):
    return dense_optimizer(model.parameters(), rule, JOB.lr, fused=False)


def parts(rule="adam", mesh=None, by="layer"):
    model, tables, _ = JOB.build(rule)
    if mesh is not None:
        shard(model, mesh, by)
    return model, tables, optimizer_of(model, rule)


def averaged(model, mesh=None, by="layer"):
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    if mesh is not None:
        shard(average.module, mesh, by)
    return average


def run(made, communicators, mode, window, first=0, last=STEPS, load="", save="", **recipe):
    """Losses and norms, and the state after the last step, whole."""
    loader = JOB.loader(communicators.rank, communicators.world_size)
    with Trainer(*made, communicators, mode, window, **recipe) as trainer:
        if load:
            assert trainer.load(load) == first
        results = list(trainer.run(loader.batch(step) for step in range(first, last)))
        if save:
            trainer.save(save)
        state = {name: each.clone() for name, each in trainer.dense.whole_tensors().items()}
    return [(result.loss, result.grad_norm) for result in results], state


def reference(rule="adam", **options):
    return run(parts(rule), Communicators.local(), "reference", WindowConfig(**options))


def differing(got, want):
    """What differs: "losses", or names of tensors."""
    losses = [] if got[0] == want[0] else ["losses"]
    assert got[1].keys() == want[1].keys()
    return losses + [name for name, each in want[1].items() if not torch.equal(got[1][name], each)]


def of_ranks(communicators, cases):
    """For each (mode, by, rule, window options) a run of the sharded model."""
    mesh = mesh_of(communicators)
    return [
        run(parts(rule, mesh, by), communicators, mode, WindowConfig(**window))
        for mode, by, rule, window in cases
    ]


CASES = {
    "nestpipe": ("nestpipe", "layer", "adam", {"micro_batches": 3}),
    "sequential": ("sequential", "whole", "adam", {"micro_batches": 2}),
    "some plain": ("fwp", "part", "adam", {"micro_batches": 8}),
    "sgd": ("dbp", "layer", "sgd", {"micro_batches": 1}),
    "accumulate": ("nestpipe", "layer", "adam", {"micro_batches": 2, "accumulate": 2}),
    "clip": ("nestpipe", "part", "adam", {"micro_batches": 2, "max_grad_norm": 0.02, "max_grad_value": 0.01}),
    "norm": ("nestpipe", "layer", "adam", {"micro_batches": 2, "skip_nonfinite": True}),
}


QUICK = ["nestpipe", "clip"]


def compare(pool, ranks, names):
    found = pool.run(of_ranks, ranks, [CASES[name] for name in names])
    for place, name in enumerate(names):
        *_, rule, window = CASES[name]
        want = reference(rule, **{**window, "micro_batches": 1})
        assert all(not differing(each[place], want) for each in found), name


@pytest.mark.if_changed
def test_two_ranks_have_the_bits_of_the_whole_model(pool):
    compare(pool, 2, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", (1, 2, 3, 4))
def test_every_layout_has_the_bits_of_the_whole_model(pool, ranks):
    compare(pool, ranks, list(CASES))


@pytest.mark.slow
def test_copies_of_the_tables_change_no_bit(pool):
    for got in pool.run(of_ranks, 4, [CASES["norm"], CASES["clip"]], replicas=2):
        for found, name in zip(got, ("norm", "clip"), strict=True):
            *_, rule, window = CASES[name]
            assert not differing(found, reference(rule, **{**window, "micro_batches": 1})), name


@pytest.mark.slow
def test_window_consistency_has_the_bits_of_the_same_cut_of_the_whole_model(pool):
    window = {"micro_batches": 2, "consistency": "window"}
    ((sharded,), _) = pool.run(of_ranks, 2, [("nestpipe", "layer", "adam", window)])
    assert not differing(sharded, pool.run(whole_of_ranks, 2, window)[0])


def whole_of_ranks(communicators, window):
    return run(parts(), communicators, "sequential", WindowConfig(**window))


def averaged_of_ranks(communicators):
    mesh = mesh_of(communicators)
    model, tables, _ = JOB.build("adam")
    average = averaged(model, mesh)
    made = shard(model, mesh), tables, optimizer_of(model)
    return run(made, communicators, "nestpipe", WindowConfig(2), average=average)


@pytest.mark.slow
def test_the_average_is_that_of_the_whole_model(pool):
    made = parts()
    want = run(made, Communicators.local(), "reference", WindowConfig(), average=averaged(made[0]))
    assert any(name.startswith("average/") for name in want[1])
    assert not differing(pool.run(averaged_of_ranks, 2)[0], want)


def stretch(communicators, first, last, load, save, by):
    mesh = mesh_of(communicators) if by else None
    made = parts(mesh=mesh, by=by)
    return run(made, communicators, "nestpipe", WindowConfig(2), first, last, load, save)


RESTARTS = [((2, "layer"), (1, "")), ((1, ""), (3, "whole")), ((4, "part"), (2, "layer"))]


@pytest.mark.parametrize(("before", "after"), slow_except(RESTARTS[:1], RESTARTS))
def test_a_checkpoint_goes_on_at_another_world_size_sharded_or_not(pool, tmp_path, before, after):
    want = reference()
    pool.run(stretch, before[0], 0, 2, "", str(tmp_path), before[1])
    (got, *_) = pool.run(stretch, after[0], 2, STEPS, str(tmp_path), "", after[1])
    assert got[0] == want[0][2:] and not differing((want[0], got[1]), want)


def frozen(made):
    model = made[0]
    for parameter in (model.norm.weight, model.layers[0].uvqk.weight):
        parameter.requires_grad_(False)
    return made


def frozen_of_ranks(communicators):
    """A run that begins with frozen parameters, and one in which they are frozen half way."""
    mesh = mesh_of(communicators)
    return frozen_runs(communicators, mesh, "nestpipe", WindowConfig(3))


def frozen_runs(communicators, mesh, mode, window):
    later = parts(mesh=mesh)
    first = run(frozen(parts(mesh=mesh)), communicators, mode, window)
    before = run(later, communicators, mode, window, 0, 2)
    return first, before, run(frozen(later), communicators, mode, window, 2, STEPS)


@pytest.mark.slow
def test_frozen_parameters_stay(pool):
    want = frozen_runs(Communicators.local(), None, "reference", WindowConfig())
    for got in pool.run(frozen_of_ranks, 2):
        assert not any(map(differing, got, want))


def shares(communicators):
    """Values of whole parameters, of this rank's shards, and of the optimizer's state of those."""
    made = parts(mesh=mesh_of(communicators))
    whole = sum(each.numel() for each in made[0].parameters())
    run(made, communicators, "nestpipe", WindowConfig(2), last=1)
    own = [each.to_local().numel() for each in made[0].parameters()]
    states = [state["exp_avg"].to_local().numel() for state in made[2].state.values()]
    return whole, sum(own), sum(states), all(isinstance(each, DTensor) for each in made[0].parameters())


def test_a_rank_keeps_its_shards_and_their_optimizer_state_alone(pool):
    found = pool.run(shares, 2)
    assert sum(own for _, own, _, _ in found) == found[0][0] and all(each[3] for each in found)
    assert all(own == state and own < 0.6 * whole for whole, own, state, _ in found)


class Halves(torch.nn.Module):
    """Two layers of torch, which its own FSDP2 can train on a CPU; the second gets a fault."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(6))
        self.layers = torch.nn.ModuleList([torch.nn.Linear(6, 6), torch.nn.Linear(6, 1)])
        self.fails = False

    def forward(self, batch, rows, seed):
        if self.fails:
            raise ArithmeticError("no second layer")
        first, second = self.layers
        per_token = second(torch.tanh(first(self.scale * rows["item"]))).squeeze(1)
        return torch.stack([per_token[i :: batch.num_samples].sum() for i in range(batch.num_samples)])


def given_back(communicators):
    """A model trained by the trainer, by FSDP2 and a loop, and by the trainer again, up to an error."""
    torch.manual_seed(1)
    model, (_, tables, _) = Halves(), JOB.build("adam")
    shard(model, mesh_of(communicators))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    window, loader = WindowConfig(2, consistency="window"), JOB.loader(communicators.rank, 2)
    with Trainer(model, tables, optimizer, communicators, "nestpipe", window) as trainer:
        list(trainer.run(loader.batch(step) for step in range(2)))
        before = copy.deepcopy(trainer.dense.state_dict()["model"])
        rows = {"item": torch.full((9, 6), 1.0 + communicators.rank)}
        model(loader.batch(2), rows, 0).sum().backward()
        gradients = [each.grad.full_tensor() for each in model.parameters()]
        optimizer.zero_grad()
        model(loader.batch(2), rows, 0)
        whole = [name for name, each in model.named_parameters() if not isinstance(each, DTensor)]
        assert whole == ["scale"]  # FSDP2 leaves those of the root alone as they are
        assert trainer.step(loader.batch(2)).step == 2
        model.fails = True
        with pytest.raises(StageFailedError, match="no second layer"):
            trainer.step(loader.batch(3))
    return before, gradients, [isinstance(each, DTensor) for each in model.parameters()]


@pytest.mark.slow
def test_outside_of_a_flight_the_model_is_fsdp2s(pool):
    found = pool.run(given_back, 2)
    before, gradients, types = found[0]
    assert all(types) and all(each.any() for each in gradients)
    model = Halves()
    model.load_state_dict(before)
    losses = [
        model(JOB.loader(rank, 2).batch(2), {"item": torch.full((9, 6), 1.0 + rank)}, 0).sum()
        for rank in (0, 1)
    ]
    (sum(losses) / 2).backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def refusals(communicators):
    """What the trainer says to models and optimizers that it does not take."""
    mesh, said = mesh_of(communicators), {}

    def refuse(name, mode="nestpipe", mesh=mesh, optimizer=optimizer_of, average=None, **options):
        model, tables, _ = JOB.build("adam")
        taken = {} if average is None else {"average": average(model)}
        try:
            shard(model, mesh, **options)
            with Trainer(
                model, tables, optimizer(model), communicators, mode, WindowConfig(), **taken
            ) as each:
                each.step(JOB.loader(communicators.rank, communicators.world_size).batch(0))
            said[name] = ""
        except (ValueError, TypeError) as error:
            said[name] = str(error)

    def muon(model):
        matrices = [each for each in model.parameters() if each.dim() == 2]
        others = [each for each in model.parameters() if each.dim() != 2]
        return [torch.optim.Muon(matrices), torch.optim.AdamW(others)]

    refuse("muon", optimizer=muon)
    refuse("adafactor", optimizer=lambda model: torch.optim.Adafactor(model.parameters()))
    refuse("fused", optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1, fused=True))
    refuse("average", average=averaged)
    refuse("16 bits", mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    refuse("fewer ranks", mesh=mesh_of(Communicators.local()))
    refuse("reference", mode="reference")
    return said


def test_what_is_refused(pool):
    said = pool.run(refusals, 2)[0]
    for name, words in {
        "muon": "Muon .* updates a part of a parameter otherwise than the whole",
        "adafactor": "Adafactor .* take an elementwise optimizer",
        "fused": "pass fused=False for sharded parameters",
        "average": "fully_shard on the model and in the same way on average.module",
        "16 bits": "gathered as torch.bfloat16: leave MixedPrecisionPolicy away",
        "fewer ranks": "rank 0 of 2 has shard 0 of 1 of the dense parameters",
        "reference": "mode 'reference' takes a model that is not sharded",
    }.items():
        assert re.search(words, said[name]), (name, said[name])


def test_a_position_has_the_name_of_its_parameter_and_its_place_in_the_whole():
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(4, 2), "c": torch.zeros(1)}
    parameters = {name: SimpleNamespace(to_local=lambda each=each: each) for name, each in tensors.items()}
    cuts = {"a": Cut(0, (0, 2, 4)), "b": Cut(1, (0, 2, 3)), "c": Cut(0, (0, 1, 2))}
    shards = SimpleNamespace(_trained=[*tensors], parameters=parameters, _cuts=cuts, rank=1)
    found = [Shards.name_at(shards, position) for position in (0, 5, 6, 13, 14)]
    places = ["a: gradient at (2, 0)", "a: gradient at (3, 2)", "b: gradient at (0, 2)"]
    assert found == [*places, "b: gradient at (3, 3)", "c: gradient at (1,)"]
    with pytest.raises(IndexError, match="a position 2 values behind the end of the last parameter"):
        Shards.name_at(shards, 17)


def test_a_parameter_of_two_modules_is_moved_once():
    parameter, moved = torch.nn.Parameter(torch.arange(4.0)), SimpleNamespace(_buffers={})
    memory = parameter.data
    for _ in range(2):
        Shards._move_one(moved, parameter)
        assert parameter.tolist() == [0, 1, 2, 3] and not memory.untyped_storage().size()


class Root:
    """Of FSDP2, which notes the settings that it gets."""

    def __init__(self):
        self.settings = []

    def __getattr__(self, name):
        if not name.startswith("set_"):
            raise AttributeError(name)
        return lambda value, **rest: self.settings.append((name.removeprefix("set_"), value, *rest.items()))

    def register_forward_pre_hook(self, hook):
        return SimpleNamespace(remove=lambda: self.settings.append("hook removed"))


def test_in_flight_a_model_is_gathered_by_the_trainer_alone_and_afterwards_by_fsdp2():
    root, log, model = Root(), [], torch.nn.Linear(2, 2)
    shards = SimpleNamespace(
        _roots=[root], _model=model, _called=set(), _buffers={}, parameters=dict(model.named_parameters()),
        gather=lambda: log.append("gather"), scatter=lambda: log.append("scatter"), _note_call=print,
    )  # fmt: skip
    Shards.begin(shards)
    assert root.settings == [
        ("requires_gradient_sync", False),
        ("reshard_after_forward", False),
        ("reshard_after_backward", False),
    ]  # fmt: skip
    assert shards._trained == ["weight", "bias"] and log == ["gather"]
    root.settings.clear()
    Shards.end(shards)
    assert root.settings == [
        "hook removed", ("requires_gradient_sync", True), ("reshard_after_backward", True),
        ("reshard_after_forward", True), ("reshard_after_forward", False, ("recurse", False)),
    ]  # fmt: skip
    assert log == ["gather", "scatter"]
