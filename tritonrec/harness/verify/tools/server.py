"""Whether the server answers as the trainer's model scores, whatever asks at one time, and faults of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....data import Batch, NextItemLoader
from ....nn import HSTU, HSTUConfig
from ....pipeline import next_item_scores
from ....serving import Predictor, export, top_k
from ...train.gather import whole_tables
from ..faults import FAULTS, case, fault
from ..variants import MADE, Run, Variant, add_variants
from .exported import USERS, exporting

PACKAGES = ("fastapi", "httpx", "prometheus_client", "uvicorn")
ABSENT = [name for name in PACKAGES if find_spec(name) is None]
"""Packages without which the server cannot be verified."""
PARTS = ["scores, answered", "items, answered"]
"""What rank 0 compares."""
K = 5
Answer = Callable[[Sequence[Any]], list[Any]]
"""Of a batch of requests, `tritonrec.serving.server.model.Served.answer`."""


def answered(run: Run) -> Iterator[Sequence[Batch]]:
    """Ask a server in this process for held-out users, over two versions, and compare with the trainer.

    All users ask at one time: half of them by their history, half by events that were sent before, whose keys
    and values are cached. The server begins with the export of the checkpoint half way, and is told to reload
    when the export of the last one is there. The answers of the first version are compared with those of
    `Predictor`, the last ones with scores of the trainer's model. A fault's tool changes how a batch is
    answered. Collective; rank 0 serves, and counts how many requests were answered together with others.
    """
    trainer, loader, folder, step = run.trainer, run.loader, run.folder, run.steps[-1]
    rank, half = trainer.program.communicators.rank, run.steps[0] + len(run.steps) // 2
    run.due += PARTS if rank == 0 else []
    yield from exporting(run)
    trained, tables = trainer.dense.evaluated, whole_tables(trainer.rows_of_ranks())
    if rank:
        return
    from fastapi.testclient import TestClient

    from ....serving.server import ServerConfig
    from ....serving.server.app import create_app
    from ....serving.server.model import Served

    assert isinstance(loader, NextItemLoader) and isinstance(trained, HSTU)
    before, after = Path(folder, "before-server"), Path(folder, "export")
    export(Path(folder, "checkpoint"), before, deepcopy(trained).cpu(), step=half)
    history = next(iter(loader.evaluation_batches(USERS))).history
    events = [
        {"items": history.ids[first:last].tolist(), "timestamps": history.timestamps[first:last].tolist()}
        for first, last in pairwise(history.offsets.tolist())
    ]
    paths = [before, after]
    served = Served(lambda: Predictor.load(paths.pop(0)), deepcopy(trained).cpu(), "64MiB")
    answer = run.injected(served.answer) if run.injected else served.answer
    run.counts["answered_together"] = 0

    def counted(requests: Sequence[Any]) -> list[Any]:
        run.counts["answered_together"] += len(requests) * (len(requests) > 1)
        return answer(requests)

    served.answer = counted  # type: ignore[method-assign]
    app = create_app(lambda: served, ServerConfig(latency=100.0, timeout=600.0), "token")
    with TestClient(app, base_url="http://localhost") as client, ThreadPoolExecutor(USERS) as pool:
        client.headers["authorization"] = "Bearer token"

        def ask(path: str, more: dict[str, Any]) -> list[dict[str, Any]]:
            """What all users are answered at one time."""
            bodies = [
                {"users": [str(user)]} if user % 2 else
                {"histories": [each["items"]], "timestamps": [each["timestamps"]]}
                for user, each in enumerate(events)
            ]  # fmt: skip
            return [*pool.map(lambda body: client.post(path, json=body | more).json(), bodies)]

        def ask_all() -> tuple[Tensor, Tensor, Tensor]:
            scores = ask("/score", {"items": loader.catalogue.tolist()})
            best = ask("/retrieve", {"k": K})
            items = torch.tensor([each["items"][0] for each in best], dtype=torch.int64)
            return _scores(scores), _scores(best), items

        for user, each in enumerate(events):
            client.put(f"/user/{user}/events", json=each)
        first = ask_all()
        client.post("/reload")
        last = ask_all()
    full, exported = Predictor.load(before), Predictor.load(after)
    model = deepcopy(trained).cpu().eval()
    scores = next_item_scores(model, tables, loader.catalogue, trainer.config.precision)(history)
    expected = [full.scores(history, loader.catalogue), scores]
    there = [torch.isin(loader.catalogue, each.item_ids) for each in (full, exported)]
    best = [_best(each, history, loader.catalogue, rows) for each, rows in zip(expected, there, strict=True)]
    want = torch.cat([each.flatten() for each in (*expected, *(scores for _, scores in best))])
    got = torch.cat([each.flatten() for each in (first[0], last[0], first[1], last[1])])
    run.comparison.compare_part(step, PARTS[0], want, got)
    run.comparison.compare_part(
        step, PARTS[1], torch.cat([i for i, _ in best]), torch.cat([first[2], last[2]])
    )


def _scores(answers: list[dict[str, Any]]) -> Tensor:
    return torch.tensor([each["scores"][0] for each in answers], dtype=torch.float32)


def _best(scores: Tensor, history: Any, catalogue: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """The best items with a row without those of the history, and their scores, from the scores of all."""
    scores = scores.masked_fill(~there, -torch.inf)
    for user, (first, last) in enumerate(pairwise(history.offsets.tolist())):
        scores[user, torch.isin(catalogue, history.ids[first:last])] = -torch.inf
    places, found = top_k(scores, K)
    return catalogue[places], found


add_variants(
    {
        "served": Variant(
            "a server of an export of HSTU with biases of position and time, asked by all users at one time",
            {"sizes": HSTUConfig(relative_bias=True), "data": MADE},
            shows=("answered_together",),
            tool=answered,
            alone=bool(ABSENT),
        ),
    },
    before="balanced",
)


_broken = fault(case(variant="served"), of="tool", into=[] if ABSENT else FAULTS)
"""Without the packages of a server there is no case either."""


@_broken
def answer_of_another_request(answer: Answer) -> Answer:
    """The server gives each answer of a batch to the request before."""

    def wrong(requests: Sequence[Any]) -> list[Any]:
        found = answer(requests)
        return found[1:] + found[:1]

    return wrong


@_broken
def answers_of_the_old_version(answer: Answer) -> Answer:
    """The server keeps answers, and gives them when another version is served."""
    kept: dict[str, Any] = {}

    def wrong(requests: Sequence[Any]) -> list[Any]:
        found = answer(requests)
        return [kept.setdefault(repr(request), each) for request, each in zip(requests, found, strict=True)]

    return wrong


@_broken
def history_not_left_out(answer: Answer) -> Answer:
    """The server finds items of the history among the best."""

    def wrong(requests: Sequence[Any]) -> list[Any]:
        for request in requests:
            if hasattr(request, "exclude"):
                request.exclude = None
        return answer(requests)

    return wrong
