"""Compiled forms of instructions: each is compiled once for all kernels, and kept on disk.

A form's name is a digest of its text and of what decides how it is compiled. Forms that are compiled together are one
object file; the index says which forms each file has.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import cache

import llvmlite
import llvmlite.binding as llvm

from warpspec.common.disk_cache import DiskCache
from warpspec.sim.codegen.emitter import Form
from warpspec.sim.codegen.layout import Stop
from warpspec.sim.codegen.support import LOGGING_TRAMPOLINE, RECORD, RESOLVE, TRAMPOLINE

OBJECTS = DiskCache("sim", limit=1 << 30)
INDEX = "index"  # JSON: form -> file that has it
SIGNATURE = "i32 @{name}(ptr %regs, ptr %ctx, i32 %mask, ptr %record)"
LEAVE = Form(f"  ret i32 -{int(Stop.EXIT)}\n}}\n", frozenset())  # the code of a block after the kernel's end

_addresses: dict[str, int] = {}  # addresses of the forms that this process has loaded
_files: dict[str, str] = {}  # form -> file, as read from the index
_loaded: set[str] = set()  # files
_engines: list = []  # own the code


def addresses(forms: Iterable[Form]) -> dict[Form, int]:
    """The address of each form's function: loaded, or compiled where this machine has not seen it."""
    named = {form: name_of(form) for form in forms}
    wanted = {name: form for form, name in named.items()}
    _provide(wanted)
    return {form: _addresses[name] for form, name in named.items()}


@cache
def trampoline(logging: bool) -> int:
    """The address of the function that runs blocks. logging: the variant whose native code logs its accesses."""
    text = LOGGING_TRAMPOLINE if logging else TRAMPOLINE
    name = _digest(text)
    _provide({name: text.replace("@run(", f"@{name}(")})
    return _addresses[name]


@cache
def _digest(text: str) -> str:
    return "f" + hashlib.sha256("\0".join((text, RESOLVE, RECORD, _host_id())).encode()).hexdigest()[:31]


def name_of(form: Form) -> str:
    """The name of a form's function: the same for the same code on the same kind of CPU."""
    return _digest("\0".join((form.text, *sorted(form.needs))))


def _provide(wanted: dict[str, Form | str]) -> None:
    """Load functions by name from object files, and compile those that no file has. wanted: form or text, by name."""
    missing = [name for name in wanted if name not in _addresses]
    if not missing:
        return
    if any(name not in _files for name in missing):
        _files.update(_index())
    for file in dict.fromkeys(_files[name] for name in missing if name in _files):
        if file not in _loaded:
            code = OBJECTS.read(file)
            if code is not None:
                _load(file, code, [name for name, other in _files.items() if other == file])
    missing = [name for name in missing if name not in _addresses]
    if missing:
        file = f"forms-{hashlib.sha256(' '.join(sorted(missing)).encode()).hexdigest()[:32]}.o"
        code = _compile({name: wanted[name] for name in missing})
        _load(file, code, missing)
        OBJECTS.write(file, code)
        with OBJECTS.making(INDEX):
            _files.update(dict.fromkeys(missing, file))
            kept = {name: other for name, other in (_index() | _files).items() if other in OBJECTS}
            OBJECTS.write(INDEX, json.dumps(kept).encode())


def _index() -> dict[str, str]:
    data = OBJECTS.read(INDEX)
    return {} if data is None else json.loads(data)


def _compile(wanted: dict[str, Form | str]) -> bytes:
    """Compile functions to an object file."""
    needs: set[str] = set()
    functions = []
    for name, form in wanted.items():
        if isinstance(form, str):
            functions.append(form)
        else:
            needs |= form.needs
            functions.append(f"define {SIGNATURE.format(name=name)} {{\n{form.text}")
    text = "\n".join([RESOLVE, RECORD, *sorted(needs), *functions])
    return _target_machine().emit_object(llvm.parse_assembly(text))


def _load(file: str, code: bytes, names: Iterable[str]) -> None:
    # The engine owns its target machine: a shared one would be freed with the first engine that goes.
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    _loaded.add(file)
    for name in names:
        address = engine.get_function_address(name)
        if address:
            _addresses[name] = address


def _target_machine():
    """A new target machine; an execution engine owns the one it is given."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=1,
        codemodel="large",
        jit=True,
    )


@cache
def _host_id() -> str:
    return (
        f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()} llvmlite {llvmlite.__version__}"
    )
