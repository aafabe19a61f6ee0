"""PTX instructions as data: the parser makes them, and every other part of the simulator reads them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Reg:
    """A register, or a special register such as %tid.x. Names are unique within a kernel."""

    name: str


@dataclass(frozen=True, slots=True)
class Imm:
    """An immediate: `value` is a Python int. For 0f/0d literals it is the bit pattern and `is_float` is True."""

    value: int
    is_float: bool = False


@dataclass(frozen=True, slots=True)
class Sym:
    """The address of a variable (shared, param, global, const) plus a byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Mem:
    """[base + offset]. `coords` is set for tensor accesses: [%rd17, {%r1, %r2}]."""

    base: Reg | Sym | Imm
    offset: int = 0
    coords: tuple[Reg | Imm, ...] | None = None


@dataclass(frozen=True, slots=True)
class Vec:
    """{a, b, ...}; an item that PTX writes as _ is None."""

    items: tuple[Reg | Imm | Sym | None, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """a|b: two destinations, as in `setp ... %p1|%p2` or `elect.sync %r1|%p2`; _ is None."""

    first: Reg | None
    second: Reg | None


@dataclass(frozen=True, slots=True)
class Not:
    """!%p as a source operand (setp.and, selp and their kin)."""

    reg: Reg


@dataclass(frozen=True, slots=True)
class Label:
    """A branch target."""

    name: str


Operand = Reg | Imm | Sym | Mem | Vec | Pair | Not | Label | None


@dataclass(slots=True)
class Instr:
    """One PTX instruction.

    `parts` is the opcode split at dots, '::' kept: ('cp', 'async', 'bulk', 'tensor', '2d', 'shared::cta', ...).
    `line` counts from 1 in the PTX text; `source` is 'file:line' from .loc where line information was compiled in.
    """

    index: int
    opcode: str
    parts: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Reg | None = None
    guard_negated: bool = False
    line: int = 0
    source: str | None = None
    text: str = ""
    # For a load: bit i is set if byte i is used (.pragma "used_bytes_mask"); None: all.
    used_bytes: int | None = None
    plan: object = field(default=None, init=False, repr=False, compare=False)  # its handler's cache

    def has(self, part: str) -> bool:
        """Whether the opcode carries this modifier, e.g. ins.has('sync')."""
        return part in self.parts

    @property
    def membermask(self) -> Operand:
        """A .sync instruction's last operand, which names the lanes that must execute it together."""
        return self.operands[-1]


@dataclass(slots=True)
class Param:
    """A kernel parameter: its byte offset in the parameter buffer, size and alignment, its elements' type ("u64")."""

    name: str
    offset: int
    size: int
    align: int
    kind: str = field(default="", compare=False)


@dataclass(slots=True)
class Variable:
    """A module- or function-scope variable. `space` is 'shared', 'global', 'const', 'local' or
    'param' (argument and return buffers of calls).

    size 0 marks `extern .shared` (dynamic shared memory). `init` is the initial bytes, or None. kind: of its elements.
    """

    name: str
    space: str
    size: int
    align: int
    init: bytes | None = None
    kind: str = field(default="", compare=False)


@dataclass(slots=True)
class Kernel:
    """One .entry: instructions in textual order, labels as instruction indices."""

    name: str
    params: list[Param]
    registers: dict[str, int]  # name -> bits: 1 (predicate), 8, 16, 32, 64, 128
    instrs: list[Instr]
    labels: dict[str, int]
    variables: dict[str, Variable] = field(default_factory=dict)
    reqntid: tuple[int, int, int] | None = None
    maxntid: tuple[int, int, int] | None = None
    bounds_registers: bool = False  # .maxnreg or .minnctapersm says how many registers a thread has
    cluster_dims: tuple[int, int, int] | None = None
    max_cluster_rank: int | None = None
    blocks_are_clusters: bool = False
    branch_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)  # .branchtargets for brx.idx


@dataclass(slots=True)
class PtxModule:
    """A parsed PTX module."""

    version: str
    target: str
    kernels: dict[str, Kernel]
    variables: dict[str, Variable] = field(default_factory=dict)
    functions: dict[str, Kernel] = field(default_factory=dict)  # .func with a body
    text: str = field(default="", repr=False)
