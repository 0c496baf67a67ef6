"""Dynamic tables as torch modules, for a training loop of one's own: `HashOptimizer` updates their rows.

    ids --forward--> keys --to their owners--> rows --back--> output
    gradient of the output --backward--> sums by key --to their owners--> `RowGradients` --step--> rows

Rows are no parameters and no buffers: their number changes, DDP must not broadcast them, and FSDP must not
shard them. An empty parameter, ``rows``, stands for them where torch looks for one (`RowsParameter`). With a
process group every rank owns the ids that hash to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.fx

from .. import ops
from ..data.jagged import KeyedJaggedTensor, Lookup, WeightedLookup, check_offsets
from ..distributed.communicator import Communicator
from ..kernels import launch
from ..kernels.dispatch import is_compiling, on_host
from ..kernels.fixed_point.errors import FRACTION_BITS
from ..settings import check_number, typed
from .bags import BagSums, Rows, bags_of
from .features import FeatureConfig, HashTableCollection, TableGroup
from .hash_optimizer import HashOptimizer
from .module_state import load_module_state, save_module_state
from .row_exchange import Route, rows_of_owners
from .row_gradients import RowGradients, RowsParameter
from .row_optimizer import RowOptimizer
from .table import DynamicTable

Consistency = Literal["batch", "window"]
UNSCRIPTABLE = (
    "TorchScript has no type for a table that grows: its rows are no parameters, and numba or Triton kernels "
    "look them up. Trace with torch.fx, compile with torch.compile, or export for serving"
)
"""Why ``torch.jit`` is refused."""


@typed
class HashEmbeddingCollection(torch.nn.Module):
    """Embeddings of several features, whose rows appear when their ids are first seen in training.

    In training mode with gradients enabled a forward pass inserts the rows of new ids, and its backward pass
    adds up their gradients by key for `HashOptimizer`. Otherwise nothing is inserted, counted or evicted.

    Args:
        features: of the tables, or the tables themselves, which others (a `Trainer`) may use too.
        optimizer: update rule of features without one of their own.
        consistency: ``"batch"`` adds gradients in fixed point: the same bits for any order and number of
            backward passes and any number of ranks. ``"window"``: in float32.
        process_group: of the ranks that share the tables; None for one rank. Forward and backward are
            collective: every rank calls them in the same order, also without ids.
        divisor: of the gradients' sums over the ranks and backward passes; by default the number of ranks,
            which gives the gradient of the mean of their losses, as DDP does.
        fused: update the rows in each backward pass, as FBGEMM and TorchRec's sharded modules do; the update
            is `fused_optimizer`'s. No clipping, no GradScaler, no accumulation of passes.
        seed: of the initial values; by default drawn from torch's generator (rank 0's).
        merge, slots, chunk_rows, placement: see `HashTableCollection`.

    Policies go by time: here by forward passes in training.
    """

    def __init__(
        self,
        features: Sequence[FeatureConfig] | HashTableCollection,
        optimizer: RowOptimizer | None = None,
        *,
        consistency: Consistency = "batch",
        process_group: dist.ProcessGroup | None = None,
        divisor: float | None = None,
        fused: bool = False,
        seed: int | None = None,
        **tables: Any,
    ):
        super().__init__()
        self.communicator = Communicator(process_group)
        if isinstance(features, HashTableCollection):
            if optimizer is not None or seed is not None or tables:
                raise ValueError("the tables are made already: leave out optimizer, seed and their arguments")
            self.tables = features
        else:
            seed = _common_seed(self.communicator) if seed is None else seed
            self.tables = HashTableCollection(features, optimizer, seed=seed, **tables)
        self.consistency = consistency
        self.rows = RowsParameter()
        self.lookups = 0
        check_number("divisor", 1.0 if divisor is None else divisor, positive=True)
        self._divisor = float(self.communicator.world_size if divisor is None else divisor)
        self._device: torch.device | None = None  # of the ids
        self._collect(fused)
        self.register_state_dict_post_hook(save_module_state)
        self.register_load_state_dict_pre_hook(load_module_state)
        self.register_state_dict_post_hook(_leave_parameter_out)
        self.register_load_state_dict_pre_hook(_take_own_parameter)

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__.get("_parameters", {}).get("rows")
        if name == "rows" and own is not None and value is not own and isinstance(value, RowsParameter):
            raise TypeError(
                "rows stands for the rows of this module's tables, and another module's ties nothing: use "
                "one module at both places, or give both features one table (FeatureConfig(table=...))"
            )
        super().__setattr__(name, value)

    def _collect(self, fused: bool) -> None:
        """Begin without gradients."""
        self.row_gradients = [
            RowGradients(group, self.consistency, self._divisor) for group in self.tables.groups
        ]
        self.fused_optimizer: HashOptimizer | None = None
        if fused:
            self.fused_optimizer = HashOptimizer(self)

    @property
    def divisor(self) -> float:
        """Of the gradients' sums; set it before a backward pass."""
        return self._divisor

    @divisor.setter
    def divisor(self, value: float) -> None:
        check_number("divisor", value, positive=True)
        self._divisor = float(value)
        for each in self.row_gradients:
            each.divisor = self._divisor

    def forward(self, features: Any) -> dict[str, torch.Tensor]:
        """Embeddings by feature, float32: (n, dim) for ids (n,), or (m, dim) of m bags where it is pooled.

        Args:
            features: a `KeyedJaggedTensor`, TorchRec's, or by feature ids (n,) int64, or ids and offsets
                (m + 1,), or a `WeightedLookup`. It may have more features than the module.

        Raises TypeError for ids that are not int64; ValueError for a missing feature, for ids on another
        device than before, and for offsets or weights that do not fit.
        """
        if isinstance(features, torch.fx.Proxy):
            return leaf_call(self, features)
        if is_compiling():  # a decorator would import the compiler with this file
            return torch.compiler.disable(self._embed)(features)
        return self._embed(features)

    def _embed(self, features: Any) -> dict[str, torch.Tensor]:
        refuse_transforms()
        lookups = self._lookups(features)
        return self.tables.by_feature(self._rows(self.tables.keys(lookups), lookups), lookups)

    def _lookups(self, features: Any) -> dict[str, Any]:
        if not isinstance(features, KeyedJaggedTensor | Mapping):
            features = KeyedJaggedTensor.from_torchrec(features)
        given = features.to_dict() if isinstance(features, KeyedJaggedTensor) else features
        missing = self.tables.features.keys() - given.keys()
        if missing:
            raise ValueError(
                f"the input has features {list(given)}, and the module needs {sorted(missing)} too"
            )
        lookups: dict[str, Any] = {}
        for name, feature in self.tables.features.items():
            one = given[name]
            alone = not (isinstance(one, (tuple, list)) and len(one) > 1 and isinstance(one[0], torch.Tensor))
            given_ids, offsets = (one, None) if alone else one[:2]
            ids = self._checked(name, given_ids)
            if isinstance(one, WeightedLookup):
                lookups[name] = WeightedLookup(ids, one.offsets, one.weights.to(ids.device))
            else:
                lookups[name] = Lookup(ids, offsets)
            if offsets is not None and feature.pooling != "none" and on_host(offsets):
                check_offsets(offsets, len(ids), f"offsets of {name!r}", "ids")
        if not on_host(next(iter(lookups.values())).ids):
            self.tables.validate(lookups)
        return lookups

    def _checked(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        if not isinstance(ids, torch.Tensor) or ids.dtype != torch.int64:
            is_tensor = isinstance(ids, torch.Tensor)
            got, how = (ids.dtype, ".long()") if is_tensor else (type(ids).__name__, "torch.as_tensor(ids)")
            raise TypeError(f"ids of feature {name!r} must be an int64 tensor, got {got}: convert with {how}")
        if ids.layout != torch.strided:
            raise TypeError(
                f"ids of feature {name!r} must be a dense tensor, got {ids.layout}: .to_dense(), or "
                ".values() and .offsets() of a jagged one"
            )
        if ids.dim() != 1:
            raise ValueError(f"ids of feature {name!r} must have shape (n,), got {tuple(ids.shape)}")
        self._device = self._device or ids.device
        if ids.device != self._device:
            raise ValueError(
                f"ids of feature {name!r} are on {ids.device}, but this module has had ids on "
                f"{self._device}: move them, or make one module per device"
            )
        return ids.contiguous()

    def _rows(self, keys: list[torch.Tensor], lookups: Mapping[str, Any]) -> list[Rows]:
        """For each table the rows (n, dim) of its keys (n,); in training their sums where all are pooled."""
        device = keys[0].device
        training = self.training and torch.is_grad_enabled() and self.rows.requires_grad

        def read(table: DynamicTable, own: torch.Tensor) -> torch.Tensor:
            if training:
                handles = table.lookup(own, self.lookups, self._over_ranks).handles
            else:
                handles = table.find(own)
            return table.gather(handles, own)[:, : table.dim]

        routes, values = rows_of_owners(
            [group.table for group in self.tables.groups], keys, self.communicator, read
        )
        if not training:  # bags are summed where rows lie
            return [
                ops.IndexedRows(each.to(device), route.inverse.to(device))
                for each, route in zip(values, routes, strict=True)
            ]
        self.lookups += 1
        # DDP waits for each parameter that requires a gradient, so this one takes part
        leaf = self.rows.to(values[0].device)
        lengths = [self._bag_lengths(group, lookups) for group in self.tables.groups]
        rows = [each.to(device) for each in _Gather.apply(leaf, self, routes, lengths, *values)]
        return [each if of is None else BagSums(each) for each, of in zip(rows, lengths, strict=True)]

    def _bag_lengths(self, group: TableGroup, lookups: Mapping[str, Any]) -> torch.Tensor | None:
        """(m,) int64, of the bags of a table's features; None where some rows are not summed as they are."""
        features = [(self.tables.features[name], lookups[name]) for name, _ in group.features]
        if any(
            feature.pooling == "none" or lookup.offsets is None or isinstance(lookup, WeightedLookup)
            for feature, lookup in features
        ):
            return None
        return torch.cat([lookup.offsets.diff() for _, lookup in features])

    def _over_ranks(self, sizes: torch.Tensor) -> torch.Tensor:
        return self.communicator.all_reduce(sizes, "table sizes")

    def add_gradients(
        self,
        routes: Sequence[Route],
        gradients: Sequence[torch.Tensor],
        bags: Sequence[torch.Tensor | None],
    ) -> None:
        """Send each table's gradients, (n, dim) or of `bags`, to their owners; `fused` rows are updated."""
        over, sums = self.communicator, []
        # A gradient without a sum counts as 0 in the exchange and is reported by the all-reduce: every rank
        # goes through the same collectives, and all learn of it.
        limit = 2.0 ** (62 - FRACTION_BITS) if self.consistency == "batch" else torch.inf
        total = torch.zeros((), dtype=torch.int64, device=gradients[0].device)
        for route, gradient, of in zip(routes, gradients, bags, strict=True):
            if not on_host(gradient) or not _all_below(gradient, limit):
                good = gradient.abs() < limit  # and no NaN
                total += ~good.all()
                gradient = torch.where(good, gradient, 0.0)
            sums.append(route.sums(over, gradient, self.consistency, of))
        bad = over.all_reduce(total, "gradients that are not finite", bounded=True) > 0
        for own, route, each in zip(self.row_gradients, routes, sums, strict=True):
            own.add(route.keys, each, bad)
        if self.fused_optimizer is not None:
            try:
                self.fused_optimizer.step()
            finally:
                self.fused_optimizer.zero_grad()

    def owns(self, ids: torch.Tensor) -> torch.Tensor:
        """(n,) bool, which of `ids` (n,) have their rows on this rank."""
        over = self.communicator
        return launch.owner_of(ids, over.world_size) == over.rank

    def lerp_rows_(self, other: HashEmbeddingCollection, weight: float) -> None:
        """Average rows: `HashTableCollection.lerp_` of the tables, as of ``copy.deepcopy(trained)``."""
        self.tables.lerp_(other.tables, weight)

    def _apply(self, fn: Any, recurse: bool = True) -> HashEmbeddingCollection:
        """What ``to``, ``half``, ``share_memory`` and so on call; rows stay where their `Placement` says.

        Raises TypeError for another dtype than float32, and for memory that processes share.
        """
        try:
            probe = fn(torch.zeros(1, dtype=torch.float32, device="cpu"))
        except (RuntimeError, AssertionError) as error:
            here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
            raise RuntimeError(
                f"{type(self).__name__} cannot be moved ({error}): torch {torch.__version__} finds "
                f"{here or 'no accelerator'} here. Leave it on the CPU, or install a torch for the device"
            ) from error
        if probe.dtype != torch.float32:
            raise TypeError(
                f"rows of {type(self).__name__} are float32, and cannot become {probe.dtype}: compute under "
                "torch.autocast, or store rows in 16 bits with TablePolicy(precision=PrecisionTiers(...))"
            )
        if probe.is_meta:
            raise TypeError(
                f"rows of {type(self).__name__} cannot be on the meta device, which has no values"
            )
        if probe.device.type == "cpu" and probe.is_shared():
            raise TypeError(
                f"rows of {type(self).__name__} cannot be in memory that processes share: give each process "
                "its part by process_group="
            )
        super()._apply(fn, recurse)
        return self

    def __copy__(self) -> HashEmbeddingCollection:
        """Shares rows and gradients, as the copy of a module of torch shares its parameters."""
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    def __prepare_scriptable__(self) -> None:
        raise TypeError(UNSCRIPTABLE)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles; gradients are left out."""
        saved: dict[str, Any] = dict(self.__dict__)
        fused = self.fused_optimizer
        saved["row_gradients"] = []
        saved["fused_optimizer"] = None if fused is None else (fused.updates, fused.rates)
        return saved

    def __setstate__(self, saved: dict[str, Any]) -> None:
        super().__setstate__(saved)
        fused: Any = self.fused_optimizer
        self._collect(fused is not None)
        if self.fused_optimizer is not None:
            self.fused_optimizer.updates, self.fused_optimizer.rates = fused

    def extra_repr(self) -> str:
        """Features and tables."""
        parts = [f"{each.name}: {each.dim}" for each in self.tables.features.values()]
        return f"{', '.join(parts)}, consistency={self.consistency!r}"


def _all_below(values: torch.Tensor, limit: float) -> bool:
    """Whether all are below `limit` in size, in one pass without a copy."""
    low, high = values.aminmax() if values.numel() else (0.0, 0.0)  # of NaN both are
    return -limit < float(low) and float(high) < limit


def _leave_parameter_out(module: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    state_dict.pop(f"{prefix}rows", None)


def _take_own_parameter(module: Any, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    state_dict[f"{prefix}rows"] = module.rows  # torch asks for every parameter


class _Gather(torch.autograd.Function):
    """Rows of the occurrences, or the sums of their bags, whose gradients go to the module."""

    @staticmethod
    def forward(
        ctx: Any,
        leaf: torch.Tensor,
        module: HashEmbeddingCollection,
        routes: Sequence[Route],
        lengths: Sequence[torch.Tensor | None],
        *values: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.module, ctx.routes, ctx.lengths, ctx.bags = module, routes, lengths, []
        found = []
        for rows, route, of in zip(values, routes, lengths, strict=True):
            indexed = ops.IndexedRows(rows, route.inverse)
            ctx.bags.append(None if of is None else bags_of(of.to(rows.device), len(route.inverse)))
            found.append(indexed.gathered() if of is None else indexed.pooled(ctx.bags[-1], len(of)))
        return tuple(found)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, ...]:
        leaf = ctx.next_functions[0][0]
        while leaf.next_functions:  # the rows are on another device
            leaf = leaf.next_functions[0][0]
        try:
            torch._C._will_engine_execute_node(leaf)
        except RuntimeError:  # torch's name of it: a leaf whose gradient is returned and not kept
            raise TypeError(
                "torch.autograd.grad of a parameter that stands for rows of a hash embedding returns none, "
                "and would add to the HashOptimizer's: take it of the module's output, or call backward()"
            ) from None
        # What an empty bag's gradient is, be it not a number, is nobody's.
        of_rows = [
            each if of is None else each.masked_fill((of == 0).unsqueeze(1).to(each.device), 0.0)
            for each, of in zip(gradients, ctx.lengths, strict=True)
        ]
        ctx.module.add_gradients(ctx.routes, of_rows, ctx.bags)
        return (None,) * (4 + len(gradients))


def _common_seed(over: Communicator) -> int:
    drawn = torch.randint(2**62, (1,), dtype=torch.int64, device="cpu")
    return int(over.all_gather(drawn)[0])


def refuse_transforms() -> None:
    """Raise TypeError where torch records a call of a hash embedding, or gives it tensors without values."""
    if torch._C._get_tracing_state() is not None:
        raise TypeError(UNSCRIPTABLE)
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise TypeError(
            "a transform of torch.func (grad, vmap, jacrev) would not reach the rows of a hash embedding: "
            "look them up outside of it, and give them to the function as an argument"
        )
    if is_compiling() and torch.compiler.is_exporting():  # the flag alone is the process's
        raise TypeError(
            "torch.export has no place for a table that grows: tritonrec.serving.export writes rows and model"
        )


def leaf_call(module: torch.nn.Module, *args: Any) -> Any:
    """The call of `module` as one node of the graph of its arguments, the first of which is a proxy.

    Raises ValueError where the module is all that is traced.
    """
    tracer = args[0].tracer
    path = tracer.path_of_module(module)
    if not path:
        raise ValueError("a hash embedding is one call of a traced model: trace the model that calls it")
    return tracer.create_proxy("call_module", path, args, {})
