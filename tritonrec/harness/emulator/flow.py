"""What happens between segments: the function's beginning, calls of the runtime, branches and ends."""

from __future__ import annotations

from . import layout
from .calls import Call
from .faults import UnsupportedError
from .runtime.functions import NAMES
from .segments import Segment


class Flow:
    """LLVM's text as it grows.

    Args:
        pcs: the number of each place in the program by its label: ``s3`` a segment, ``c3_0`` its first call.
    """

    def __init__(self, segments: list[Segment]):
        self.segments = segments
        self.out: list[str] = []
        self.pcs: dict[str, int] = {}

    def head(self, body: str) -> list[str]:
        """The fields of the warp, its block and its launch, and the `switch`; for what `body` uses."""

        def loaded(name: str, record: str, number: int, bits: int = 64) -> list[str]:
            wide = f"{name}_w" if bits == 32 else name
            found = [
                f"  {name}_p = getelementptr i64, ptr {record}, i64 {number}",
                f"  {wide} = load i64, ptr {name}_p",
            ]
            return [*found, f"  {name} = trunc i64 {wide} to i32"] if bits == 32 else found

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

    def call(self, segment: Segment, k: int, call: Call, masked: bool) -> None:
        """One call and the way to what follows; `masked`: a mask of lanes is in its buffer."""
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
                    f"  {mask}_h = getelementptr i8, ptr %frame, i64 {call.place + layout.IO_MASK}",
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

    def fall_through(self, segment: Segment) -> None:
        """To the next block: at once where all lanes run, else by way of `branch`."""
        n = segment.number
        if n + 1 == len(self.segments):
            self.out.append(f"  ret i64 {layout.FAULTED}")
        elif self.segments[n + 1].label:
            self._jump(n, f"s{n + 1}", f"s{n + 1}", None)
        else:
            self.out.append(f"  br label %s{n + 1}")

    def end(self, segment: Segment, taken: str | None) -> None:
        """A branch or an end behind a segment; `taken`: the predicate of a branch."""
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
