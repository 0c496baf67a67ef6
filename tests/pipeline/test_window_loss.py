"""Promise: a loss over the whole global batch has the bits of one process, for any cut and any ranks."""

from dataclasses import dataclass, field
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from speeds import slow_except
from trainer_parts import ONE_DRAWS, same

from tritonrec import Communicators, FeatureConfig, HashTableCollection, RowOptimizer, nn, ops
from tritonrec.data import Batch, KeyedJaggedTensor, Lookup, per_sample
from tritonrec.harness.verify.thread_ranks import run_ranks
from tritonrec.pipeline import (
    NESTPIPE,
    STAGED,
    MicroBatchGraphs,
    NotBatchInvariantError,
    StageFailedError,
    Trainer,
    WindowConfig,
    schedule_of,
)
from tritonrec.resilience import Replay
from tritonrec.settings import with_values

DIM, SIZES = 8, (13, 1, 3, 16, 7)


@dataclass(frozen=True)
class Pairs(Batch):
    """A user and an item each, with a bag of genres, two dense values and the item's log probability."""

    dense: torch.Tensor = field(metadata=per_sample(torch.float32, 2))
    log_q: torch.Tensor = field(metadata=per_sample(torch.float32))


class Towers(torch.nn.Module):
    """`shapes` has the sizes of window_loss's arguments."""

    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Linear(DIM + 2, DIM), nn.Linear(2 * DIM, DIM)
        self.norm, self.drop = nn.LayerNorm(DIM), nn.Dropout(0.2)
        self.scale = torch.nn.Parameter(torch.tensor([1.5]))

    def users(self, batch, rows):
        return self.drop(self.user(torch.cat([rows["user"], batch.dense], 1)))

    def forward(self, batch, rows, seed):
        item = self.norm(self.item(torch.cat([rows["item"], rows["genre"]], 1)))
        ids = batch.lookups()["item"].ids
        user = self.users(batch, rows).float()  # autocast's products are of lower precision
        return {"user": user, "item": item, "id": ids, "log_q": batch.log_q, "bias": user.mean(1)}

    def window_loss(self, own, window, positions):
        queries = own["user"] * nn.expand(self.scale, len(positions))
        losses = nn.in_batch_softmax(queries, window["item"], positions, window["id"], window["log_q"], 0.5)
        return losses + own["bias"]


def towers(**methods):
    return type("Own", (Towers,), methods)


def batch(step, size=None, rank=0, ranks=1):
    """Ranks have different numbers of samples."""
    size, random = size or SIZES[step % len(SIZES)], torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (size,), generator=random)

    def ids(most, count=size):
        return torch.randint(most, (count,), generator=random)

    genres = Lookup(ids(9, int(lengths.sum())), F.pad(lengths.cumsum(0), (1, 0)))
    features = {"user": Lookup(ids(40)), "item": Lookup(ids(9)), "genre": genres}
    dense, log_q = torch.randn(size, 2, generator=random), -1 - torch.rand(size, generator=random)
    samples = torch.randperm(1000, generator=random)[:size]
    samples = torch.stack([samples, samples], 1)[:, 0]  # with gaps in memory
    whole = Pairs(step, samples, KeyedJaggedTensor.from_dict(features), dense, log_q)
    owners = (torch.arange(size) ** 2 % 8).clamp(max=ranks - 1)  # 0, 1 and 4: of four ranks one has none
    return whole.select((owners == rank).nonzero()[:, 0])


def parts(model=Towers, optimizer=torch.optim.Adam):
    with ONE_DRAWS:
        torch.manual_seed(5)
        made = model()
    pooled = FeatureConfig("genre", DIM, pooling="mean")
    features = [FeatureConfig("user", DIM), FeatureConfig("item", DIM), pooled]
    tables = HashTableCollection(features, RowOptimizer("adam", lr=0.05), seed=2, slots=8, chunk_rows=32)
    return made, tables, optimizer(made.parameters(), lr=0.05)


def of_rank(communicators, mode, model, steps, trust, window):
    made = parts(model)
    config = with_values(WindowConfig(seed=4), window)
    with Trainer(*made, communicators, mode, config, trust_model=trust) as trainer:
        rank, count = communicators.rank, communicators.world_size
        results = list(trainer.run(batch(step, None, rank, count) for step in range(steps)))
    return results, [each.detach() for each in made[0].parameters()], made[1].export()


def trained(mode, ranks=1, model=Towers, steps=5, replicas=1, nodes=1, trust=False, pool=None, **window):
    """Losses by sample of each step, parameters, and rows by table and id, of all ranks."""
    window.setdefault("micro_batches", 1 if mode == "reference" else 4)
    given = mode, model, steps, trust, window
    if pool is None:
        found = run_ranks(ranks, lambda here: of_rank(here, *given), replicas, nodes)
    else:
        found = pool.run(of_rank, ranks, *given)
    losses = []
    for results in zip(*(each[0] for each in found), strict=True):
        assert len({result.loss for result in results}) == 1
        pairs = ((result.sample_ids, result.losses) for result in results)
        ids, values = map(torch.cat, zip(*pairs, strict=True))
        losses.append(values[ids.argsort()])
    assert all(same(found[0][1], each[1]) for each in found)
    rows = []
    for name in found[0][2]:
        ids, values = map(torch.cat, zip(*(each[2][name] for each in found[::replicas]), strict=True))
        rows += [ids.sort().values, values[ids.argsort()]]
    return [*losses, *found[0][1], *rows]


@pytest.fixture(scope="module")
def reference():
    return trained("reference")


CASES = [*product(STAGED, (1, 2, 4), (1, 4, 16))]
QUICK = [("nestpipe", 4, 4), ("dbp", 2, 16), ("fwp", 1, 4), ("sequential", 2, 4), ("nestpipe", 1, 1)]


@pytest.mark.parametrize(("mode", "ranks", "micro_batches"), slow_except(QUICK, CASES))
def test_every_mode_cut_and_world_has_the_bits_of_one_process(reference, mode, ranks, micro_batches):
    clustering = (ranks + micro_batches) % 2 == 1
    got = trained(mode, ranks, micro_batches=micro_batches, clustering=clustering)
    assert same(got, reference)


@pytest.mark.multi_rank
@pytest.mark.parametrize("sums", slow_except(["packed"], ["packed", "whole"]))
def test_processes_one_of_which_has_no_samples_have_the_bits_of_one(reference, pool, sums):
    assert not len(batch(0, None, 2, 4).sample_ids)
    assert same(trained("nestpipe", 4, pool=pool, exchange_sums=sums), reference)


SWITCHES = [
    {"accumulate": 2}, {"exchanges": "each"}, {"first_use": True, "skip_fetch": True},
    {"max_grad_norm": 0.05}, {"precision": "bf16"}, {"precision": "fp16"}, {"exchange_sums": "packed"},
]  # fmt: skip


@pytest.mark.parametrize("window", slow_except(SWITCHES[:1] + SWITCHES[5:6], SWITCHES), ids=str)
def test_switches_change_no_bit_beside_the_reference(reference, window):
    of_both = {"accumulate", "max_grad_norm", "precision"} & set(window)
    expected = trained("reference", **window) if of_both else reference
    assert same(trained("nestpipe", 2, **window), expected)


@pytest.mark.parametrize(("replicas", "nodes"), slow_except([(2, 1)], [(2, 1), (1, 2)]))
def test_exact_replicas_and_nodes_see_the_whole_batch(reference, replicas, nodes):
    assert same(trained("nestpipe", 4, replicas=replicas, nodes=nodes), reference)


def test_at_window_consistency_modes_agree_and_batches_differ(reference):
    expected = trained("sequential", 2, consistency="window")
    assert same(trained("nestpipe", 2, consistency="window"), expected)
    assert not same(expected, reference)
    assert all(torch.allclose(x, y, atol=1e-4) for x, y in zip(expected[:2], reference[:2], strict=True))


def plainly(model, tables, given):
    """Losses and gradients of one batch in float64, by torch alone, the whole batch at once."""
    weights = {name: each.detach().double().requires_grad_() for name, each in model.named_parameters()}
    rows = {name: each.double().requires_grad_() for name, each in tables.peek(given.lookups()).items()}
    user = (
        torch.cat([rows["user"], given.dense.double()], 1) @ weights["user.weight"].T + weights["user.bias"]
    )
    item = torch.cat([rows["item"], rows["genre"]], 1) @ weights["item.weight"].T + weights["item.bias"]
    item = F.layer_norm(item, (DIM,), weights["norm.weight"], weights["norm.bias"])
    logits = user * weights["scale"] @ item.T / 0.5 - given.log_q.double()
    ids, own = given.lookups()["item"].ids, torch.eye(given.num_samples, dtype=torch.bool)
    logits = logits.masked_fill((ids[:, None] == ids) & ~own, -torch.inf)
    losses = logits.logsumexp(1) - logits.diagonal() + user.mean(1)
    losses.mean().backward()
    return losses.detach(), {name: each.grad for name, each in weights.items()}


@pytest.mark.parametrize("size", [1, 2, 13, 70])
def test_values_are_those_of_torch_in_float64(size):
    made, given = parts(optimizer=torch.optim.SGD), batch(3, size)
    made[0].drop.p = 0.0
    before = {name: each.detach().clone() for name, each in made[0].named_parameters()}
    losses, gradients = plainly(made[0], made[1], given)
    assert size < 5 or bool((given.lookups()["item"].ids.unique(return_counts=True)[1] > 1).any())
    with Trainer(*made, Communicators.local(), "nestpipe", WindowConfig(3)) as trainer:
        result = trainer.step(given)
    got = result.losses[result.sample_ids.argsort()].double()
    assert torch.allclose(got, losses[given.sample_ids.argsort()], rtol=1e-5, atol=1e-6)
    for name, now in made[0].named_parameters():
        step = (before[name] - now.detach()).double() / 0.05
        assert torch.allclose(step, gradients[name], rtol=1e-4, atol=2e-6), name


def test_training_goes_on_in_the_same_bits_from_a_checkpoint_at_another_world_size(tmp_path):
    def stretch(communicators, first, last, load, save):
        made = parts()
        rank, count = communicators.rank, communicators.world_size
        with Trainer(*made, communicators, "nestpipe", WindowConfig(3, seed=4)) as trainer:
            if load:
                trainer.load(tmp_path)
            losses = [r.loss for r in trainer.run(batch(s, None, rank, count) for s in range(first, last))]
            if save:
                trainer.save(tmp_path)
        return losses, [each.detach() for each in made[0].parameters()]

    whole = stretch(Communicators.local(), 0, 5, False, False)
    begun = run_ranks(2, lambda ranks: stretch(ranks, 0, 2, False, True))[0][0]
    losses, weights = stretch(Communicators.local(), 2, 5, True, False)
    assert begun + losses == whole[0] and same(weights, whole[1])


def test_a_model_that_declares_nothing_is_refused_and_pointed_to_the_way_out():
    def forward(self, batch, rows, seed):
        shown = Towers.forward(self, batch, rows, seed)
        return F.cross_entropy(
            shown["user"] @ shown["item"].T, torch.arange(len(shown["id"])), reduction="none"
        )

    with pytest.raises(NotBatchInvariantError, match=r"give a loss over the whole batch in a window_loss"):
        trained("nestpipe", model=towers(forward=forward, window_loss=None))


def users_of_the_batch(self, batch, rows):
    users = Towers.users(self, batch, rows)
    return users - users.mean(0)


def mean_of_rows(self, own, window, positions):
    losses = Towers.window_loss(self, own, window, positions)
    return losses + (losses.detach() - losses.detach().mean())


def float_gradients(self, own, window, positions):
    return F.cross_entropy(own["user"] @ window["item"].T, positions, reduction="none")


def reads(name):
    return {"window_loss": lambda self, own, window, at: own["user"].sum(1) + window[name].sum()}


def records_scores(self, own, *rest):
    nn.record(scores=own["user"])
    return own["user"].sum(1)


WRONG = {
    "a name that is not shown": (reads("log_p"), "reads 'log_p', but .* shows user, item, id, log_q"),
    "outputs of the loss": ({"window_loss": records_scores}, "window_loss records scores: nn.record takes"),
    "samples that see each other before the loss": ({"users": users_of_the_batch}, "which shows of sample"),
    "rows of a loss that see each other": ({"window_loss": mean_of_rows}, "whose window_loss of a sample"),
    "a float32 sum over samples": ({"window_loss": float_gradients}, "read it by ops.linear"),
    "one loss": ({"window_loss": lambda self, own, *rest: own["user"].sum()}, "one loss per sample"),
    "no dict": ({"forward": lambda self, batch, rows, seed: rows["user"]}, "must return a dict of tensors"),
    "no gradient": ({"forward": lambda self, b, rows, s: {"user": rows["user"].detach()}}, "one of them"),
    "no row for each sample": ({"forward": lambda self, b, rows, s: {"user": rows["user"][:1]}}, "user is "),
    "another type": ({"forward": lambda self, b, rows, s: {"user": rows["user"].double()}}, "float64: use"),
}  # fmt: skip


IN_MODES = [
    (wrong, mode)
    for wrong, mode in product(WRONG, ["reference", "nestpipe"])
    if mode != "reference" or wrong != "rows of a loss that see each other"  # one call has no cut
]


@pytest.mark.parametrize(("wrong", "mode"), IN_MODES)
def test_what_would_depend_on_the_cut_is_refused(wrong, mode):
    methods, said = WRONG[wrong]
    with pytest.raises((NotBatchInvariantError, StageFailedError, TypeError, ValueError), match=said):
        trained(mode, model=towers(**methods))


def switched(change):
    """Towers that show the step, and whose losses `change` by it."""

    def forward(self, batch, rows, seed):
        step = torch.full((batch.num_samples,), batch.step, dtype=torch.int64)
        return {**Towers.forward(self, batch, rows, seed), "step": step}

    def window_loss(self, own, window, positions):
        return change(Towers.window_loss(self, own, window, positions), int(own["step"][0]))

    return parts(towers(forward=forward, window_loss=window_loss))


def less_the_mean(losses, step):
    return losses - losses.detach().mean() if step >= 20 else losses


def by_the_mean(losses, step):  # the same functions of autograd before and after
    return losses * (losses.detach().mean() if step >= 20 else torch.tensor(2.0))


@pytest.mark.if_changed
@pytest.mark.parametrize(
    ("change", "micro_batches", "last"),
    [(less_the_mean, 4, 19), (less_the_mean, 16, 19), (by_the_mean, 4, 30)],
)  # in 16 micro-batches each sample is alone
def test_a_window_loss_that_a_later_step_switches_is_refused(change, micro_batches, last):
    made, seen = switched(change), []
    with (
        Trainer(*made, Communicators.local(), "nestpipe", WindowConfig(micro_batches, seed=4)) as trainer,
        pytest.raises(NotBatchInvariantError, match="whose window_loss of a sample"),
    ):
        for result in trainer.run(batch(step, 16) for step in range(40)):
            seen.append(result.step)
            before = [each.detach().clone() for each in made[0].parameters()]
    assert seen[-1] == last
    assert all(map(torch.equal, before, made[0].parameters()))  # refused before the update


def test_rows_of_a_loss_that_see_each_other_are_refused_where_each_micro_batch_has_one():
    with pytest.raises(NotBatchInvariantError, match="whose window_loss of a sample"):
        trained("nestpipe", model=towers(window_loss=mean_of_rows), micro_batches=16)


@pytest.mark.if_changed
def test_one_sample_of_a_rank_is_compared_beside_those_of_other_ranks():
    def step(communicators):
        with Trainer(
            *parts(towers(window_loss=mean_of_rows)), communicators, "nestpipe", WindowConfig(4, seed=4)
        ) as trainer:
            trainer.step(batch(0, 2).select(torch.tensor([communicators.rank])))

    with pytest.raises(NotBatchInvariantError, match="whose window_loss of a sample"):
        run_ranks(2, step)


def test_a_buffer_that_a_window_loss_writes_is_refused():
    def window_loss(self, own, window, positions):
        self.seen += len(positions)
        return Towers.window_loss(self, own, window, positions)

    model = towers(window_loss=window_loss)()
    model.register_buffer("seen", torch.zeros((), dtype=torch.int64))
    with pytest.raises(NotBatchInvariantError, match="whose window_loss changed buffer seen"):
        trained("nestpipe", model=lambda: model)


def test_what_a_compared_window_loss_keeps_is_put_back():
    def window_loss(self, own, window, positions):
        self.calls = getattr(self, "calls", 0) + 1
        return Towers.window_loss(self, own, window, positions)

    made = parts(towers(window_loss=window_loss))
    with Trainer(*made, Communicators.local(), "nestpipe", WindowConfig(2, seed=4)) as trainer:
        list(trainer.run(batch(step, 16) for step in range(3)))
    assert made[0].calls == 6


def test_a_second_forward_that_differs_is_refused_though_the_model_is_trusted():
    def drawn(self, batch, rows):
        return F.dropout(Towers.users(self, batch, rows), 0.3)

    with pytest.raises(StageFailedError, match="second forward of a micro-batch differs from its first"):
        trained("fwp", model=towers(users=drawn), trust=True)


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "said"), [(1, 4, "micro-batches show"), (2, 1, "rank . shows other")]
)
@pytest.mark.parametrize(
    "other", [lambda s: dict(reversed(s.items())), lambda s: {**s, "id": s["id"].double()}]
)
def test_samples_that_show_other_tensors_of_the_same_size_are_refused(ranks, micro_batches, said, other):
    def forward(self, batch, rows, seed):
        shown = Towers.forward(self, batch, rows, seed)
        return other(shown) if batch.sample_ids[0] % 2 else shown

    with pytest.raises(StageFailedError, match=f"{said}.*give every sample the same names"):
        trained("nestpipe", ranks, towers(forward=forward), trust=True, micro_batches=micro_batches)


def test_a_sample_that_is_twice_in_a_batch_is_refused():
    given = batch(3)
    twice = Pairs.concat([given, given.select(torch.tensor([2]))])
    with (
        pytest.raises(StageFailedError, match=f"sample {int(given.sample_ids[2])} is twice"),
        Trainer(*parts(), Communicators.local(), "nestpipe", WindowConfig(2)) as trainer,
    ):
        trainer.step(twice)


def test_what_computes_micro_batches_alone_is_refused():
    averaged = WindowConfig(2, average_every=2)
    with pytest.raises(ValueError, match="a window_loss is of the whole global batch"):
        schedule_of("nestpipe", averaged, 2, sees_window=True)
    with pytest.raises(ValueError, match="sees_window: False"):
        Trainer(*parts(), Communicators.local(), "nestpipe", WindowConfig(2), schedule=NESTPIPE)
    with pytest.raises(ValueError, match="its losses are of the whole global batch"):
        MicroBatchGraphs().validate(in_batch_next_item(), WindowConfig(2), torch.device("cpu"))
    with (
        Trainer(*parts(), Communicators.local(), "nestpipe", WindowConfig(2)) as trainer,
        pytest.raises(ValueError, match="replay computes a micro-batch alone"),
        Replay(1.0) as replay,
    ):
        replay.attach(trainer)


def in_batch_next_item():
    model = nn.HSTU(nn.HSTUConfig(dim=8, heads=2, qk_dim=4, v_dim=4, layers=1, max_seq_len=4))
    model.window_loss = lambda own, window, positions: None
    return model


def test_candidates_of_the_same_item_are_no_negatives_and_popular_ones_count_less():
    random = torch.Generator().manual_seed(1)
    queries, items = (torch.randn(5, 4, generator=random) for _ in range(2))
    ids, log_q = torch.tensor([3, 1, 3, 2, 1]), -torch.rand(5, generator=random)
    positions = torch.tensor([2, 3, 0])
    losses = nn.in_batch_softmax(queries[:3], items, positions, ids, log_q, 0.1)
    for row, (loss, own) in enumerate(zip(losses, positions.tolist(), strict=True)):
        kept = [j for j in range(5) if j == own or ids[j] != ids[own]]
        logits = (queries[row].double() @ items[kept].double().T) / 0.1 - log_q[kept]
        assert float(loss) == pytest.approx(float(logits.logsumexp(0) - logits[kept.index(own)]), rel=1e-5)
    plain = nn.in_batch_softmax(queries[:3], items, positions)
    expected = F.cross_entropy(ops.linear(queries[:3], items, None), positions, reduction="none")
    assert torch.equal(plain, expected)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"temperature": 0.0}, "temperature must lie in"), ({"ids": torch.arange(2)}, "ids has shape"),
     ({"log_q": torch.zeros(1)}, "log_q has shape"), ({"positions": torch.arange(1)}, "positions has shape")],
)  # fmt: skip
def test_wrong_arguments_are_named(wrong, said):
    given = {"positions": torch.arange(3), **wrong}
    with pytest.raises(ValueError, match=said):
        nn.in_batch_softmax(torch.ones(3, 2), torch.ones(3, 2), **given)
