"""Reading PTX, keeping programs, memory of arguments, and schedules."""

import subprocess
import sys

import pytest
import torch
from ptx_kit import module, run, thread_address

from tritonrec.harness.emulator import Emulation
from tritonrec.harness.emulator.arguments import argument, ranges_of
from tritonrec.harness.emulator.launch import Launch
from tritonrec.harness.emulator.program import compile_program
from tritonrec.harness.emulator.ptx import parse

PTX = """
.version 8.0
.target sm_80
.visible .entry work(
	.param .u32 work_param_0,
	.param .u64 .ptr .global .align 1 work_param_1,
	.param .u8 work_param_2,
	.param .f32 work_param_3
)
.reqntid 64
{
	.reg .pred 	%p<3>;
	.reg .b32 	%r<9>;
	.reg .b64 	%rd<4>;
$L__func_begin0:
// %bb.0:
	.loc	1 25 13                         // kernel.py:25:13
	mov.u32 	%r1, %tid.x;
$L__tmp0:
	.loc	2 43 12, function_name $L__info_string0, inlined_at 1 26 31 // standard.py:43:12
	@!%p1 bra 	$L__BB0_2;
	// begin inline asm
	mov.u32 %r2, 0x0;
	@%p1 ld.global.v2.b32 { %r2, %r3 }, [ %rd1 + 4 ];
	// end inline asm
$L__BB0_2:                              // %._crit_edge
	.loc	1 30 9
	ret;
$L__func_end0:
}
	.file	1 "/somewhere/kernel.py"
	.file	2 "/x/triton/language/standard.py"
	.section	.debug_str
"""


def test_the_parts_of_a_kernel():
    kernel = parse(PTX)
    assert (kernel.name, kernel.threads, kernel.parameter_bytes) == ("work", 64, 24)
    assert [(p.kind, p.offset) for p in kernel.parameters] == [
        ("u32", 0),
        ("u64", 8),
        ("u8", 16),
        ("f32", 20),
    ]
    assert kernel.bits("%r7") == 32 and kernel.bits("%rd1") == 64 and kernel.bits("%p2") == 1
    assert [(label, len(statements)) for label, statements in kernel.blocks] == [("", 4), ("$L__BB0_2", 1)]
    move, branch, _, load = kernel.blocks[0][1]
    assert move.parts == ["mov", "u32"] and move.operands == ["%r1", "%tid.x"]
    assert branch.guard == ("%p1", True) and kernel.place(branch.places) == "kernel.py:26"
    assert load.results == ["%r2", "%r3"] and set(load.sources) == {"%rd1", "%p1", "%r2", "%r3"}
    assert kernel.place(kernel.blocks[1][1][0].places) == "kernel.py:30"


def test_what_is_no_kernel_is_refused():
    with pytest.raises(ValueError, match="give the PTX of one Triton kernel"):
        parse(".version 8.0\n")


@pytest.mark.slow
def test_a_program_is_kept_for_the_next_process(tmp_path):
    code = (
        "import sys; sys.path.insert(0, 'tests/emulator')\nfrom ptx_kit import module\n"
        "from tritonrec.harness.emulator.program import compile_program\n"
        "print(compile_program(module(sys.argv[1], 1)).cached)"
    )

    def cached(body):
        environment = {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", code, body], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip() == "True"

    assert not cached("\tmov.b32 %r1, 3;\n")
    assert cached("\t.loc 1 99 1\n\tmov.b32 \t%r1, 3; // moved\n")
    assert not cached("\tmov.b32 %r1, 4;\n")


def test_overlapping_arguments_are_one_range():
    memory = torch.zeros(64, dtype=torch.int64)
    rows = memory.view(8, 8)[1:5, 2:6]  # from 10 to 8 * 4 + 5 = 37
    views = {"a": memory[:12], "rows": rows, "b": memory[40:].view(torch.int32), "none": memory[:0]}
    found = [argument(name, tensor, name == "a", False) for name, tensor in views.items()]
    assert found[3] is None
    arguments = [each for each in found if each is not None]
    start = memory.data_ptr()
    assert (arguments[1].begin - start, arguments[1].end - start) == (80, 38 * 8)
    assert arguments[1].element(start + 88) == 1
    ranges = ranges_of(arguments, set())
    assert [(r.begin - start, r.end - start, r.item, r.races) for r in ranges] == [
        (0, 38 * 8, 8, True), (320, 512, 4, False),
    ]  # fmt: skip


@pytest.mark.slow
def test_an_argument_may_span_more_than_the_machine_has():
    """Its shadow takes memory only where it is used, and nobody copies it to compare schedules."""
    memory = torch.zeros(128, dtype=torch.int32)
    far = argument("t", memory, False, False)
    far.end = far.begin + (1 << 40)
    program = compile_program(
        module(
            "\tld.param.b64 %rd0, [k_param_0];\n"
            + thread_address("%rd0", 4)
            + "\tst.global.b32 [%rd200], %r250;\n",
            1,
        )
    )
    Launch(program, (1, 1, 1), 0, [memory.data_ptr()], [far], Emulation(schedules=2), set()).run(1)
    assert memory[:32].tolist() == list(range(32))


@pytest.mark.slow
def test_counts_are_those_of_the_kernel():
    memory = torch.zeros(256, dtype=torch.int32)
    body = thread_address("%rd0", 4)
    body += "\tld.global.b32 %r1, [%rd200];\n\tbar.sync 0;\n\tst.global.b32 [%rd200+512], %r1;\n"
    for settings in (Emulation(), Emulation(seed=9), Emulation(schedules=3)):
        counts = run(body, [memory], threads=128, settings=settings)
        # instructions: ld.param, 3 of the address, ld, bar, st, ret; of 4 warps
        assert (counts.instructions, counts.bytes_read, counts.bytes_written, counts.barriers) == (
            32,
            512,
            512,
            1,
        )
