"""Compiled programs: PTX in, the address of machine code out, kept in Triton's cache."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from llvmlite import binding as llvm

from .ptx import Parameter, parse
from .translate import Translation, translate

_OPTIMISATION = 0
"""LLVM compiles faster than the programs run: at 1 it needs five times as long."""


@dataclass
class Program:
    """A kernel as machine code.

    Args:
        frame_bytes: of memory that each warp needs. address: of the function.
        shared_bytes: the smallest piece of shared memory that an instruction accesses.
        cached: whether an earlier process compiled it.
    """

    name: str
    ptx: str
    parameters: list[Parameter]
    parameter_bytes: int
    threads: int
    frame_bytes: int
    shared_bytes: int
    cached: bool
    address: int = 0
    keep: Any = field(default=None, repr=False)

    @cached_property
    def translation(self) -> Translation:
        """Instructions and lines, which only the report of a fault needs."""
        return translate(parse(self.ptx))

    def place(self, statement: Any) -> str:
        """``file.py:12`` of a statement."""
        return parse(self.ptx).place(statement.places)


@cache
def _version() -> str:
    """Changes with the emulator, the compiler and the CPU."""
    texts = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    texts.append((Path(__file__).parent / "runtime" / "functions.py").read_bytes())
    host = f"{llvm.llvm_version_info} {llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"
    return hashlib.sha256(b"".join(texts) + host.encode()).hexdigest()


def _key(ptx: str) -> str:
    """Of the instructions alone: a kernel that moves in its file is the same."""
    text = re.sub(r"//[^\n]*|^\s*\.loc[^\n]*$", "", ptx.split("$L__func_end0")[0], flags=re.M)
    return hashlib.sha256((_version() + re.sub(r"\s+", " ", text)).encode()).hexdigest()


@cache
def _target() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple()


def _machine() -> Any:
    features = llvm.get_host_cpu_features().flatten()
    return _target().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features, opt=_OPTIMISATION, reloc="pic"
    )


def compile_program(ptx: str) -> Program:
    """The program of a PTX module, from the cache where it is there."""
    from triton.runtime.cache import get_cache_manager

    manager = get_cache_manager(_key(ptx))
    path = manager.get_file("program")
    if path is not None:
        head, _, code = Path(path).read_bytes().partition(b"\n")
        fields = json.loads(head)
        fields["parameters"] = [Parameter(**each) for each in fields["parameters"]]
        return _loaded(Program(ptx=ptx, cached=True, **fields), code)
    kernel = parse(ptx)
    translation = translate(kernel)
    _target()
    module = llvm.parse_assembly(translation.text)
    code = _machine().emit_object(module)
    fields = {
        "name": kernel.name, "parameters": [asdict(each) for each in kernel.parameters],
        "parameter_bytes": kernel.parameter_bytes, "threads": kernel.threads,
        "frame_bytes": translation.frame_bytes, "shared_bytes": translation.shared_bytes,
    }  # fmt: skip
    manager.put(json.dumps(fields).encode() + b"\n" + code, "program")
    fields["parameters"] = kernel.parameters
    return _loaded(Program(ptx=ptx, cached=False, **fields), code)


def _loaded(program: Program, code: bytes) -> Program:
    _target()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    program.address, program.keep = engine.get_function_address("program"), engine
    return program
