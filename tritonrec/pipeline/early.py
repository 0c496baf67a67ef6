"""Dense gradients that backward completes first: which they are, and when they are complete.

Backward goes through a model from its end to its beginning. The gradients of the last layers are complete
while those of the first are still computed, and their sums can travel meanwhile (`with_early_dense`)::

    compute    forward | backward of layers 3 and 2 | of 1 and 0 |
    reduce                                          | sums of 3 and 2 | of 1 and 0 |

Only the last backward of a window completes them. The order of the parameters in the model tells which come
first, as in torch's DDP, so all ranks take the same; autograd tells when. A model of another order, or one
that leaves parameters out, has all gradients at the end of its backward: that costs time and no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise

import torch
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ..distributed import Communicators
from ..kernels.gradients import Accumulator, current
from .dense import DenseModel
from .window import WindowConfig

LEAST = 1 / 4
"""Of the parameters, the share of either half: a message of fewer costs more than it saves."""


class EarlyDense:
    """Watches the backward passes of a flight.

    Args:
        dense: whose parameters are told apart; None: none is.

    Attributes:
        names: of the parameters whose gradients are complete first; empty: none is told apart.
        others: of the other parameters, which precede them in the model's order.
        share: of all elements, those of `others`.
        completed: called, in the last backward of a window, when gradients of `names` are complete.
        waits: it is not, since somebody reads all sums after that backward.

    Raises ValueError for a model without two parts, and for sharded parameters.
    """

    def __init__(self, dense: DenseModel | None = None):
        self.others, self.names, self.share = ([], [], 0.0) if dense is None else _told_apart(dense)
        if dense is not None and not self.names:
            raise ValueError(
                "a schedule that reduces dense gradients early needs a model of two parts or more, of which "
                "none is sharded"
            )
        self.completed: Callable[[], None] = lambda: None
        self.waits = False
        self._accumulator: Accumulator | None = None  # that the gradients watched go to
        self._trained: list[tuple[str, torch.nn.Parameter]] = []  # of `names`
        self._named: dict[int, str] = {}  # the same by id
        self._nodes: list[Node] = []
        self._handles: list[RemovableHandle] = []
        self._reached: set[str] = set()  # of these, in this backward
        self._last = self._done = self._again = False

    def watch(self, model: torch.nn.Module, accumulator: Accumulator) -> None:
        """Watch from the next `begin` to `end`."""
        self._accumulator = accumulator
        early = set(self.names)
        self._trained = [
            (name, each) for name, each in model.named_parameters() if name in early and each.requires_grad
        ]
        self._named = {id(parameter): name for name, parameter in self._trained}
        accumulator.complete = self._complete if self._trained else None

    def begin(self, last: bool) -> None:
        """The forward and backward of a micro-batch come next, on this thread and its stream."""
        self._reached.clear()
        self._last, self._done = last, False
        if self._nodes:
            return
        # The nodes to which all uses of a parameter lead: one runs when the last of them has been through
        # backward, with a gradient or, where the accumulator has taken the terms, with none. Autograd keeps
        # a node, and its hooks, only as long as somebody does. It runs a node on the stream on which that
        # was made: were it another than the lane's, no event of the lane would stand for the gradient.
        self._nodes = [get_gradient_edge(parameter).node for _, parameter in self._trained]
        self._handles = [
            node.register_hook(partial(self._after_node, name))
            for (name, _), node in zip(self._trained, self._nodes, strict=True)
        ]

    def end(self) -> None:
        """Watch no longer; nodes go, which another trainer may make on a stream of its own."""
        for handle in self._handles:
            handle.remove()
        self._trained, self._nodes, self._handles, self._accumulator = [], [], [], None
        self._named = {}

    def _after_node(self, name: str, *gradients: object) -> None:
        if current() is self._accumulator:  # else a call that leaves no trace
            self._reach(name)

    def _complete(self, parameters: Iterable[torch.Tensor | None]) -> None:
        for parameter in parameters:
            if (name := self._named.get(id(parameter))) is not None:
                self._reach(name)

    def _reach(self, name: str) -> None:
        if self._done:
            raise RuntimeError(
                f"backward has come to parameter {name} again, whose gradient was complete and is with the "
                "other ranks: a model whose micro-batches take different ways through reentrant checkpoints "
                "needs WindowConfig(exchanges='once')"
            )
        # Reentrant checkpoints have backward passes of their own inside, one for each use of a parameter.
        self._again |= name in self._reached
        self._reached.add(name)
        if self._last and not (self._again or self.waits) and len(self._reached) == len(self._nodes):
            self._done = True
            self.completed()


def reduces_early(
    dense: DenseModel, communicators: Communicators, config: WindowConfig, device: torch.device
) -> bool:
    """Whether dense gradients travel beside a backward: where exchanges of the window do."""
    once = {"once": True, "auto": communicators.copies_messages(device)}
    beside = not once.get(config.exchange.sharing, False)
    return communicators.world_size > 1 and beside and bool(_told_apart(dense)[1])


def _told_apart(dense: DenseModel) -> tuple[list[str], list[str], float]:
    """Names of the parameters whose gradients are complete last, and of those before, if there are any; the
    share of the first.
    """
    if dense.shards is not None:  # each has its messages
        return [], [], 0.0
    names = [name for name, _ in dense.model.named_parameters()]
    sizes = [each.numel() for each in dense.model.parameters()]
    total, done, cut = sum(sizes), 0, 0
    # Early sums travel while the others are computed: two halves hide most where either takes as long.
    before = 0
    for at, (name, following) in enumerate(pairwise(names), start=1):
        done += sizes[at - 1]
        if _part(name) != _part(following) and abs(2 * done - total) < abs(2 * before - total):
            before, cut = done, at
    if not before or not LEAST * total <= before <= (1 - LEAST) * total:
        return [], [], 0.0
    return names[:cut], names[cut:], before / total


def _part(name: str) -> str:
    """The part of a model that a parameter is in: a layer of a list, ``layers.0``, or a module."""
    path = name.split(".")
    number = next((at for at, each in enumerate(path) if each.isdigit()), 0)
    return ".".join(path[: number + 1][: len(path) - 1])
