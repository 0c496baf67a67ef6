"""The dense part of a model as a program of `torch.export`, and compiled by AOTInductor.

A scorer is a module of tensors, without a trainer's batches: what is exported. Ours are made from a model;
that of another model is the caller's. Sizes that differ between the `examples` are dynamic. Our ops are nodes
of the graph (``torch.ops.tritonrec``), so a process that runs a program imports `tritonrec.ops` first.

Dimensions: L tokens, B samples, C features, F dense features, d model dimension; of impressions Lh history
and Le exposed tokens, T tasks.
"""

from __future__ import annotations

import io
import os
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from threading import RLock
from typing import Any

import torch
import torch.fx.experimental._config as symbolic_shapes
from torch import Tensor

from .. import ops
from ..kernels.autocast import Precision, autocast, widen
from ..kernels.checksums import same_bits
from ..kernels.op import OPS, Op
from ..nn import DLRM, GRM, HSTU, NextItemModel, PaddedNextItem, SASRec
from ..nn.modules import Linear
from .vetting import RefusedProgramError, vetted

Arguments = tuple[Tensor, ...]
Program = Callable[..., Any]

NEXT_ITEM, CLICK, IMPRESSION, SCORER = "next_item", "click", "impression", "scorer"
"""What a program computes: `NextItemEncoder`, `ClickScorer`, `ImpressionScorer`, or a caller's scorer."""


@dataclass(frozen=True)
class _History:
    """The parts of a batch that an encoder reads."""

    offsets: Tensor
    sample_ids: Tensor
    timestamps: Tensor


class NextItemEncoder(torch.nn.Module):
    """The hidden state of each history's last token, which stands for the user.

    Args:
        model: `NextItemModel` or `PaddedNextItem`, in evaluation mode.
    """

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, rows: Tensor, offsets: Tensor, timestamps: Tensor) -> Tensor:
        """(B, d) from embedding rows (L, d), offsets (B + 1,) of histories with a token each, and (L,)."""
        owners = offsets.new_zeros(offsets.shape[0] - 1)  # ids are for dropout, which is off
        hidden = self.model.encode(_History(offsets, owners, timestamps), rows)  # type: ignore[operator]
        return ops.gather_rows(hidden, offsets[1:] - 1)


class ClickScorer(torch.nn.Module):
    """The logits of `DLRM`; the sigmoid behind them is the caller's, see `Predictor.predict`."""

    def __init__(self, model: DLRM):
        super().__init__()
        self.model = model

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        """(B, 1) from dense features (B, F) and rows (B, C, d), features in the order of the model's."""
        return self.model.logits(dense, dict(zip(self.model.config.features, rows.unbind(1), strict=True)))


@dataclass(frozen=True)
class _Impressions:
    """The parts of a batch that GRM reads for its logits; of labels and ids their number alone."""

    history_offsets: Tensor
    exposed_offsets: Tensor
    timestamps: Tensor
    sample_ids: Tensor
    labels: Tensor


class ImpressionScorer(torch.nn.Module):
    """The logits of `GRM`; the sigmoid behind them is the caller's, see `Predictor.predict`."""

    def __init__(self, model: GRM):
        super().__init__()
        self.model = model

    def forward(
        self,
        item: Tensor,
        action: Tensor,
        genre: Tensor,
        context: Tensor,
        history_offsets: Tensor,
        exposed_offsets: Tensor,
        timestamps: Tensor,
    ) -> Tensor:
        """(Le, T) from the rows of `GRM.forward`, offsets (B + 1,) and times (Lh + Le,).

        Args:
            genre: (Lh + Le, d), or (0, d) for a model without genres.
            context: (B, C * context_dim), features in the order of the model's.
        """
        ids = history_offsets.new_zeros(history_offsets.shape[0] - 1)  # for dropout, which is off
        exposed = action.new_zeros(item.shape[0] - action.shape[0])
        batch = _Impressions(history_offsets, exposed_offsets, timestamps, ids, exposed)
        rows = {"item": item, "action": action, "genre": genre}
        config = self.model.config
        parts = context.unflatten(1, (len(config.context), config.context_dim)).unbind(1)
        rows |= dict(zip(config.context, parts, strict=True))
        return self.model.logits(batch, rows, 0)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Scorer:
    """A module to export.

    Args:
        kind: see `NEXT_ITEM`. module: in evaluation mode. examples: arguments of two calls or more.
        facts: what a caller of the program has to know, as JSON keeps it. precision: of the arithmetic.
    """

    kind: str
    module: torch.nn.Module
    examples: Sequence[Arguments]
    facts: dict[str, Any]
    precision: Precision = "float32"

    @property
    def described(self) -> dict[str, Any]:
        """Of the manifest: what does not change with the values."""
        return {"kind": self.kind, **self.facts, "precision": self.precision}

    def program(self) -> InPrecision:
        """What is exported: `module` in its precision."""
        return InPrecision(self.module, self.precision).eval()


class InPrecision(torch.nn.Module):
    """`module` under autocast, as a trainer's evaluation calls it, with results in float32 at least."""

    def __init__(self, module: torch.nn.Module, precision: Precision):
        super().__init__()
        self.module, self.precision = module, precision

    def forward(self, *arguments: Tensor) -> Tensor | tuple[Tensor, ...]:
        with autocast(self.precision, arguments[0].device):
            found = self.module(*arguments)
        if isinstance(found, Tensor):
            return widen(found)
        if not isinstance(found, tuple) or not all(isinstance(each, Tensor) for each in found):
            raise TypeError(
                f"{type(self.module).__name__} returns {type(found).__name__}, and an exported scorer "
                "returns a tensor, or a tuple of tensors"
            )
        return tuple(map(widen, found))


def scorer_of(model: torch.nn.Module, dim: int) -> Scorer:
    """The scorer of a model of ours, for embedding rows of `dim` columns.

    Raises TypeError for another model.
    """
    if isinstance(model, DLRM):
        config, draw = model.config, _generator()
        examples: list[Arguments] = [
            (
                torch.randn(size, config.dense, generator=draw, dtype=torch.float32, device="cpu"),
                torch.randn(
                    size, len(config.features), dim, generator=draw, dtype=torch.float32, device="cpu"
                ),
            )
            for size in (3, 1, 8, 37)
        ]
        facts: dict[str, Any] = {"features": list(config.features), "dense": config.dense}
        if type(model) is DLRM and {type(each) for each in [*(model.bottom or []), *model.top]} == {Linear}:
            facts["layers"] = {"model": "DLRM", "config": asdict(config)}  # for `whole`
        return Scorer(CLICK, ClickScorer(model), examples, facts)
    if isinstance(model, GRM):
        names, tasks = list(model.config.context), list(model.config.tasks)
        facts = {"context": names, "tasks": tasks, "genres": model.config.genres}
        facts["max_seq_len"] = model.config.max_seq_len
        return Scorer(IMPRESSION, ImpressionScorer(model), _impressions(model), facts)
    if isinstance(model, NextItemModel):
        longest = model.config.max_seq_len
        timed = bool(getattr(model.config, "relative_bias", True))  # FuXi always takes times
    elif isinstance(model, PaddedNextItem):
        longest, timed = model.body.max_seq_len, False
    else:
        raise TypeError(
            f"{type(model).__name__} has no exported form of its own: give scorer=, a module of tensors that "
            "holds the model, and examples= of its arguments"
        )
    lengths = ([3, 2], [1], [longest], [2, 5, longest, 1, 1, 4], [1] * 33)
    examples = [_history([min(length, longest) for length in each], dim) for each in lengths]
    facts = {"max_seq_len": longest, "timestamps": timed}
    own: Any = model
    if type(own) in (HSTU, SASRec) and {type(each) for each in own.layers} == {own.layer}:
        # with these a predictor may compute all layers in one call (`whole`)
        facts["layers"] = {"model": type(own).__name__, "config": asdict(own.config)}
    return Scorer(NEXT_ITEM, NextItemEncoder(model), examples, facts)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _history(lengths: list[int], dim: int) -> Arguments:
    draw, tokens = _generator(), sum(lengths)
    rows = torch.randn(tokens, dim, generator=draw, dtype=torch.float32, device="cpu")
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int64, device="cpu")
    return (
        rows,
        offsets,
        torch.randint(2**20, (tokens,), generator=draw, dtype=torch.int64, device="cpu").sort().values,
    )


def _impressions(model: GRM) -> list[Arguments]:
    """Calls with histories and exposed items of different lengths, none of either among them."""
    config, draw = model.config, _generator()
    room = config.max_seq_len - len(config.context)
    found: list[Arguments] = []
    for shapes in (
        [(3, 2), (2, 1)],
        [(0, 1)],
        [(room, 0)],
        [(2, 5), (0, 0), (0, room), (1, 1)],
        [(0, 1)] * 33,
    ):
        past = [min(length, room) for length, _ in shapes]
        shown = [min(length, room - taken) for taken, (_, length) in zip(past, shapes, strict=True)]
        tokens = sum(past) + sum(shown)
        sizes = [(tokens, config.dim), (sum(past), config.dim), (tokens * config.genres, config.dim)]
        sizes.append((len(shapes), len(config.context) * config.context_dim))
        rows = [torch.randn(size, generator=draw, dtype=torch.float32, device="cpu") for size in sizes]
        offsets = [
            torch.tensor([0, *accumulate(lengths)], dtype=torch.int64, device="cpu")
            for lengths in (past, shown)
        ]
        times = torch.randint(2**20, (tokens,), generator=draw, dtype=torch.int64, device="cpu")
        found.append((*rows, *offsets, times))
    return found


def save_program(scorer: Scorer, path: Path) -> torch.export.ExportedProgram:
    """Export a scorer to a file, and compare the file's program with it in every bit on all examples.

    Raises ValueError where torch cannot trace it with the sizes of the examples, or where a bit differs.
    """
    if len(scorer.examples) < 2:
        raise ValueError("an export needs the arguments of two calls or more, of different sizes: examples=")
    with torch.no_grad():
        scorer.program()(*scorer.examples[0])  # its own errors, before torch tells them in another way
    shapes = [_dynamic(sizes) for sizes in zip(*map(_sizes, scorer.examples), strict=True)]
    try:
        with alone(), torch.no_grad(), symbolic_shapes.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
            # without the option a size of the first example that is not 1 could never be 1
            program = torch.export.export(
                scorer.program(), scorer.examples[0], dynamic_shapes=(tuple(shapes),)
            )
            write_program(program, path)
            loaded = load_program(path, _namespaces(program)).module()
    except (torch._dynamo.exc.UserError, RuntimeError) as error:
        raise ValueError(
            f"torch.export cannot trace {type(scorer.module).__name__}: {_told(error)}; TransformerEncoder "
            "needs is_causal, repeat_interleave output_size, a dynamic size is x.shape[0], not len(x), and "
            "no size or branch may depend on values"
        ) from error
    compare(scorer, loaded, "the exported program")
    return program


def write_program(program: torch.export.ExportedProgram, path: Path) -> None:
    """Write a program that `save_program` traced, with the values that it has now."""
    with alone():
        torch.export.save(program, path)
    path.write_bytes(vetted(path.read_bytes(), _namespaces(program), drop_samples=True))


def _sizes(arguments: Arguments) -> list[torch.Size]:
    if not all(isinstance(each, Tensor) for each in arguments):
        raise TypeError("examples= are tuples of tensors, one for each argument of the scorer")
    return [each.shape for each in arguments]


def _dynamic(sizes: Sequence[torch.Size]) -> dict[int, Any]:
    """By dimension whether it is dynamic, of one argument's shapes in all examples."""
    if len({len(each) for each in sizes}) > 1:
        raise ValueError(f"an argument has {sizes[0]} in one example and {sizes[-1]} in another")
    alike = [len(set(each)) == 1 for each in zip(*sizes, strict=True)]
    return {
        dim: torch.export.Dim.STATIC if same else torch.export.Dim.DYNAMIC for dim, same in enumerate(alike)
    }


def compile_program(scorer: Scorer, program: torch.export.ExportedProgram, path: Path) -> None:
    """Compile by AOTInductor to a file, and compare with the scorer as `save_program` does."""
    with alone(), torch.no_grad():
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    compare(scorer, load_compiled(path), "the program that AOTInductor compiled")


def check_compiler() -> None:
    """Raise ValueError where AOTInductor would find no C++ compiler."""
    named = os.environ.get("CXX")
    if not any(shutil.which(each) for each in ([named] if named else ["g++", "clang++"])):
        raise ValueError(
            f"AOTInductor needs a C++ compiler, and {named or 'g++'} is not here: leave it out, the exported "
            "program runs without one"
        )


def _namespaces(program: torch.export.ExportedProgram) -> set[str]:
    """Of the operators that a program calls: those of this process, which its own code has registered."""
    targets = [node.target for node in program.graph.nodes]
    return {each.namespace for each in targets if isinstance(each, torch._ops.OpOverload)}


def load_program(path: Path, namespaces: Collection[str] = ()) -> torch.export.ExportedProgram:
    """The program of `save_program`, read as data (`vetted`); its ``module()`` is called with tensors.

    Raises ValueError naming the file, where it could run code or is no such program.
    """
    try:
        content = vetted(path.read_bytes(), namespaces)
        with alone():
            return torch.export.load(io.BytesIO(content))
    except RefusedProgramError as error:
        raise RefusedProgramError(f"{path} is refused: {error}") from None
    except Exception as error:  # torch raises many types for a graph that no export makes
        raise ValueError(f"{path} is no program of torch.export: {_told(error)}") from error


def without_dispatcher(program: torch.export.ExportedProgram, kind: str) -> Any:
    """The program's module, which calls our ops as Python does: torch's dispatcher takes a tenth of a
    millisecond for each, which is most of the time of one short history.

    Of the kinds that a `Predictor` calls itself, it no longer compares the sizes of all arguments by
    expressions, which takes a third of a millisecond: the predictor has checked them, and each op does.
    """
    module: Any = program.module()
    for node in module.graph.nodes:
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and target.namespace == "tritonrec" and not node.kwargs:
            node.target = _called(OPS[target.name().removeprefix("tritonrec::").partition(".")[0]])
    module.recompile()
    if kind != SCORER:
        module._forward_pre_hooks.clear()
    return module


@cache
def _called(op: Op) -> Callable[..., Any]:
    """A function, which `with_values` does not copy, of an op's arguments and `impl`."""

    def call(*arguments: Any) -> Any:
        return op(*arguments[:-1], impl=arguments[-1])

    call.__name__ = op.name
    return call


def load_compiled(path: Path) -> Program:
    """The program of `compile_program`: machine code, which runs."""
    with alone():
        return torch._inductor.aoti_load_package(str(path))


def compare(scorer: Scorer, program: Program, name: str) -> None:
    """Raise ValueError unless `program` gives the scorer's results in every bit on all examples."""
    module = scorer.program()
    for number, arguments in enumerate(scorer.examples):
        with torch.no_grad():
            both = [program(*arguments), module(*arguments)]
        got, want = ([each] if isinstance(each, Tensor) else list(each) for each in both)
        if len(got) != len(want) or not all(map(same_bits, got, want)):
            raise ValueError(
                f"{name} differs from {type(scorer.module).__name__} in its bits on example {number}, of "
                f"shapes {_shapes(arguments)}: it is not exported"
            )


def _shapes(arguments: Arguments) -> str:
    return ", ".join(str(tuple(each.shape)) for each in arguments)


def _told(error: Exception) -> str:
    """The first line of an error of torch that says something."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


_ALONE = RLock()


@contextmanager
def alone() -> Iterator[None]:
    """By one thread at a time, because what torch traces, saves and loads by is the whole process's, as are
    the filters of warnings; without those about torch's own future.
    """
    with _ALONE, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
