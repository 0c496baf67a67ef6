"""Dense parameters that FSDP2 (`torch.distributed.fsdp.fully_shard`) has sharded over all ranks.

    W ranks   S values of all sharded parameters   S_r values of rank r's shards

Rank r keeps chunk r of each parameter, as `torch.chunk` cuts it, and the optimizer's state of that chunk. A
window's parameters are frozen, so they are gathered once for all of its micro-batches, by FSDP2's own
`unshard`. FSDP2's reduction, float32 sums after each backward pass, is off in flight: the trainer adds up
whole numbers once a window, of which each rank receives those of its shards alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.utils.hooks import RemovableHandle

from ..distributed import Communicator
from ..nn import GradientAccumulator
from .reduce_scatter import DENSE_ROW, ReduceScatter
from .sums import Sums

# That hook gathers parameters for the backward pass; here they stay gathered until the window's end.
warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)

BUCKET = 2**22
"""Values of the sums in one message at least, unless there are no more: 32 MiB before packing."""


@dataclass(frozen=True)
class Cut:
    """How a parameter is cut: rank r has [bounds[r], bounds[r + 1]) along dimension `dim`."""

    dim: int
    bounds: tuple[int, ...]

    def of(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """The shard of a rank, a view."""
        start, stop = self.bounds[rank], self.bounds[rank + 1]
        return whole.narrow(self.dim, start, stop - start)


class Shards:
    """The sharded parameters of a model, from one rank's side.

    Args:
        model: after `fully_shard`, of itself or of modules inside.
        parameters: by name, those that the optimizers hold, `DTensor` or not.

    Attributes:
        parameters: by name, the sharded ones among them. replicated: the names of the others.
        gathered: whether the model has whole parameters now.

    Raises ValueError for a mesh of more than one dimension, and for parameters that are not sharded by FSDP2.
    """

    def __init__(self, model: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter]):
        self._model = model
        self._modules = [each for each in model.modules() if isinstance(each, FSDPModule)]
        inside = {id(each) for one in self._modules for each in one.modules() if each is not one}
        # Settings of a root hold for the modules of FSDP2 inside it.
        self._roots = [each for each in self._modules if id(each) not in inside]
        self.parameters = {name: each for name, each in parameters.items() if isinstance(each, DTensor)}
        self.replicated = [name for name in parameters if name not in self.parameters]
        meshes = {each.device_mesh for each in self.parameters.values()}
        for name, each in self.parameters.items():
            (kind, *others) = each.placements
            if others or type(kind) is not Shard or not self._modules:
                raise ValueError(
                    f"parameter {name} is distributed as {each.placements}: the trainer takes parameters "
                    "that fully_shard has sharded over a mesh of one dimension"
                )
        if len(meshes) != 1:
            raise ValueError(f"parameters are sharded over {len(meshes)} meshes: take one of all ranks")
        (self._mesh,) = meshes
        self.world_size, self.rank = self._mesh.size(), self._mesh.get_local_rank()
        self._cuts = {name: _cut(each, self.world_size) for name, each in self.parameters.items()}
        self._trained: list[str] = []
        self._buffers: dict[torch.nn.Parameter, tuple[torch.Tensor, torch.Tensor]] = {}
        self.gathered = False
        self._called: set[FSDPModule] = set()
        self._hooks: list[RemovableHandle] = []
        self._places = {
            (module, name)
            for module in model.modules()
            for name, each in module.named_parameters(recurse=False)
            if isinstance(each, DTensor)
        }

    def validate(self, rank: int, world_size: int, mode: str) -> None:
        """Raise ValueError unless the parameters are sharded over these ranks, in their order."""
        if mode == "reference":
            raise ValueError("mode 'reference' takes a model that is not sharded: leave fully_shard away")
        if (self.rank, self.world_size) != (rank, world_size):
            raise ValueError(
                f"rank {rank} of {world_size} has shard {self.rank} of {self.world_size} of the dense "
                "parameters: give fully_shard a mesh of all ranks in their order"
            )

    def begin(self) -> None:
        """Gather the parameters; from now on the trainer says when they are gathered. Collective."""
        for root in self._roots:
            # Inside a flight FSDP2 neither reduces gradients nor
            # frees parameters: the trainer does both, once a window.
            root.set_requires_gradient_sync(False)
            root.set_reshard_after_forward(False)
            root.set_reshard_after_backward(False)
        roots: list[Any] = self._roots
        self._hooks = [root.register_forward_pre_hook(self._note_call) for root in roots]
        trained = {name: each.requires_grad for name, each in self._model.named_parameters()}
        self.gather()
        for name, each in self._model.named_parameters():
            if each.dtype != torch.float32:
                raise ValueError(
                    f"parameter {name} is gathered as {each.dtype}: leave MixedPrecisionPolicy away from "
                    "fully_shard, and use torch.autocast for lower precision"
                )
            each.requires_grad_(trained[name])
        self._trained = [name for name, each in self.parameters.items() if each.requires_grad]

    def end(self) -> None:
        """The model is FSDP2's again, with its default settings."""
        for parameter, (its_own, _ours) in self._buffers.items():
            parameter.data = its_own
        self._buffers.clear()
        for hook in self._hooks:
            hook.remove()
        for each in self._called:
            each.reset_iter_state()  # an error may have ended its call
        self._called.clear()
        for each in self._roots:
            each.set_requires_gradient_sync(True)
            each.set_reshard_after_backward(True)
            # FSDP2's defaults: modules inside free their parameters
            # after a forward, a root keeps them for its backward.
            each.set_reshard_after_forward(True)
            each.set_reshard_after_forward(False, recurse=False)
        self.scatter()

    def _note_call(self, module: Any, args: object) -> None:
        self._called.add(module)

    def gather(self) -> None:
        """The model has whole parameters, those after the last update; collective, unless it has them."""
        if not self.gathered:
            for each in self._modules:
                each.unshard()
                self._move(each)
            self.gathered = True

    def _move(self, module: torch.nn.Module) -> None:
        """On a CPU, whole parameters go to memory of ours, and FSDP2's is freed.

        The CPU kernels read a parameter as an array of numpy, and torch never frees memory under an array.
        """
        for each in module.modules():
            for name, parameter in each.named_parameters(recurse=False):
                if (each, name) in self._places and not isinstance(parameter, DTensor):
                    self._move_one(parameter)

    def _move_one(self, parameter: torch.nn.Parameter) -> None:
        if parameter.device.type != "cpu":
            return
        if parameter not in self._buffers:
            its_own = parameter.data
            parameter.data = torch.empty_like(its_own)
            self._buffers[parameter] = its_own, parameter.data
        its_own, ours = self._buffers[parameter]
        # FSDP2 frees a storage by resizing it to 0 and fills it again at the
        # next `unshard`: empty means that the values are in `ours` already.
        if its_own.untyped_storage().size():
            ours.copy_(its_own)
            its_own.untyped_storage().resize_(0)

    def scatter(self) -> None:
        """The model has its shards, which an optimizer updates."""
        for each in self._modules:
            each.reshard()
        self.gathered = False

    def reduce_scatter_mean(
        self, sums: Sums, over: Communicator, accumulator: GradientAccumulator, normalizer: int
    ) -> torch.Tensor:
        """(S_r,) float32, the mean gradients of this rank's shards, one parameter after the other.

        Takes the sums of the sharded parameters from `accumulator`, a bucket of parameters at a time.
        """
        means = []
        for names in self._buckets():
            flat = accumulator.take_flat(names)
            wholes = accumulator.views(flat, names)
            # Rank r's shards of all parameters of the bucket, one
            # after the other, are one row block of the message.
            parts = [
                torch.cat([self._cuts[name].of(whole, rank).reshape(-1) for name, whole in wholes.items()])
                for rank in range(self.world_size)
            ]
            # Whole rows: the exchange of sums counts rows of DENSE_ROW values.
            rows = [torch.nn.functional.pad(part, (0, -len(part) % DENSE_ROW)) for part in parts]
            sizes = [len(each) // DENSE_ROW for each in rows]
            plan = _of_parts(sizes, self.rank)
            values = torch.cat(rows).view(-1, DENSE_ROW)
            mean = sums.reduce_scatter_mean(None, over, values, plan, normalizer, "dense gradients")
            means.append(mean.reshape(-1)[: len(parts[self.rank])])
        return torch.cat(means) if means else torch.zeros(0, dtype=torch.float32, device="cpu")

    def views(self, means: torch.Tensor) -> dict[str, torch.Tensor]:
        """By name the parts of `reduce_scatter_mean`'s result, in the shards' shapes."""
        shapes = {name: self.parameters[name].to_local().shape for name in self._trained}
        parts = means.split([shape.numel() for shape in shapes.values()])
        return {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}

    @property
    def size(self) -> int:
        """S_r, of the parameters that are trained."""
        return sum(self.parameters[name].to_local().numel() for name in self._trained)

    def name_at(self, position: int) -> str:
        """The parameter at a position of `reduce_scatter_mean`'s result, with the index in the whole."""
        for name in self._trained:
            shape, cut = self.parameters[name].to_local().shape, self._cuts[name]
            if position < shape.numel():
                index = [
                    int(each)
                    for each in torch.unravel_index(
                        torch.tensor(position, dtype=torch.int64, device="cpu"), shape
                    )
                ]
                # From the index in the shard to that in the whole parameter.
                index[cut.dim] += cut.bounds[self.rank]
                return f"{name}: gradient at {tuple(index)}"
            position -= shape.numel()
        raise IndexError(f"a position {position} values behind the end of the last parameter")

    @staticmethod
    def whole(state: Any) -> Any:
        """A state of dicts and lists with whole tensors in place of sharded ones. Collective."""
        return _mapped(state, whole)

    @staticmethod
    def own_state(state: Any, parameter: torch.Tensor) -> Any:
        """A state with tensors of the parameter's shape sharded as it is."""
        return _mapped(state, lambda tensor: _own_part(tensor, parameter))

    def _buckets(self) -> Iterable[list[str]]:
        bucket: list[str] = []
        for name in self._trained:
            bucket.append(name)
            if sum(self.parameters[each].numel() for each in bucket) >= BUCKET:
                yield bucket
                bucket = []
        if bucket:
            yield bucket


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a sharded tensor, any other one itself. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_like(part: torch.Tensor, parameter: DTensor) -> DTensor:
    """`part`, shaped like this rank's shard of `parameter`, as a part of a tensor sharded like it."""
    return DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )


def _own_part(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """`tensor` sharded like `parameter`, where that is sharded and of its shape; else `tensor` itself."""
    if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
        return tensor
    mesh = parameter.device_mesh
    part = _cut(parameter, mesh.size()).of(tensor, mesh.get_local_rank())
    kept = torch.empty_like(parameter.to_local(), dtype=tensor.dtype)
    return sharded_like(kept.copy_(part), parameter)


def _mapped(state: Any, function: Any) -> Any:
    """A state of dicts and lists with ``function(tensor)`` in place of each tensor."""
    if isinstance(state, Mapping):
        return {name: _mapped(each, function) for name, each in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(_mapped(each, function) for each in state)
    return function(state) if isinstance(state, torch.Tensor) else state


def _cut(parameter: DTensor, ranks: int) -> Cut:
    """`torch.chunk` along the sharded dimension, whose last chunks may be empty."""
    (kind,) = parameter.placements
    assert isinstance(kind, Shard)
    size = parameter.shape[kind.dim]
    chunk = -(-size // ranks)
    return Cut(kind.dim, tuple(min(rank * chunk, size) for rank in range(ranks + 1)))


def _of_parts(sizes: list[int], rank: int) -> ReduceScatter:
    """The plan of rows that every rank has sums for, ``sizes[r]`` of them for rank r, one after the other."""
    here = torch.arange(sizes[rank], dtype=torch.int64, device="cpu")
    every = torch.arange(sum(sizes), dtype=torch.int64, device="cpu")
    return ReduceScatter(every, sizes, [sizes[rank]] * len(sizes), here.repeat(len(sizes)), sizes)
