"""PTX to LLVM: a function that runs a warp from its place in the program until it waits or ends.

A block of PTX is cut into *segments*. A segment is a loop over the running lanes, whose body holds
instructions of one lane. Behind it stand *calls*, instructions of the whole warp, on whose results no
instruction of the segment depends. A register whose value passes from one segment to another has a place in
the warp's frame, 32 lanes wide; all others are LLVM values. Every segment, and every place to return to after
a call, has a number, its *pc*. The function begins with a `switch` over them: nothing is on the stack when a
warp stops.
"""

from __future__ import annotations

from dataclasses import dataclass

from .calls import Call, data_address
from .faults import UnsupportedError
from .flow import Flow
from .helpers import used
from .lane import Lane
from .layout import IO_ADDRESS, IO_DATA, IO_MASK
from .ptx import BITS, Kernel, Statement
from .scalar import lower
from .segments import Frame, Segment, cut


@dataclass(frozen=True)
class Translation:
    """LLVM's text of a kernel, and what a report needs of it.

    Args:
        text: a module with one function, `program`. frame_bytes: of memory that each warp needs.
        shared_bytes: the smallest piece of shared memory that an instruction accesses.
        sites: the statement of each number. lines: pc -> the first statement from there on.
    """

    text: str
    frame_bytes: int
    shared_bytes: int
    sites: list[Statement]
    lines: dict[int, Statement]


def translate(kernel: Kernel) -> Translation:
    """LLVM for a kernel; `UnsupportedError` names an instruction that the emulator does not know."""
    return _Translator(kernel).run()


class _Translator(Flow):
    def __init__(self, kernel: Kernel):
        segments, self.sites = cut(kernel)
        super().__init__(segments)
        self.kernel = kernel
        self.frame = Frame(kernel, segments)
        self.lines: dict[int, Statement] = {}

    def run(self) -> Translation:
        for segment in self.segments:
            self.pcs[f"s{segment.number}"] = len(self.pcs)
            for k, call in enumerate(segment.calls):
                self.pcs[f"c{segment.number}_{k}"] = len(self.pcs)
                self.lines[self.pcs[f"c{segment.number}_{k}"]] = call.statement
        following: Statement | None = None
        for segment in reversed(self.segments):
            statements = [s for s, _ in segment.statements] + ([segment.end] if segment.end else [])
            following = statements[0] if statements else following
            if following is not None:
                self.lines[self.pcs[f"s{segment.number}"]] = following
        for segment in self.segments:
            self._segment(segment)
        body = "\n".join(self.out)
        text = "\n".join([*self.head(body), body, "}"])
        pieces = [call.shared_bytes for each in self.segments for call in each.calls]
        smallest = min((piece for piece in pieces if piece), default=1)
        return Translation("\n".join([*used(text), text]), self.frame.size, smallest, self.sites, self.lines)

    def _segment(self, segment: Segment) -> None:
        n = segment.number
        out = self.out
        out += [f"s{n}:", f"  %m64_{n} = load i64, ptr %mask_at", f"  %m{n} = trunc i64 %m64_{n} to i32"]
        size = len(segment.statements) + (segment.end is not None)
        if size:
            out += [
                f"  %i{n} = load i64, ptr %count_at", f"  %j{n} = add i64 %i{n}, {size}",
                f"  store i64 %j{n}, ptr %count_at",
            ]  # fmt: skip
        lane = Lane(self.kernel.bits, self._load)
        lane.suffix = str(n)
        self._unpack(lane, segment.after)
        predicates: list[tuple[Call, str]] = []
        for s, call in segment.statements:
            self._guard(lane, s)
            if call is not None:
                if lane.guard is not None:
                    predicates.append((call, lane.guard))
                    lane.guard = None
                self._pack(lane, call)
            elif s.name == "ld":
                self._load_parameter(lane, s)
            else:
                lower(lane, s)
            lane.guard = None
        taken = None
        if segment.end is not None and segment.end.guard:
            register, negated = segment.end.guard
            taken = lane.get(register, 1)
            if negated:
                taken = lane.emit(f"xor i1 {taken}, true")
        for register in sorted(lane.written):
            if register in self.frame.slots:
                bits = self.kernel.bits(register)
                value = lane.now[register]
                if bits == 1:
                    value, bits = lane.emit(f"zext i1 {value} to i8"), 8
                lane.out.append(f"  store i{bits} {value}, ptr {self._place(register, lane)}")
        tracked = [(guard, f"p{n}_{k}") for k, (_, guard) in enumerate(predicates)]
        if taken is not None:
            tracked.append((taken, f"taken{n}"))
        if lane.out:
            self._loop(n, lane, tracked)
        else:
            out.append(f"  br label %e{n}")
            out.append(f"e{n}:")
        for k, (call, _) in enumerate(predicates):
            out += [
                f"  %h{n}_{k} = getelementptr i8, ptr %frame, i64 {call.place + IO_MASK}",
                f"  %o{n}_{k} = load i32, ptr %h{n}_{k}",
                f"  %q{n}_{k} = xor i32 %m{n}, -1",
                f"  %r{n}_{k} = and i32 %o{n}_{k}, %q{n}_{k}",
                f"  %t{n}_{k} = or i32 %r{n}_{k}, %p{n}_{k}_n",
                f"  store i32 %t{n}_{k}, ptr %h{n}_{k}",
            ]
        masked = {id(call) for call, _ in predicates}
        for k, call in enumerate(segment.calls):
            self.call(segment, k, call, id(call) in masked)
        if segment.end is not None:
            self.end(segment, taken)
        elif not segment.calls:
            self.fall_through(segment)

    def _loop(self, n: int, lane: Lane, tracked: list[tuple[str, str]]) -> None:
        """The body for each running lane; a mask of each tracked condition as %..._n."""
        out = self.out
        out += [f"  br label %l{n}", f"l{n}:"]
        out.append(f"  %left{n} = phi i32 [%m{n}, %s{n}], [%next{n}, %l{n}]")
        for _, name in tracked:
            out.append(f"  %{name} = phi i32 [0, %s{n}], [%{name}_n, %l{n}]")
        out += [
            f"  %lane{n} = call i32 @llvm.cttz.i32(i32 %left{n}, i1 true)",
            f"  %lane64_{n} = zext i32 %lane{n} to i64",
            f"  %tid{n} = or i32 %first_thread, %lane{n}",
        ]
        out += lane.out
        for condition, name in tracked:
            out += [
                f"  %{name}_z = zext i1 {condition} to i32",
                f"  %{name}_s = shl i32 %{name}_z, %lane{n}",
                f"  %{name}_n = or i32 %{name}, %{name}_s",
            ]
        out += [
            f"  %less{n} = sub i32 %left{n}, 1",
            f"  %next{n} = and i32 %left{n}, %less{n}",
            f"  %last{n} = icmp eq i32 %next{n}, 0",
            f"  br i1 %last{n}, label %e{n}, label %l{n}",
            f"e{n}:",
        ]

    def _guard(self, lane: Lane, s: Statement) -> None:
        lane.guard = None
        if s.guard:
            value = lane.get(s.guard[0], 1)
            lane.guard = lane.emit(f"xor i1 {value}, true") if s.guard[1] else value

    def _place(self, register: str, lane: Lane) -> str:
        bits = max(8, self.kernel.bits(register))
        base = lane.emit(f"getelementptr i8, ptr %frame, i64 {self.frame.slots[register]}")
        return lane.emit(f"getelementptr i{bits}, ptr {base}, i64 %lane64_{lane.suffix}")

    def _load(self, register: str, lane: Lane) -> str:
        if register not in self.frame.slots:
            raise UnsupportedError(f"{self.kernel.name} reads {register} before it writes it")
        bits = self.kernel.bits(register)
        value = lane.emit(f"load i{max(8, bits)}, ptr {self._place(register, lane)}")
        return lane.emit(f"trunc i8 {value} to i1") if bits == 1 else value

    def _load_parameter(self, lane: Lane, s: Statement) -> None:
        name, _, offset = s.operands[1].strip("[] ").partition("+")
        start = next(p.offset for p in self.kernel.parameters if p.name == name.strip())
        bits = BITS[s.parts[-1]]
        at = lane.emit(f"getelementptr i8, ptr %parameters, i64 {start + int(offset or 0)}")
        value = lane.emit(f"load i{bits}, ptr {at}, align 1")
        lane.put(s.operands[0], value, bits, s.parts[-1][0] == "s")

    def _pack(self, lane: Lane, call: Call) -> None:
        lane64 = f"%lane64_{lane.suffix}"
        if call.address is not None:
            value = self._address(lane, call.address[0], call.address[1], call.address[2])
            if call.address[2] == 32:
                value = lane.emit(f"zext i32 {value} to i64")
            base = lane.emit(f"getelementptr i8, ptr %frame, i64 {call.place + IO_ADDRESS}")
            at = lane.emit(f"getelementptr i64, ptr {base}, i64 {lane64}")
            lane.out.append(f"  store i64 {value}, ptr {at}")
        if any(name for name, _ in call.inputs):
            self._write_row(lane, call.place + IO_DATA, call.input_bytes, call.inputs)
        if call.statement.guard and not call.in_place and call.outputs:
            # a lane whose predicate is false keeps its values
            self._write_row(lane, call.place + call.outputs_at, call.output_bytes, call.outputs)

    def _write_row(self, lane: Lane, place: int, stride: int, values: list[tuple[str, int]]) -> None:
        row = self._row(lane, place, stride)
        offset = 0
        for operand, bits in values:
            address = data_address(operand)
            if address is not None:
                value = self._address(lane, *address, bits)
            elif operand.startswith("%p") and self.kernel.bits(operand) == 1:
                value = lane.emit(f"zext i1 {lane.get(operand, 1)} to i{bits}")
            else:
                value = lane.get(operand, bits)
            at = lane.emit(f"getelementptr i8, ptr {row}, i64 {offset}")
            lane.out.append(f"  store i{bits} {value}, ptr {at}, align 1")
            offset += bits // 8

    def _unpack(self, lane: Lane, calls: list[Call]) -> None:
        for call in calls:
            if not call.outputs:
                continue
            row = self._row(lane, call.place + call.outputs_at, call.output_bytes)
            offset = 0
            for register, bits in call.outputs:
                if register != "_":
                    at = lane.emit(f"getelementptr i8, ptr {row}, i64 {offset}")
                    value = lane.emit(f"load i{bits}, ptr {at}, align 1")
                    if self.kernel.bits(register) == 1:
                        value = lane.emit(f"icmp ne i{bits} {value}, 0")
                        lane.put(register, value, 1)
                    else:
                        lane.put(register, value, bits, call.statement.parts[-1][0] == "s")
                offset += bits // 8

    def _row(self, lane: Lane, place: int, stride: int) -> str:
        base = lane.emit(f"getelementptr i8, ptr %frame, i64 {place}")
        shift = lane.emit(f"mul i64 %lane64_{lane.suffix}, {stride}")
        return lane.emit(f"getelementptr i8, ptr {base}, i64 {shift}")

    def _address(self, lane: Lane, name: str, offset: int, bits: int) -> str:
        value = lane.get(name, bits)
        return lane.emit(f"add i{bits} {value}, {offset}") if offset else value
