"""The SASS of a kernel: ptxas assembles its PTX, nvdisasm gives each instruction and its PTX line.

Neither needs a GPU. Both come as wheels (``pip install warpspec[clocks]``) or with a CUDA toolkit. The control word of
an instruction says for how many clocks its warp issues nothing after it (stall), which of six scoreboards its results
fill or its operands free, and for which it waits (Huerta et al., arXiv 2503.20481).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

SCOREBOARDS = 6
NO_SCOREBOARD = 7
STALL, WRITE, READ, WAITS = (
    (105 - 64, 15),
    (110 - 64, 7),
    (113 - 64, 7),
    (116 - 64, 63),
)  # (shift, mask) in word 1
LINE = re.compile(r'//## File "[^"]*", line (\d+)')
LABEL = re.compile(r"\s*(\.L_x_\d+):")
CODE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s+/\* 0x[0-9a-f]{16} \*/")
CONTROL = re.compile(r"\s*/\* (0x[0-9a-f]{16}) \*/\s*$")
SECTION = re.compile(r"\s*\.section\s+\.text\.([^,\s]+)")
INTERNAL = re.compile(r"\s*\$__internal[^:]*:")
TARGET = re.compile(r"`\((\.L_x_\d+)\)")
RELEASE = re.compile(r"Cuda compilation tools, release [\d.]+, V([\d.]+)")
SECONDS = 120  # time that ptxas may take


class NoSass(RuntimeError):
    """No SASS of this kernel is available: a tool is missing, or rejects its PTX."""


@dataclass(frozen=True, slots=True)
class SassInstr:
    """One instruction. line: line of the PTX text. name: its opcode with modifiers. guarded: whether it has a
    predicate.

    stall: clocks until the warp's next instruction. writes, reads: the scoreboard of its results, of its operands
    (NO_SCOREBOARD: none). waits: a bitset of scoreboards. target: the label that it branches to. label: its own.
    """

    address: int
    line: int
    name: str
    text: str
    guarded: bool
    stall: int
    writes: int
    reads: int
    waits: int
    target: str | None
    label: str | None


@dataclass(frozen=True)
class Sass:
    """A kernel's instructions in order of address, and which ptxas made them."""

    instrs: tuple[SassInstr, ...]
    assembler: str


def tool(name: str) -> str:
    """The path of ptxas or nvdisasm: in the environment's variable (WARPSPEC_PTXAS, WARPSPEC_NVDISASM), of NVIDIA's
    wheels, or on the PATH. NoSass if there is none."""
    named = os.environ.get(f"WARPSPEC_{name.upper()}")
    if named:
        return named
    for folder in sys.path:
        for found in Path(folder or ".").glob(f"nvidia/*/bin/{name}"):
            return str(found)
    found = shutil.which(name)
    if found is None:
        raise NoSass(f"{name} was not found: pip install warpspec[clocks], or set WARPSPEC_{name.upper()}")
    return found


@lru_cache(maxsize=8)
def _version(path: str) -> str:
    text = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"V([\d.]+)", text)
    return found[1] if found else "?"


def sass_of(ptx: str, kernel: str, target: str) -> Sass:
    """The SASS of one kernel of a PTX module. NoSass if a tool is missing or fails."""
    try:
        text, assembler = _disassemble(ptx, target)
    except (subprocess.SubprocessError, OSError) as error:
        detail = getattr(error, "stderr", None) or error
        raise NoSass(f"ptxas or nvdisasm failed: {str(detail)[:200]}") from error
    instrs = parse(text, kernel)
    if not instrs:
        raise NoSass(f"the disassembly has no code of {kernel}")
    return Sass(tuple(instrs), assembler)


@lru_cache(maxsize=8)
def _disassemble(ptx: str, target: str) -> tuple[str, str]:
    ptxas, nvdisasm = tool("ptxas"), tool("nvdisasm")
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        options = {"capture_output": True, "text": True, "check": True, "timeout": SECONDS}
        subprocess.run(
            [ptxas, f"-arch={target}", "-O3", "-lineinfo", str(source), "-o", str(cubin)], **options
        )
        text = subprocess.run([nvdisasm, "-c", "-hex", "-gp", str(cubin)], **options).stdout
    version = _version(ptxas)
    wanted = RELEASE.search(ptx)
    other = f" (the PTX is of {wanted[1]})" if wanted and wanted[1] != version else ""
    return text, f"ptxas {version}{other}"


def parse(text: str, kernel: str) -> list[SassInstr]:
    """The instructions of one kernel in the output of ``nvdisasm -c -hex -gp``."""
    found: list[SassInstr] = []
    line, label, here, first = 0, None, False, None
    for row in text.splitlines():
        if match := SECTION.match(row):
            here, line, label, first = match[1] == kernel, 0, None, None
        elif not here:
            continue
        elif INTERNAL.match(row):  # subroutines for rare numbers
            here = False
        elif match := LINE.search(row):
            line = int(match[1])
        elif match := LABEL.match(row):
            label = match[1]
        elif match := CODE.match(row):
            first = (int(match[1], 16), match[2])
        elif first is not None and (match := CONTROL.match(row)):
            found.append(_instruction(*first, int(match[1], 16), line, label))
            label, first = None, None
    return found


def _instruction(address: int, text: str, word: int, line: int, label: str | None) -> SassInstr:
    words = text.split()
    guarded = words[0].startswith("@")
    name = words[1] if guarded else words[0]
    branch = TARGET.search(text)

    def field(place: tuple[int, int]) -> int:
        return word >> place[0] & place[1]

    target = branch[1] if branch else None
    return SassInstr(
        address,
        line,
        name,
        text,
        guarded,
        field(STALL),
        field(WRITE),
        field(READ),
        field(WAITS),
        target,
        label,
    )
