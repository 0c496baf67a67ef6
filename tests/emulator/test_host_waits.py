"""Between its routing and its end a step with tables on a GPU waits for nothing; the GPU is pretended.

Kernels run on the CPU here, and only the code around them is looked at. Ops are the subject of
`tests/kernels/test_no_sync.py`, and both together of the slow test at the end.
"""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import trainer_parts
from pretended import pretended, without_kernels
from speeds import slow_except

from tritonrec.distributed import Communicators
from tritonrec.embedding import (
    Eviction,
    FeatureConfig,
    HashTableCollection,
    Placement,
    PrecisionTiers,
    RowOptimizer,
    TablePolicy,
)
from tritonrec.harness.job import dense_optimizer
from tritonrec.harness.verify.thread_ranks import run_ranks
from tritonrec.pipeline import ExchangeConfig, StageFailedError, Trainer, WindowConfig
from tritonrec.pipeline.places import Embeddings
from tritonrec.pipeline.stage import Read
from tritonrec.pipeline.sums import Sent, Sums
from tritonrec.pipeline.window import Window
from tritonrec.serving.cached.pages import Pages
from tritonrec.settings import with_values

ROOT = Path(__file__).resolve().parents[2]

STEPS, MEASURED = 4, 2
WITHOUT = (
    "retrieve", "copy_kept_rows", "exchange", "compute", "gradient_exchange", "dense_reduce", "sparse_update",
    "dense_update", "write_back",
)  # fmt: skip
CASES = {
    "host": ("host", {}, {}),
    "device": ("device", {}, {}),
    "device_skip_fetch": ("device", {}, {"skip_fetch": True}),
    "device_window": ("device", {}, {"consistency": "window"}),
    "device_admission": ("device", {"admission": 2}, {}),
    "device_no_dedup": ("device", {}, {"first_use": False, "dedup": "none"}),
    "device_dedup_at_the_sender": ("device", {}, {"first_use": False, "dedup": "exchange"}),
    "cached": ("cached", {}, {}),
    "device_forget": ("device", {"admission": 3, "admission_window": 1}, {}),
    "device_lru": ("device", {"eviction": Eviction("lru", capacity=20)}, {}),
    "device_lfu": ("device", {"eviction": Eviction("lfu", capacity=20)}, {}),
    "device_ttl": ("device", {"eviction": Eviction("ttl", ttl=1)}, {}),
    "device_tiers": ("device", {"precision": PrecisionTiers(2, 2)}, {}),
    "cached_admission": ("cached", {"admission": 2}, {"skip_fetch": True}),
    "cached_lru_tiers": (
        "cached", {"eviction": Eviction("lru", capacity=20), "precision": PrecisionTiers(2, 2)}, {}
    ),
}  # fmt: skip


ACTS = {"eviction": "evicted", "precision": "demoted", "admission": "rejected"}
"""What a policy counts where it acts."""


def run(storage, policy, window, change=None, device="cuda", mode="nestpipe", world_size=1, replicas=1):
    """Trains in the pipeline on the pretended GPU; what it saw of rank 0, by stage of one step, and the last
    loss of each rank, with the rows."""
    with pretended() as gpu, without_kernels(gpu):
        models = [trainer_parts.Ranker().to(device) for _ in range(world_size)]

        def train(ranks):
            feature = FeatureConfig("item", trainer_parts.DIM, policy=TablePolicy(**policy))
            placement = Placement(storage, device, cache_rows=40)
            model, rule = models[ranks.rank], RowOptimizer("adam", lr=0.05)
            tables = HashTableCollection([feature], rule, seed=2, slots=8, chunk_rows=32, placement=placement)
            optimizer = dense_optimizer(model.parameters(), "adam", 0.05)
            count = 1 if mode == "reference" else 4
            config = with_values(WindowConfig(count, seed=4), {"first_use": True, **window})
            parts = model, tables, optimizer, ranks  # trusted: a comparison of the first window waits
            with Trainer(*parts, mode, config, device=device, trust_model=True) as trainer:
                actions = {} if mode == "reference" else trainer.program.actions
                if change is not None:
                    change(trainer.program)

                def seen(name, action):
                    def stage(places, micro_batch=None):
                        measured = (places.window.step, ranks.rank) == (MEASURED, 0)
                        with gpu.stage(name if measured else "another step"):
                            action(places, micro_batch)

                    return stage

                actions.update({name: seen(name, action) for name, action in actions.items()})
                parts = trainer_parts.batches(STEPS, 7, ranks.rank, world_size)
                losses = [result.loss for result in trainer.run(parts)]
            counters = tables.groups[0].table.counters
            assert all(getattr(counters, ACTS[name]) for name in policy if name in ACTS), (
                "a policy did nothing"
            )
            return losses, [each.tolist() for each in tables.export()["item"]]

        def rank(ranks):
            with gpu.stage("another step"):
                return train(ranks)

        found = run_ranks(world_size, rank, replicas)
    return gpu, found if world_size > 1 else found[0][0]


def waits(gpu, stages):
    return {key: count for key, count in gpu.waits.items() if key[0] in stages}


@pytest.mark.parametrize(
    "case",
    slow_except(
        ["device", "device_window", "device_ttl", "cached_admission", "cached_lru_tiers"],
        [each for each in CASES if each != "host"],
    ),
)
def test_a_step_waits_once_for_its_routes_and_for_nothing_else(case):
    gpu, losses = run(*CASES[case])
    assert waits(gpu, WITHOUT) == {}
    assert gpu.waits_of("route") == 1
    assert all(gpu.calls[stage] + gpu.launches[stage] for stage in WITHOUT), "a stage was not seen"
    assert losses == run(*CASES[case], device="cpu")[1]


def test_tables_on_the_host_wait_for_keys_and_rows_alone():
    gpu, losses = run(*CASES["host"])
    stages = {stage: gpu.waits_of(stage) for stage in ("route", *WITHOUT) if gpu.waits_of(stage)}
    assert stages == {"route": 1, "retrieve": 2, "write_back": 1}
    assert {line.split()[0].split(":")[0] for _, line in waits(gpu, stages)} == {"pipeline/streams.py"}
    assert losses == run(*CASES["host"], device="cpu")[1]


@pytest.mark.parametrize("storage", slow_except(["cached"], ["host", "device", "cached"]))
def test_the_reference_run_has_its_bits_on_a_gpu(storage):
    here, there = (run(storage, {}, {}, device=each, mode="reference")[1] for each in ("cpu", "cuda"))
    assert here == there


@pytest.mark.parametrize("dedup", [{}, {"first_use": False, "dedup": "none"}], ids=["first_use", "no_dedup"])
def test_two_ranks_wait_for_no_sums_that_they_exchange(dedup):
    gpu, found = run("device", {}, dedup, world_size=2)
    assert waits(gpu, WITHOUT) == {}
    assert gpu.waits_of("route") == 1
    assert found == run("device", {}, {**dedup, "exchange_sums": "packed"}, device="cpu", world_size=2)[1]


REPLICAS = {
    "device": ("device", {}, {}),
    "device_skip_fetch": ("device", {}, {"skip_fetch": True}),
    "device_late": ("device", {}, {"first_use": False}),
    "device_lru": ("device", {"eviction": Eviction("lru", capacity=20)}, {}),
    "device_clipped": ("device", {}, {"max_grad_norm": 0.1}),
    "cached_window": ("cached", {}, {"consistency": "window"}),
}


@pytest.mark.parametrize("case", slow_except(["cached_window"], REPLICAS))
def test_replicas_wait_once_for_their_reductions_beside_their_routes(case):
    gpu, found = run(*REPLICAS[case], world_size=2, replicas=2)
    stages = {stage: gpu.waits_of(stage) for stage in ("route", "replica_reduce", *WITHOUT)}
    assert {stage: count for stage, count in stages.items() if count} == {"route": 1, "retrieve": 1}
    assert {line.split(":")[0] for _, line in waits(gpu, ("retrieve",))} == {"pipeline/streams.py"}
    assert gpu.calls["replica_reduce"]
    assert found == run(*REPLICAS[case], device="cpu", world_size=2, replicas=2)[1]


READS = {
    "int": lambda x: int(x.sum()),
    "bool": lambda x: bool(x.any()),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "index of the host": lambda x: x[torch.tensor([0])],
    "index of no dimension": lambda x: x[x.long().sum() * 0],
    "made of a list": lambda x: torch.tensor([1], device=x.device),
    "repeats": lambda x: torch.repeat_interleave(x[:, 0].long() * 0),
    "stream": lambda x: torch.accelerator.current_stream(x.device).synchronize(),
}


@pytest.mark.parametrize("read", slow_except(["int", "mask", "index of no dimension", "stream"], READS))
def test_a_wait_in_a_stage_is_seen_with_its_line(read):
    def change(program):
        def planted(embeddings: Read[Embeddings]) -> None:
            READS[read](embeddings[0])

        program.after("compute", planted)

    gpu, _ = run(*CASES["device"], change)
    found = waits(gpu, WITHOUT)
    assert set(found.values()) == {4} and [stage for stage, _ in found] == ["compute"], found
    assert "test_host_waits.py" in next(iter(found))[1]


@pytest.mark.parametrize(("sums", "reads"), [("packed", 1), ("whole", 0), ("auto", 0)])
def test_two_ranks_read_the_sizes_of_packed_sums_once_and_nothing_of_whole_ones(sums, reads):
    config, counts = WindowConfig(4, exchange=ExchangeConfig(sums=sums)), torch.tensor([[2, 3], [1, 2]])

    def exchanged(ranks, gpu, device):
        rank, here, there = ranks.rank, counts[ranks.rank], counts[:, ranks.rank]
        values = torch.arange(15).view(5, 3) << 20 * (1 + rank)
        out = torch.zeros(2, 3, dtype=torch.int64)
        rows, targets = torch.arange(int(here.sum())), torch.arange(int(there.sum())) % 2
        with gpu.stage("around"):
            given = [each.to(device) for each in (values, rows, out, targets)]
            part = Sent(*given[:2], here.tolist(), *given[2:], there.tolist())
            with gpu.stage(f"rank {rank}"):
                Sums(config, torch.device(device)).send_to_owners(None, ranks.retrieval, [part])
            return given[2].cpu().tolist()

    found = []
    for device in ("cpu", "cuda"):
        with pretended() as gpu, without_kernels(gpu):
            found.append(run_ranks(2, lambda ranks, gpu=gpu, device=device: exchanged(ranks, gpu, device)))
    assert found[0] == found[1]
    assert gpu.waits_of("rank 0") == gpu.waits_of("rank 1") == reads, gpu.waits


def test_a_parameter_that_was_changed_in_flight_is_refused_without_a_wait():
    def change(program):
        def planted(window: Window) -> None:
            if window.batches[0].step == MEASURED:
                program.model.mix.weight.data.zero_()

        program.after("dense_reduce", planted)

    with pytest.raises(
        StageFailedError, match=r"step 2 failed: RuntimeError: parameter mix\.weight was changed"
    ):
        run(*CASES["device"], change)


def test_tables_are_cached_by_default_and_a_collection_that_does_not_know_the_gpu_is_named():
    features = [FeatureConfig("item", trainer_parts.DIM)]
    with pretended() as gpu, without_kernels(gpu):

        def train(tables):
            model = trainer_parts.Ranker().to("cuda")
            optimizer = dense_optimizer(model.parameters(), "adam", 0.05)
            Trainer(model, tables, optimizer, Communicators.local(), device="cuda").close()

        cached = HashTableCollection(features, placement=Placement(device="cuda", cache_rows=40))
        assert cached.groups[0].table.padded and cached.groups[0].table.device.type == "cuda"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(cached)
            train(HashTableCollection(features, placement=Placement("host")))
        said = r"table item has keys and rows in host memory, .* on cuda:0: .*Placement\(device='cuda:0'\)"
        with pytest.warns(UserWarning, match=said):
            train(HashTableCollection(features))


def test_tensors_of_host_and_gpu_do_not_mix():
    with pretended():
        x = torch.ones(3, device="cuda")
        assert x.is_cuda and not x.is_cpu and (x + 1)[1:].device == torch.device("cuda:0")
        with pytest.raises(RuntimeError, match=r"aten.add.Tensor has tensors of the host and of the GPU"):
            x + torch.ones(3)
        with pytest.raises(TypeError, match="numpy"):
            x.numpy()
        with pytest.raises(RuntimeError, match="pinned"):
            x.pin_memory()
        assert (x.cpu() + torch.ones(3)).is_cpu
    assert torch.ones(3).device.type == "cpu"


@pytest.mark.slow
def test_launches_and_waits_of_emulated_steps_are_those_of_the_baseline(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    out = tmp_path / "steps.json"
    command = [sys.executable, str(ROOT / "ci" / "emulator" / "steps.py"), "--check", "--json", str(out)]
    done = subprocess.run(
        command, env={**environment, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = json.loads(out.read_text())
    for case in set(found) - {"host", "device, 2 ranks, packed"}:
        waiting = {stage for stage in WITHOUT if found[case][stage]["waits"]}
        assert waiting == ({"retrieve"} if "replicas" in case else set()), case
        assert found[case]["route"]["waits"] == 1


def test_a_micro_batch_is_at_most_46_launches_and_no_wait():
    baseline = json.loads((ROOT / "ci" / "baselines" / "steps.json").read_text())
    for case, stages in baseline.items():
        assert stages["compute"]["launches"] <= 4 * 46 and not stages["compute"]["waits"], case


def test_what_a_device_has_no_room_for_leaves_nothing_there():
    """Neither keys and values nor the user's vector, which `memory` does not bound."""
    page = 2 * 64 * 3 * 4
    with pretended():
        pages = Pages(page, 2, 3, torch.float32, 64, "cuda", behind=page)
        entry = pages.take("a", 5, ())
        entry.known, entry.vector = 5, torch.randn(4, dtype=torch.float32, device="cuda")
        pages.take("b", 5, ())
        behind = pages.behind.find("a")
        assert pages.store.is_cuda and not behind.vector.is_cuda and not pages.behind.store.is_cuda
        assert pages.take("a", 5, ()).vector.is_cuda
