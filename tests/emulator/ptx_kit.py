"""PTX written by hand, run by the emulator on arrays."""

from __future__ import annotations

import numpy as np
import torch

from tritonrec.harness.emulator import Emulation
from tritonrec.harness.emulator.arguments import argument
from tritonrec.harness.emulator.counts import Counts
from tritonrec.harness.emulator.launch import Launch
from tritonrec.harness.emulator.program import compile_program

BITS = {"pred": 8, "f32": 32, "f64": 64, "bf16": 16, "f16": 16}
REGISTER = {8: "%rs", 16: "%rs", 32: "%r", 64: "%rd"}
TORCH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(kind: str) -> int:
    return BITS.get(kind) or int(kind[1:])


def module(body: str, parameters: int, threads: int = 32, shared: bool = True) -> str:
    """A kernel `k` with so many 64-bit parameters, and the two of scratch memory that Triton adds."""
    names = ",\n".join(f"\t.param .u64 k_param_{i}" for i in range(parameters + 2))
    return f"""
.version 8.0
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry k(
{names}
)
.reqntid {threads}
{{
\t.reg .pred %p<64>;
\t.reg .b16 %rs<256>;
\t.reg .b32 %r<256>;
\t.reg .b64 %rd<256>;
$L__func_begin0:
{body}
\tret;
$L__func_end0:
}}
\t.file 1 "kernel.py"
"""


def run(
    body: str,
    tensors: list[torch.Tensor],
    threads: int = 32,
    grid: int = 1,
    shared: int = 0,
    settings: Emulation | None = None,
    number: int = 1,
    races: tuple[int, ...] = (),
    varies: tuple[int, ...] = (),
) -> Counts:
    """Run a body whose parameters are the tensors' addresses, in %rd0, %rd1, ..."""
    loads = "\n".join(f"\tld.param.b64 %rd{i}, [k_param_{i}];" for i in range(len(tensors)))
    program = compile_program(module(loads + "\n" + body, len(tensors), threads))
    arguments = [argument(f"t{i}", tensor, i in races, i in varies) for i, tensor in enumerate(tensors)]
    launch = Launch(
        program,
        (grid, 1, 1),
        shared,
        [tensor.data_ptr() for tensor in tensors],
        [each for each in arguments if each is not None],
        settings or Emulation(),
        set(),
    )
    return launch.run(number)


def thread_address(pointer: str, size: int, to: str = "%rd200") -> str:
    """`to` = pointer + size * thread."""
    return (
        f"\tmov.u32 %r250, %tid.x;\n\tmul.wide.u32 {to}, %r250, {size};\n\tadd.s64 {to}, {to}, {pointer};\n"
    )


def evaluate(
    instruction: str, kinds: list[str], out: str, inputs: list[np.ndarray], shared: int = 0
) -> np.ndarray:
    """`instruction` for each thread: {0}, {1}, ... are its operands of `kinds`, {d} its result of kind `out`.

    Arrays hold one element per thread, with the bits of the operands.
    """
    threads = -(-len(inputs[0]) // 32) * 32
    tensors, lines, names = [], [], {}
    for i, (kind, values) in enumerate(zip(kinds, inputs, strict=True)):
        size = bits_of(kind) // 8
        padded = np.resize(values, threads).view(f"i{size}")
        tensors.append(torch.from_numpy(padded.copy()))
        lines.append(thread_address(f"%rd{i}", size))
        register = f"{REGISTER[8 * size]}{100 + i}"
        lines.append(f"\tld.global.b{8 * size} {register}, [%rd200];\n")
        if kind == "pred":
            lines.append(f"\tsetp.ne.b16 %p{20 + i}, {register}, 0;\n")
            register = f"%p{20 + i}"
        names[str(i)] = register
    size = bits_of(out) // 8
    result = torch.zeros(threads, dtype=TORCH[size])
    tensors.append(result)
    d = f"{REGISTER[8 * size]}90"
    if out == "pred":
        text = instruction.format(*(names[str(i)] for i in range(len(kinds))), d="%p30")
        lines += ["\t" + text + "\n", f"\tselp.b16 {d}, 1, 0, %p30;\n"]
    else:
        lines.append("\t" + instruction.format(*(names[str(i)] for i in range(len(kinds))), d=d) + "\n")
    lines.append(thread_address(f"%rd{len(inputs)}", size))
    lines.append(f"\tst.global.b{8 * size} [%rd200], {d};\n")
    run("".join(lines), tensors, threads, shared=shared)
    return result.numpy()[: len(inputs[0])]
