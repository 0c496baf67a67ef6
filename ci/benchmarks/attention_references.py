"""Public PyTorch references of HSTU attention, loaded from checkouts: how each of them is called.

A file is loaded from where it lies: statements that fail (an import that is not installed, a question to a
GPU) are skipped, and the few functions of FBGEMM and einops that references lean on are stood in for where
they are missing. `FAMILIES` lists what is known, by the functions that a file defines.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

HEADS, DIM_QK, DIM_V = 2, 8, 6
N = 97  # the normaliser; references that have no argument for it are padded to it

Tensors = dict[str, torch.Tensor]
Functions = dict[str, Any]


class DoesNotMeet(Exception):
    """The reference has no such option, or another meaning of it."""


class Case(NamedTuple):
    """Lengths, the op's options, queries of each sequence (None: all), and whether alpha scales the bias."""

    lengths: list[int]
    options: dict[str, Any]
    queries: list[int] | None = None
    scaled: bool = False

    @property
    def offsets(self) -> torch.Tensor:
        return torch.tensor([0, *self.lengths]).cumsum(0)

    @property
    def query_offsets(self) -> torch.Tensor:
        return torch.tensor([0, *(self.lengths if self.queries is None else self.queries)]).cumsum(0)


def padded(functions: Functions, case: Case, alpha: float, given: Tensors) -> torch.Tensor:
    """``pytorch_hstu_mha`` of Meta and of those who took it over: options by the names of its arguments."""
    function = functions["pytorch_hstu_mha"]
    if case.queries is not None:
        return cached(functions, case, alpha, given)
    taken = inspect.signature(function).parameters
    options, contexts = dict(case.options), case.options.get("contextual_seq_len", 0)
    history = torch.tensor(case.lengths) - options.get("num_targets", 0)
    if ((torch.tensor(case.lengths) > 0) & (history < contexts)).any():
        raise DoesNotMeet("contextual tokens of a shorter sequence see only themselves, here each other")
    if "num_contextuals" in taken:
        if "max_attn_len" in options and "num_targets" in options:
            raise DoesNotMeet("a target's window ends at its own place, here at the end of history")
        for name in ("contextual_seq_len", "num_contexts"):
            if name in options:
                options["num_contextuals"] = options.pop(name)
    if "attn_prefix_len" in options and "attn_func" in taken:
        options = {"attn_func": intervals(case)}
    refuse(options, *taken)
    normaliser = {"max_seq_len": N}
    if "scaling_seqlen" in taken:
        normaliser = {"max_seq_len": max(case.lengths), "scaling_seqlen": N}
    tensors = {name: given[name] for name in "qkv"}
    return function(alpha=alpha, seq_offsets=case.offsets, **normaliser, **tensors, **options)


def square(functions: Functions, case: Case, alpha: float, given: Tensors) -> torch.Tensor:
    """AITER's ``torch_hstu_attention``: as Meta's, but v has as many features as q: zeros are added."""
    wide = given | {"v": torch.nn.functional.pad(given["v"], (0, DIM_QK - DIM_V))}
    functions = {"pytorch_hstu_mha": functions["torch_hstu_attention"]}
    return padded(functions, case, alpha, wide)[..., :DIM_V]


def intervals(case: Case) -> torch.Tensor:
    """(H, 3, L) int32: a row sees columns [0, first) and [second, third)."""
    row = torch.cat([torch.arange(length) for length in case.lengths])
    prefix, window = case.options["attn_prefix_len"], case.options["max_attn_len"]
    columns = [(row + 1).clamp(max=prefix), (row - window).clamp(min=prefix), row + 1]
    return torch.stack(columns).to(torch.int32).expand(HEADS, 3, -1)


def cached(functions: Functions, case: Case, alpha: float, given: Tensors) -> torch.Tensor:
    """``pytorch_cached_hstu_mha``: as many queries for each sequence."""
    function = functions.get("pytorch_cached_hstu_mha")
    if function is None or "delta_x_offsets" in inspect.signature(function).parameters:
        raise DoesNotMeet("no cached function that takes the last queries of each sequence")
    if len(set(case.queries or ())) > 1:
        raise DoesNotMeet("needs as many queries for each sequence")
    return function(N, alpha, given["q"], given["k"], given["v"], case.offsets)


def dense(functions: Functions, case: Case, alpha: float, given: Tensors) -> torch.Tensor:
    """The tests' ``_hstu_attention_maybe_from_cache`` of NVIDIA and FBGEMM: dense mask and dense bias."""
    refuse(case.options, "num_targets", "target_group_size", "num_contexts", *BIAS)
    function = functions["_hstu_attention_maybe_from_cache"]
    offsets, longest = case.offsets, N
    arguments = {
        "num_heads": HEADS, "attention_dim": DIM_QK, "linear_dim": DIM_V, "seqlen_q": longest,
        "seqlen_k": longest, "q": given["q"], "k": given["k"], "v": given["v"],
        "q_offsets": case.query_offsets, "k_offsets": offsets, "rab": dense_bias(case, given),
        "invalid_attn_mask": dense_mask(functions, case), "alpha": alpha, "upcast": False,
        "is_delta_q": case.queries is not None, "seqused_q": None, "seqused_k": None,
    }  # fmt: skip
    return function(**{name: arguments[name] for name in inspect.signature(function).parameters})


def dense_mask(functions: Functions, case: Case) -> torch.Tensor:
    """(B, 1, N, N) by the file's own ``construct_mask``, which pads contexts, history and targets apart."""
    none = torch.zeros(len(case.lengths), dtype=torch.int64)
    targets, contexts = (case.options.get(name, none) for name in ("num_targets", "num_contexts"))
    history = torch.tensor(case.lengths) - targets - contexts
    offsets = torch.cat([none[:1], history.cumsum(0)])
    parts = {"seqlen_c": int(contexts.max()), "seqlen_t": int(targets.max())}
    arguments = {
        **parts, "batch_func": 1, "seqlen": N - sum(parts.values()), "window_size": (-1, 0), "device": "cpu",
        "target_group_size": case.options.get("target_group_size", 1), "num_contexts": contexts,
        "num_targets": targets, "cu_seqlens_q": offsets, "cu_seqlens_k": offsets,
    }  # fmt: skip
    function = functions["construct_mask"]
    taken = inspect.signature(function).parameters
    return function(**{name: value for name, value in arguments.items() if name in taken})


def dense_bias(case: Case, given: Tensors) -> torch.Tensor | None:
    """(B, 1, N, N), spelled out of the tables."""
    if "pos_weights" not in given:
        return None
    place = torch.arange(N)
    bias = given["pos_weights"][place - place[:, None] + N - 1].expand(len(case.lengths), 1, N, N)
    if "ts_weights" in given:
        rows, columns = (pad(case, case.options[name]) for name in ("query_timestamps", "timestamps"))
        entries = log2_bucket(rows[:, :, None] - columns[:, None, :]).clamp(max=len(given["ts_weights"]) - 1)
        bias = bias + given["ts_weights"][entries][:, None]
    return bias


def pad(case: Case, tokens: torch.Tensor) -> torch.Tensor:
    """(B, N) of (L,), zero behind a sequence."""
    out = tokens.new_zeros(len(case.lengths), N)
    for row, part in zip(out, tokens.split(case.lengths), strict=True):
        row[: len(part)] = part
    return out


def log2_bucket(difference: torch.Tensor) -> torch.Tensor:
    return torch.frexp(difference.clamp(min=1).double()).exponent.long() - 1  # exact below 2**53


def research(functions: Functions, case: Case, alpha: float, given: Tensors) -> torch.Tensor:
    """Meta's research model: a module holds both tables and takes the function of buckets as an argument."""
    refuse(case.options, *BIAS)
    if case.queries is not None:
        raise DoesNotMeet("its cache takes one query of each sequence")
    module = functions["RelativeBucketedTimeAndPositionBasedBias"](
        N, len(given.get("ts_weights", ())) - 1, log2_bucket
    )
    for name, mine in (("_pos_w", "pos_weights"), ("_ts_w", "ts_weights")):
        if mine in given:
            delattr(module, name)
            setattr(module, name, given[mine])
    times = None
    if "pos_weights" in given:
        if "ts_weights" not in given:
            raise DoesNotMeet("no bias by position without one by time")
        times = pad(case, case.options["timestamps"])
        for row, length in zip(times, case.lengths, strict=True):
            row[length:] = row[max(length - 1, 0)].clone()  # the last token has no next one
    flat = {name: given[name].flatten(1) for name in "qkv"}
    out, _, _ = functions["_hstu_attention_maybe_from_cache"](
        num_heads=HEADS, attention_dim=DIM_QK, linear_dim=DIM_V, q=flat["q"] * alpha, k=flat["k"],
        v=flat["v"], cached_q=None, cached_k=None, delta_x_offsets=None, x_offsets=case.offsets,
        all_timestamps=times, invalid_attn_mask=torch.ones(N, N).tril(), rel_attn_bias=module,
    )  # fmt: skip
    return out.unflatten(1, (HEADS, DIM_V))


def refuse(options: dict[str, Any], *known: str) -> None:
    for name in options:
        if name not in known:
            raise DoesNotMeet(f"no {name}")


BIAS = ("pos_weights", "ts_weights", "timestamps", "query_timestamps")
# functions that a file must hold to be read in a way; the first that fits
FAMILIES: list[tuple[set[str], Callable[..., torch.Tensor]]] = [
    ({"pytorch_hstu_mha"}, padded),
    ({"torch_hstu_attention"}, square),
    ({"_hstu_attention_maybe_from_cache", "construct_mask"}, dense),
    ({"_hstu_attention_maybe_from_cache", "RelativeBucketedTimeAndPositionBasedBias"}, research),
]


def stand_in() -> None:
    """FBGEMM's two jagged functions and einops' one, where they are not installed."""
    if not hasattr(torch.ops.fbgemm, "jagged_to_padded_dense"):
        library = torch.library.Library("fbgemm", "FRAGMENT")
        library.define(
            "jagged_to_padded_dense(Tensor values, Tensor[] offsets, SymInt[] max_lengths, "
            "float padding_value=0.0) -> Tensor"
        )
        library.define(
            "dense_to_jagged(Tensor x, Tensor[] offsets, SymInt? total_L=None) -> (Tensor, Tensor[])"
        )

        def jagged_to_padded_dense(values, offsets, max_lengths, padding_value=0.0):
            parts = values.split(offsets[0].diff().tolist())
            widths = ((0, 0, 0, max_lengths[0] - len(part)) for part in parts)
            pads = (
                torch.nn.functional.pad(p, w, value=padding_value) for p, w in zip(parts, widths, strict=True)
            )
            return torch.stack(list(pads))

        def dense_to_jagged(x, offsets, total_L=None):
            lengths = offsets[0].diff().tolist()
            return torch.cat([row[:length] for row, length in zip(x, lengths, strict=True)]), offsets

        library.impl("jagged_to_padded_dense", jagged_to_padded_dense, "CompositeImplicitAutograd")
        library.impl("dense_to_jagged", dense_to_jagged, "CompositeImplicitAutograd")
        KEPT.append(library)
    if "einops" not in sys.modules and importlib.util.find_spec("einops") is None:
        module = types.ModuleType("einops")
        module.rearrange = lambda x, pattern, b: x.unflatten(0, (b, -1))  # type: ignore[attr-defined]
        sys.modules["einops"] = module


KEPT: list[torch.library.Library] = []  # a library that is collected takes its functions with it


def load(path: Path) -> Functions:
    """Run the file's statements one by one; those that fail define nothing."""
    stand_in()
    module = types.ModuleType(f"reference_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    for statement in ast.parse(path.read_text()).body:
        code = compile(ast.Module([statement], []), str(path), "exec")
        try:
            exec(code, module.__dict__)
        except Exception:  # an import or a device that is not there
            continue
    return vars(module)
