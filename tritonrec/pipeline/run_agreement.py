"""What ranks that train together compare when a run begins, after what their trainers compared once.

Between runs the model, its optimizer and its buffers are the caller's, on each rank by itself. So the header
that every window exchanges anyway carries digests of them, and of the samples: no rank waits for more. Where
two ranks' digests differ, all ranks exchange words, and say which rank has what::

    settings   in every window          what holds on the caller's thread: autocast, the default device;
                                        rates of its rows, and of dense updates done since the last one
    state      in a run's first window  threads and flags of torch, modes and settings of modules, rates;
                                        sums of the bits of parameters, buffers and optimizer states
    rows       in a run's first window  sums of those that the caller has written since the last run: alike on
                                        the ranks that have copies of a part of the tables
    loaders    in every window          settings of what divides its batches among the ranks
    samples    in every window          of all ids, and the smallest hashes of ids; an eighth of a rank's
                                        that another has counts in a run's first window, later half
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..distributed import Communicators, RanksDisagreeError
from ..distributed.agreement import differences
from ..embedding import HashTableCollection
from ..embedding.in_flight import WrittenRows, as_lane
from ..kernels.checksums import checksum, sums_of_bits
from .dense import DenseModel
from .dense_checks import is_sharded
from .model_call import CallerSettings
from .words import Words, digest

ALWAYS, SELDOM = 8, 64
"""Runs of a single step of which each compares optimizer states too, and later one in so many."""


def flushes_denormals() -> bool:
    """Of this thread (`torch.set_flush_denormal`); torch has no call that tells."""
    return not torch.full((1,), 1e-40, dtype=torch.float32, device="cpu").mul(1.0).item()


OF_TORCH = {
    "torch.set_flush_denormal()": flushes_denormals,
    "torch.get_num_threads()": torch.get_num_threads,
    "torch.get_default_dtype()": torch.get_default_dtype,
    "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled,
    "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision,
}

PARTS = 17
"""Of a tensor, each of which has a sum of its own; prime, so that they rarely begin where rows do."""

SHOWN = 3
"""Largest number of samples in an error."""

_moving: WeakKeyDictionary[torch.nn.Module, set[str]] = WeakKeyDictionary()
"""By model the buffers that its forward changes: each rank's follow its own samples, as running means do."""


@dataclass
class RunAgreement:
    """Makes this rank's words, and explains how ranks differ.

    Args:
        communicators: the exchange of words runs on its routing groups, in the stage that saw the difference.
        tables: their seed, which may change while they are empty. dense: model and optimizers.
        describe: all that must agree, in words (`agreement.settings_of`).
        compares_rows: tables have copies, which are exact.
    """

    communicators: Communicators
    tables: HashTableCollection
    dense: DenseModel
    describe: Callable[[], dict[str, object]]
    compares_rows: bool = False
    _begun: int = 0  # runs of a single step
    _here: dict[str, object] = field(default_factory=dict)  # of the caller's thread, when the run began
    _versions: dict[str, int] = field(default_factory=dict)  # of the buffers, when the run began
    _written: list[torch.Tensor] = field(default_factory=list)  # keys (n,) of each group, before this run

    def __post_init__(self) -> None:
        for group in self.tables.groups if self.compares_rows else ():
            group.table.written = WrittenRows()

    def begin(self, single: bool) -> int:
        """The digest of this rank's state as a run begins, of one step if `single`."""
        self._versions = _versions(self.dense.model)
        self._here = thread_settings()
        self._begun = self._begun + 1 if single else 0
        thorough = self._begun <= ALWAYS or self._begun % SELDOM == 0
        modules = [(each.training, type(each).__qualname__) for each in self.dense.model.modules()]
        settings = modules_of(self.dense.model) if thorough else {}
        trained = [each.requires_grad for each in self.dense.parameters.values()]
        numbers = [
            [str(value) for name, value in group.items() if name != "params"]
            for optimizer in self.dense.optimizers
            for group in optimizer.param_groups
        ]
        rows = [(str(each.optimizer), each.table.requires_grad) for each in self.tables.groups]
        epochs = [each.last_epoch for each in self.dense.schedulers]
        with as_lane(), torch.no_grad():
            sums = self._sums(thorough)
        return digest(
            repr((self._here, modules, trained, numbers, settings, rows, epochs, self.tables.seed, sums))
        )

    def written_rows(self) -> tuple[int, int]:
        """A sum of the rows that the caller of this rank has written, and its shard; 0 without replicas."""
        self._written = []
        if not self.compares_rows:
            return 0, 0
        found = 0
        with as_lane():
            for place, group in enumerate(self.tables.groups):
                assert group.table.written is not None
                keys = group.table.written.take(group.table.keys)
                self._written.append(keys)
                # A sum, so that the order in which keys were written does not matter. Both factors are odd:
                # no key and no row contributes 0, whatever the other factor is.
                found += int(((keys * 2 + 2 * place + 1) * (group.table.row_sums(keys) | 1)).sum())
        # As int64, which the header's tensor takes.
        found = (found + 2**63) % 2**64 - 2**63
        return found, self.communicators.shard

    def loaded(self) -> None:
        """All ranks have loaded one state."""
        for group in self.tables.groups if self.compares_rows else ():
            if group.table.written is not None:
                group.table.written.clear()

    def _compared_rows(self) -> dict[str, str]:
        """What this rank has in rows that some copy's caller has written and that differ. Collective."""
        found, replicas = {}, self.communicators.replica_routing
        for group, written in zip(self.tables.groups, self._written, strict=True):
            keys = torch.cat(replicas.all_gather(written)).unique()
            with as_lane():
                sums = group.table.row_sums(keys)
            # If any two ranks differ in a row, each rank differs from one of them: all find the same rows.
            differ = torch.stack(replicas.all_gather(sums)).ne(sums).any(0)
            for place in differ.nonzero().flatten()[:SHOWN].tolist():
                name = f"row of {group.layout.describe(keys[place])}"
                found[name] = f"values with sum {sums[place].item() % 2**64:016x}"
        return found

    def _sums(self, thorough: bool) -> list[int]:
        """Of the bits of parameters and buffers, and of optimizer states if `thorough`."""
        tensors = dict(self.dense.tensors()) if thorough else dict(self.dense.parameters)
        tensors |= {f"buffer {name}": each for name, each in compared_buffers(self.dense.model).items()}
        plain = [each.detach() for each in tensors.values() if not is_sharded(each)]
        words = [each for each in plain if each.element_size() == 4 and each.is_contiguous()]
        others = [each for each in plain if each.element_size() != 4 or not each.is_contiguous()]
        on_host = [each for each in words if each.is_cpu]
        on_device = [each for each in words if not each.is_cpu]
        count = PARTS if thorough else 1  # one sum alone does not see values that change places
        parts = [sums_of_bits(each, count).cpu() for each in (on_host, on_device) if each]
        return [*torch.cat(parts).tolist(), *map(int, map(checksum, others))] if parts else []

    def end(self) -> None:
        """The run is done: buffers that it changed are left out from here on."""
        if self._versions:
            now = _versions(self.dense.model)
            moved = {name for name, version in now.items() if version != self._versions.get(name)}
            if moved:
                _moving.setdefault(self.dense.model, set()).update(moved)
            self._versions = {}

    def settle(
        self, words: Words, settings: CallerSettings | None, step: int, sample_ids: torch.Tensor
    ) -> None:
        """Raise `RanksDisagreeError` on every rank where ranks differ. Collective over all ranks."""
        own: dict[str, Any] = {"rank": self.communicators.rank, "shard": self.communicators.shard}
        own |= {"here": {}, "samples": None, "rows": {}, "loader": {}}
        if words.state and self.compares_rows:
            own["rows"] = self._compared_rows()
        own["thread"] = {name: str(rate) for name, rate in words.rates.items()}
        for shard in words.shards[:1]:
            own["loader"] = {f"loader's {name}": value for name, value in shard.settings.items()}
        if settings is not None:
            own["thread"] |= {"autocast": str(settings.autocast), "default device": str(settings.device)}
        if words.state:
            here = {**self.describe(), **self._here}
            own["here"] = {name: str(value) for name, value in here.items()}
        if words.samples:
            own["samples"] = sample_ids.tolist()
        # Two hops reach all ranks: those of a sharding group, then the groups' texts over the replicas.
        texts = self.communicators.routing.all_gather_texts(json.dumps(own))
        parts = self.communicators.replica_routing.all_gather_texts(json.dumps(texts))
        every = {each["rank"]: each for part in parts for each in map(json.loads, json.loads(part))}
        ranks = dict(sorted(every.items()))
        begun = {rank: _without_moving(each["here"], ranks) for rank, each in ranks.items() if each["here"]}
        found = differences({rank: each["thread"] for rank, each in ranks.items()}) + differences(begun)
        found += differences({rank: each["loader"] for rank, each in ranks.items() if each["loader"]})
        for shard in dict.fromkeys(each["shard"] for each in ranks.values()):
            found += differences(
                {rank: each["rows"] for rank, each in ranks.items() if each["shard"] == shard}
            )
        if found:
            raise RanksDisagreeError(f"step {step}: {'; '.join(found)}: give every rank the same")
        _check_samples({rank: each["samples"] for rank, each in ranks.items() if each["samples"]}, step)


def modules_of(model: torch.nn.Module) -> dict[str, str]:
    """Classes and settings of the modules, and a forward that was put in the place of their own.

    Hooks are left out: one that looks on, as a logger's does, may well be on rank 0 alone.
    """
    found = {}
    for name, module in model.named_modules():
        words = [module.extra_repr()]
        if module.training != model.training:
            words.append(f"training={module.training}")
        sizes = getattr(module, "config", None)
        if is_dataclass(sizes):
            words.append(repr(sizes))
        if type(module).__module__.startswith("tritonrec."):  # others may keep there what is their rank's
            plain = (each for each in vars(module).items() if isinstance(each[1], (int, float, str, tuple)))
            words += [f"{key}={value}" for key, value in plain if key[0] != "_" and key != "training"]
        if replaced := vars(module).get("forward"):
            words.append(f"forward={getattr(replaced, '__qualname__', type(replaced).__qualname__)}")
        text = without_addresses(" ".join(words)).strip()
        found[f"module {name or 'model'}"] = f"{type(module).__qualname__}({text})"
    return found


def without_addresses(state: object) -> str:
    """The text of a state, in which memory addresses say nothing."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(state))


def compared_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that ranks compare: all but those that a forward has changed."""
    moving = _moving.get(model, set())
    return {name: each for name, each in model.named_buffers() if name not in moving}


def thread_settings() -> dict[str, object]:
    """What torch's results may depend on, of this thread and process, by name."""
    found: dict[str, object] = {name: read() for name, read in OF_TORCH.items()}
    found["torch.backends.mkldnn.enabled"] = torch.backends.mkldnn.enabled
    found["torch.backends.cudnn.deterministic"] = torch.backends.cudnn.deterministic
    found["torch.backends.cudnn.allow_tf32"] = torch.backends.cudnn.allow_tf32
    return found


def _versions(model: torch.nn.Module) -> dict[str, int]:
    return {name: each._version for name, each in model.named_buffers()}


def _without_moving(here: Mapping[str, str], ranks: Mapping[int, Mapping[str, Any]]) -> dict[str, str]:
    """Without buffers that another rank leaves out, since its forward has changed them."""
    known = [each["here"] for each in ranks.values() if each["here"]]
    return {
        name: value
        for name, value in here.items()
        if not name.startswith("buffer ") or all(name in each for each in known)
    }


def _check_samples(samples: Mapping[int, Sequence[int]], step: int) -> None:
    """Raise `RanksDisagreeError` naming two ranks that train the same samples."""
    owner: dict[int, int] = {}
    shared: dict[tuple[int, int], list[int]] = {}
    for rank, ids in samples.items():
        for each in dict.fromkeys(ids):
            # The first rank that names a sample owns it.
            if owner.setdefault(each, rank) != rank:
                shared.setdefault((owner[each], rank), []).append(each)
    if not shared:
        return
    (first, second), ids = next(iter(shared.items()))
    more = f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else ""
    raise RanksDisagreeError(
        f"step {step}: ranks {first} and {second} both train sample {', '.join(map(str, ids[:SHOWN]))}{more} "
        f"(of {len(samples[first])} and {len(samples[second])}): give each rank its part of a batch (rank= "
        "and world_size= of a loader), and each sample of a step an id of its own"
    )
