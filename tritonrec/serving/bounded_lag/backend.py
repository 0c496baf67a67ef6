"""The c10d backend ``bls``: all-to-all with a bounded lag; other collectives by gloo, or NCCL on CUDA.

    tritonrec.serving.bounded_lag.register()
    dist.init_process_group("bls", pg_options=BoundedLagOptions(bound=4))
    work = dist.all_to_all_single(received, values, receive, send, async_op=True)

A blocking all-to-all has no lag, with any bound. With ``async_op=True`` up to bound + 1 of them are in
flight; the start of a further one, and a wait for a later one, complete the oldest first. As anywhere in
torch.distributed, all ranks issue the same collectives in the same order, and the received tensor may be read
after `wait`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BarrierOptions
from torch._subclasses.fake_tensor import is_fake

from .exchange import BoundedLagAllToAll
from .transport import Exchange

if TYPE_CHECKING:
    from ...trace import SupportsRecording

NAME = "bls"


@dataclass
class BoundedLagOptions:
    """``pg_options`` of a ``bls`` group.

    Args:
        bound: exchanges that two ranks may be apart; 0 makes every all-to-all synchronous.
        recorder, transport: see `BoundedLagAllToAll`.
        capacity: the same; sizes are known here, so only MPI needs one.
    """

    bound: int = 0
    recorder: SupportsRecording | None = None
    transport: str = "auto"
    capacity: int = 0


class _Pending(dist.Work):
    """c10d's handle of an exchange."""

    def __init__(self, exchange: Exchange):
        super().__init__()
        self._exchange = exchange

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Complete the exchange and all older ones, each within `timeout` or the group's."""
        self._exchange.wait(timeout or None)
        return True

    def is_completed(self) -> bool:
        return self._exchange.done


class _WorkGroup(dist.Work):
    """Several works as one."""

    def __init__(self, works: list[dist.Work]):
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for each work in turn, within `timeout` or the group's."""
        # A list: `all` of a generator would leave the rest unwaited after a first False.
        return all([work.wait() if timeout is None else work.wait(timeout) for work in self._works])

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _check_not_fake(name: str, first: object) -> None:
    if type(first) is not torch.Tensor and is_fake(first):
        raise NotImplementedError(f"{name}: a group of {NAME} sends values, and a fake tensor has none")


def _delegate(name: str) -> Callable[..., dist.Work]:
    """Make a method that calls `name` of the tensors' backend."""

    def call(group: BoundedLagGroup, *args: Any, **kwargs: Any) -> dist.Work:
        given = (*args, *kwargs.values())
        first: Any = next(iter(given), None)
        while isinstance(first, (list, tuple)):
            first = first[0] if first else None
        _check_not_fake(name, first)
        device = first.device if isinstance(first, torch.Tensor) else torch.device("cpu")
        return getattr(group._get_backend(device), name)(*args, **kwargs)

    return call


def _delegate_each(name: str) -> Callable[..., dist.Work]:
    """Make a method that calls `name` of the tensors' backend for each pair of output and input."""

    def call(
        group: dist.ProcessGroup, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *opts: Any
    ) -> dist.Work:
        one = _delegate(name)
        return _WorkGroup([one(group, *pair, *opts) for pair in zip(outputs, inputs, strict=True)])

    return call


class BoundedLagGroup(dist.ProcessGroup):
    """A process group whose `all_to_all_single` has a bounded lag.

    Other collectives go to the backends registered here: gloo for tensors on the host and, with a GPU, NCCL
    for tensors on the device. This class calls them without the interpreter's lock. torch would hold it:
    gloo's threads need it to drop a tensor while they hold a lock that the next collective waits for, a
    deadlock. So no dispatch mode sees the collectives of `torch.distributed`, and fake tensors are refused.

    Ranks do not compare the calls of these, as in any group of torch: a group of gloo compares them under
    ``TORCH_DISTRIBUTED_DEBUG=DETAIL``.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, options: BoundedLagOptions
    ):
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stub lacks it
        backends: dict[str, tuple[Any, Any]] = {
            "cpu": (dist.ProcessGroup.BackendType.GLOO, dist.ProcessGroupGloo)
        }
        if torch.cuda.is_available() and dist.is_nccl_available():
            backends["cuda"] = (dist.ProcessGroup.BackendType.NCCL, dist.ProcessGroupNCCL)
        for device, (kind, backend) in backends.items():
            own = dist.PrefixStore(device, store)
            self._register_backend(torch.device(device), kind, backend(own, rank, size, timeout))
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        gloo: Any = self._get_backend(torch.device("cpu"))
        self.exchange = BoundedLagAllToAll(
            gloo, options.bound, options.capacity, timeout, options.recorder, transport=options.transport
        )

    def getBackendName(self) -> str:
        """The backend's name in torch.distributed."""
        return NAME

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> _Pending:
        """Implements `dist.all_to_all_single`; without split sizes rows are cut into equal parts."""
        _check_not_fake("all_to_all_single", input)
        receive = self._splits("output", output, output_split_sizes)
        send = self._splits("input", input, input_split_sizes)
        return _Pending(self.exchange.start(input, send, receive, output))

    all_to_all_single = alltoall_base  # type: ignore[assignment]  # its name from torch 2.13 on

    allgather = _delegate("allgather")
    allreduce = _delegate("allreduce")
    allreduce_coalesced = _delegate("allreduce_coalesced")
    broadcast = _delegate("broadcast")
    gather = _delegate("gather")
    reduce = _delegate("reduce")
    reduce_scatter = _delegate("reduce_scatter")
    scatter = _delegate("scatter")
    _allgather_base = _delegate("_allgather_base")
    _reduce_scatter_base = _delegate("_reduce_scatter_base")
    send = _delegate("send")
    recv = _delegate("recv")
    allgather_into_tensor_coalesced = _delegate_each("_allgather_base")
    reduce_scatter_tensor_coalesced = _delegate_each("_reduce_scatter_base")
    # Their names from torch 2.13 on.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Any:  # type: ignore[override]
        """Implements `dist.barrier`, on the host."""
        opts = BarrierOptions() if opts is None else opts
        if timeout is not None:
            opts.timeout = timeout
        host: Any = self._get_backend(torch.device("cpu"))
        return host.barrier(opts)

    def _splits(self, name: str, tensor: torch.Tensor, sizes: list[int]) -> list[int]:
        if not sizes:
            if len(tensor) % self.size():
                raise ValueError(
                    f"{name} has {len(tensor)} rows, not a multiple of {self.size()} ranks: give split sizes"
                )
            return [len(tensor) // self.size()] * self.size()
        if sum(sizes) != len(tensor):
            raise ValueError(f"{name} has {len(tensor)} rows, but its split sizes are {sizes}")
        return list(sizes)


def _create(opts: Any, options: BoundedLagOptions | None) -> BoundedLagGroup:
    chosen = BoundedLagOptions() if options is None else options
    return BoundedLagGroup(opts.store, opts.group_rank, opts.group_size, opts.timeout, chosen)


def register() -> None:
    """Register ``bls`` with torch.distributed; a second call does nothing."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
