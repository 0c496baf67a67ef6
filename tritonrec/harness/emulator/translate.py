"""PTX to LLVM: a function that runs a warp from its place in the program until it waits or ends.

A block of PTX is cut into *segments*. A segment is a loop over the running lanes, whose body holds
instructions of one lane. Behind it stand *calls*, instructions of the whole warp, on whose results no
instruction of the segment depends. A register whose value passes from one segment to another has a place in
the warp's frame, 32 lanes wide; all others are LLVM values. Every segment, and every place to return to after
a call, has a number, its *pc*. The function begins with a `switch` over them: nothing is on the stack when a
warp stops.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from . import layout
from .calls import CALLED, IGNORED, Call, call_of, data_address, space_of
from .faults import UnsupportedError
from .helpers import used
from .layout import IO_ADDRESS, IO_DATA, IO_MASK
from .ptx import BITS, Kernel, Statement
from .runtime.functions import NAMES
from .scalar import Lane, lower

_MOST_CALLS = 48
"""Calls behind one segment; more would need large buffers."""


@dataclass
class Segment:
    """Instructions of one lane, then calls, then perhaps a branch or an end."""

    number: int
    label: str
    statements: list[tuple[Statement, Call | None]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    after: list[Call] = field(default_factory=list)
    end: Statement | None = None


@dataclass(frozen=True)
class Translation:
    """LLVM's text of a kernel, and what a report needs of it.

    Args:
        text: a module with one function, `program`. frame_bytes: of memory that each warp needs.
        sites: the statement of each number. lines: pc -> the first statement from there on.
    """

    text: str
    frame_bytes: int
    sites: list[Statement]
    lines: dict[int, Statement]


def translate(kernel: Kernel) -> Translation:
    """LLVM for a kernel; `UnsupportedError` names an instruction that the emulator does not know."""
    return _Translator(kernel).run()


class _Translator:
    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.sites: list[Statement] = []
        self.segments = self._cut()
        self.slots: dict[str, int] = {}
        self.frame_bytes = 0
        self.out: list[str] = []
        self.pcs: dict[str, int] = {}
        self.lines: dict[int, Statement] = {}

    def _cut(self) -> list[Segment]:
        """Segments in the order of the text."""
        segments: list[Segment] = []
        for label, statements in self.kernel.blocks:
            current = Segment(len(segments), label)
            segments.append(current)
            waiting: set[str] = set()
            for s in statements:
                if s.name in IGNORED:
                    continue
                call = None
                if s.name in CALLED and not (s.name == "ld" and space_of(s) == "param"):
                    call = call_of(s)
                    if call is None:
                        continue
                    call.site = len(self.sites)
                    self.sites.append(s)
                touched = {*s.sources, *s.results}
                full = call is not None and len(current.calls) == _MOST_CALLS
                if touched & waiting or full or (current.end is not None):
                    following = Segment(len(segments), "", after=current.calls)
                    segments.append(following)
                    current, waiting = following, set()
                if s.name in ("bra", "ret", "exit", "trap"):
                    if current.calls:
                        following = Segment(len(segments), "", after=current.calls)
                        segments.append(following)
                        current, waiting = following, set()
                    current.end = s
                    continue
                current.statements.append((s, call))
                if call is not None:
                    current.calls.append(call)
                    waiting |= {register for register, _ in call.outputs if register != "_"}
            if current.calls:
                segments.append(Segment(len(segments), "", after=current.calls))
        return segments

    def _place_registers(self) -> None:
        """A slot in the frame for each register that a segment reads before it writes it."""
        for segment in self.segments:
            known = {r for call in segment.after for r, _ in call.outputs}
            for s, _ in segment.statements:
                for register in s.sources:
                    if register not in known and "." not in register:
                        self._slot(register)
                known.update(s.results)
            if segment.end is not None and segment.end.guard and segment.end.guard[0] not in known:
                self._slot(segment.end.guard[0])

    def _slot(self, register: str) -> None:
        if register in self.slots or register in ("%tid", "%ctaid", "%ntid", "%nctaid", "%laneid", "%warpid"):
            return
        size = 32 * max(8, self.kernel.bits(register)) // 8
        self.slots[register] = self.frame_bytes
        self.frame_bytes += -(-size // 32) * 32

    def _place_buffers(self) -> None:
        """Calls of neighbouring segments use two regions in turn: one is read, the other filled."""
        most = 0
        for segment in self.segments:
            at = 0
            for call in segment.calls:
                call.place = at
                at += call.io_bytes
            most = max(most, at)
        for segment in self.segments:
            for call in segment.calls:
                call.place += self.frame_bytes + (segment.number % 2) * most
        self.frame_bytes += 2 * most

    def run(self) -> Translation:
        self._place_registers()
        self._place_buffers()
        self.stack_at, self.frame_bytes = self.frame_bytes, self.frame_bytes + 32 * self.kernel.local_bytes
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
        text = "\n".join([*self._head(body), body, "}"])
        return Translation("\n".join([*used(text), text]), self.frame_bytes, self.sites, self.lines)

    # the function's beginning

    def _head(self, body: str) -> list[str]:
        def loaded(name: str, record: str, number: int, bits: int = 64) -> list[str]:
            found = [
                f"  {name}_p = getelementptr i64, ptr {record}, i64 {number}",
                f"  {name} = load i64, ptr {name}_p",
            ]
            if bits == 32:
                found = [
                    f"  {name}_p = getelementptr i64, ptr {record}, i64 {number}",
                    f"  {name}_w = load i64, ptr {name}_p",
                    f"  {name} = trunc i64 {name}_w to i32",
                ]
            return found

        lines = ["define i64 @program(i64 %warp_address) {", "  %warp = inttoptr i64 %warp_address to ptr"]
        for name, number in (("launch", layout.WARP_LAUNCH), ("block", layout.WARP_BLOCK)):
            lines += loaded(f"%{name}_address", "%warp", number)
            lines.append(f"  %{name} = inttoptr i64 %{name}_address to ptr")
        lines += loaded("%warp_index", "%warp", layout.WARP_INDEX, 32)
        lines.append("  %first_thread = shl i32 %warp_index, 5")
        for axis, name in enumerate("xyz"):
            lines += loaded(f"%block_{name}", "%block", layout.BLOCK_X + axis, 32)
            lines += loaded(f"%grid_{name}", "%launch", layout.LAUNCH_GRID_X + axis, 32)
        lines += loaded("%threads", "%launch", layout.LAUNCH_THREADS, 32)
        for name, record, number in (
            ("frame", "%warp", layout.WARP_FRAME),
            ("parameters", "%launch", layout.LAUNCH_PARAMETERS),
            ("functions", "%launch", layout.LAUNCH_FUNCTIONS),
        ):
            lines += loaded(f"%{name}_address", record, number)
            lines.append(f"  %{name} = inttoptr i64 %{name}_address to ptr")
        for number, name in enumerate(NAMES):
            if f"%fn_{name}(" in body:
                lines.append(f"  %fn_{name}_p = getelementptr ptr, ptr %functions, i64 {number}")
                lines.append(f"  %fn_{name} = load ptr, ptr %fn_{name}_p")
        for name, number in (
            ("mask", layout.WARP_MASK), ("live", layout.WARP_LIVE), ("pc", layout.WARP_PC),
            ("fuel", layout.WARP_FUEL), ("count", layout.WARP_INSTRUCTIONS),
            ("barrier", layout.WARP_BARRIER_SITE),
        ):  # fmt: skip
            lines.append(f"  %{name}_at = getelementptr i64, ptr %warp, i64 {number}")
        lines += ["  br label %dispatch", "dispatch:", "  %pc = load i64, ptr %pc_at"]
        places = " ".join(f"i64 {pc}, label %{name}" for name, pc in self.pcs.items())
        lines.append(f"  switch i64 %pc, label %nowhere [{places}]")
        lines += ["nowhere:", f"  ret i64 {layout.FAULTED}"]
        return lines

    # one segment

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
            if register in self.slots:
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
            self._call(segment, k, call, id(call) in masked)
        if segment.end is not None:
            self._end(segment, taken)
        elif not segment.calls:
            self._fall_through(segment)

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
        base = lane.emit(f"getelementptr i8, ptr %frame, i64 {self.slots[register]}")
        return lane.emit(f"getelementptr i{bits}, ptr {base}, i64 %lane64_{lane.suffix}")

    def _load(self, register: str, lane: Lane) -> str:
        if register not in self.slots:
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

    # what passes between a lane and the runtime

    def _pack(self, lane: Lane, call: Call) -> None:
        lane64 = f"%lane64_{lane.suffix}"
        if call.address is not None:
            value = self._address(lane, call.address[0], call.address[1], call.address[2])
            if call.address[2] == 32:
                value = lane.emit(f"zext i32 {value} to i64")
            base = lane.emit(f"getelementptr i8, ptr %frame, i64 {call.place + IO_ADDRESS}")
            at = lane.emit(f"getelementptr i64, ptr {base}, i64 {lane64}")
            lane.out.append(f"  store i64 {value}, ptr {at}")
        if not any(name for name, _ in call.inputs):
            return
        row = self._row(lane, call.place + IO_DATA, call.input_bytes)
        offset = 0
        for operand, bits in call.inputs:
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

    # between segments

    def _call(self, segment: Segment, k: int, call: Call, masked: bool) -> None:
        n, out = segment.number, self.out
        here, last = f"c{n}_{k}", k + 1 == len(segment.calls)
        after = f"s{n + 1}" if last else f"c{n}_{k + 1}"
        out += [f"  br label %{here}", f"{here}:"]
        mask = f"%k{n}_{k}"
        out += [f"  {mask}_w = load i64, ptr %mask_at"]
        if call.together:
            out += [
                f"  {mask}_l = load i64, ptr %live_at",
                f"  {mask}_c = icmp eq i64 {mask}_w, {mask}_l",
                f"  br i1 {mask}_c, label %g{n}_{k}, label %w{n}_{k}",
                f"w{n}_{k}:",
                *self._function(f"{mask}_v", "converge", call.site, "0", "0", self.pcs[here], 0),
                f"  {mask}_b = icmp ne i64 {mask}_v, 0",
                f"  br i1 {mask}_b, label %x{n}_{k}, label %dispatch",
                f"x{n}_{k}:",
                f"  ret i64 {mask}_v",
                f"g{n}_{k}:",
            ]
        if call.barrier:
            out += [
                f"  store i64 {call.site}, ptr %barrier_at",
                f"  store i64 {self.pcs[after]}, ptr %pc_at",
                f"  ret i64 {layout.BARRIER}",
            ]
            self._unreachable(after, last)
            return
        if call.function:
            lanes = f"{mask}_w"
            if masked:
                out += [
                    f"  {mask}_h = getelementptr i8, ptr %frame, i64 {call.place + IO_MASK}",
                    f"  {mask}_p = load i32, ptr {mask}_h",
                    f"  {mask}_z = zext i32 {mask}_p to i64",
                    f"  {mask}_a = and i64 {mask}_z, {mask}_w",
                    f"  {mask}_n = icmp eq i64 {mask}_a, 0",
                    f"  br i1 {mask}_n, label %{after}, label %d{n}_{k}",
                    f"d{n}_{k}:",
                ]
                lanes = f"{mask}_a"
            out += [
                f"  {mask}_io = getelementptr i8, ptr %frame, i64 {call.place}",
                f"  {mask}_ia = ptrtoint ptr {mask}_io to i64",
                *self._function(
                    f"{mask}_r", call.function, call.site, lanes, f"{mask}_ia", call.argument,
                    call.outputs_at if call.outputs else 0,
                ),
                f"  {mask}_s = icmp ne i64 {mask}_r, 0",
                f"  br i1 {mask}_s, label %y{n}_{k}, label %{after}",
                f"y{n}_{k}:",
                f"  store i64 {self.pcs[after]}, ptr %pc_at",
                f"  ret i64 {mask}_r",
            ]  # fmt: skip
            self._unreachable(after, last)
            return
        out.append(f"  br label %{after}")
        self._unreachable(after, last)

    def _unreachable(self, after: str, last: bool) -> None:
        """A call ends its block; `_call` of the next one begins with a jump that nobody reaches."""
        if not last:
            self.out.append(f"u{after}:")

    def _function(
        self, result: str, name: str, site: int, lanes: str, io: str, a: int | str, b: int | str
    ) -> list[str]:
        arguments = f"i64 %warp_address, i64 {site}, i64 {lanes}, i64 {io}, i64 {a}, i64 {b}"
        return [f"  {result} = call i64 %fn_{name}({arguments})"]

    def _fall_through(self, segment: Segment) -> None:
        """To the next block: at once where all lanes run, else by way of `branch`."""
        n = segment.number
        if n + 1 == len(self.segments):
            self.out.append(f"  ret i64 {layout.FAULTED}")
        elif self.segments[n + 1].label:
            self._jump(n, f"s{n + 1}", f"s{n + 1}", None)
        else:
            self.out.append(f"  br label %s{n + 1}")

    def _end(self, segment: Segment, taken: str | None) -> None:
        n, s = segment.number, segment.end
        assert s is not None
        if s.name in ("ret", "exit"):
            self._leave(n, taken)
            return
        if s.name == "trap":
            raise UnsupportedError(f"the emulator does not know the instruction {s.text!r}")
        target = next(each for each in self.segments if each.label == s.operands[0])
        self._jump(n, f"s{target.number}", f"s{n + 1}" if taken else f"s{target.number}", taken)

    def _leave(self, n: int, taken: str | None) -> None:
        lanes = f"%m64_{n}"
        if taken:
            self.out.append(f"  %lanes{n} = zext i32 %taken{n}_n to i64")
            raise UnsupportedError("the emulator does not know a predicated `ret`")
        self.out += [
            *self._function(f"%f{n}", "leave", 0, lanes, "0", 0, 0),
            f"  %z{n} = icmp ne i64 %f{n}, 0",
            f"  br i1 %z{n}, label %x{n}, label %dispatch",
            f"x{n}:",
            f"  ret i64 %f{n}",
        ]

    def _jump(self, n: int, target: str, other: str, taken: str | None) -> None:
        """To `target` with the lanes that take the branch, to `other` with the rest."""
        out = self.out
        lanes = f"%taken{n}_n" if taken else f"%m{n}"
        out += [
            f"  %live{n} = load i64, ptr %live_at",
            f"  %whole{n} = icmp eq i64 %live{n}, %m64_{n}",
            f"  %all{n} = icmp eq i32 {lanes}, %m{n}",
            f"  %none{n} = icmp eq i32 {lanes}, 0",
            f"  %one{n} = or i1 %all{n}, %none{n}",
            f"  %fast{n} = and i1 %one{n}, %whole{n}",
            f"  br i1 %fast{n}, label %a{n}, label %b{n}",
            f"b{n}:",
            f"  %lanes{n} = zext i32 {lanes} to i64",
            *self._function(f"%g{n}", "branch", 0, f"%lanes{n}", "0", self.pcs[target], self.pcs[other]),
            "  br label %dispatch",
            f"a{n}:",
        ]
        if int(target[1:]) > n:
            out.append(f"  br i1 %all{n}, label %{target}, label %{other}")
            return
        # a loop costs time, so that one that never ends is interrupted
        out += [
            f"  br i1 %all{n}, label %back{n}, label %{other}" if taken else f"  br label %back{n}",
            f"back{n}:",
            f"  %fa{n} = load i64, ptr %fuel_at",
            f"  %fb{n} = sub i64 %fa{n}, 1",
            f"  store i64 %fb{n}, ptr %fuel_at",
            f"  %fc{n} = icmp sle i64 %fb{n}, 0",
            f"  br i1 %fc{n}, label %stop{n}, label %{target}",
            f"stop{n}:",
            f"  store i64 {self.pcs[target]}, ptr %pc_at",
            f"  ret i64 {layout.PREEMPTED}",
        ]
