"""16-byte vectors of a row in global memory, whatever the row's alignment. Device side.

A row of n elements is cut at the 16-byte boundaries of memory. The head, less than a vector's worth of elements, lies
before the first boundary; whole vectors follow; the tail, again less than a vector's worth, lies after the last. Whole
vectors are moved 16 bytes at a time. Head and tail together are fewer than two vectors; each of their elements belongs
to one thread and is its ``Edge``. If every row starts and ends on a boundary, there are no edges and no code for them.

Nothing outside the row is read or written.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from warpspec.common.hardware import VECTOR_BYTES
from warpspec.softmax.problem import WIDTHS

WORDS = 4  # 32-bit words of a vector
# A word of two elements of -inf (one in fp32).
MINUS_INFINITY = {"float32": 0xFF800000, "float16": 0xFC00FC00, "bfloat16": 0xFF80FF80}
TYPES = {"float32": cutlass.Float32, "float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}
PAIRS = {"float16": "f16x2", "bfloat16": "bf16x2"}  # PTX types of the two elements of a word
HIGH_HALF = -0x10000  # mask of a word
HALF_BITS = 16

# Cache hints, as PTX suffixes. PLAIN is the fastest even for data that is read once (on an H200; L1::no_allocate is
# not). LAST, evict-first, is for data that is not read again while other data should stay in L2.
PLAIN = ""
LAST = ".cs"
STORES = {16: ("v4.b32", 4), 8: ("v2.b32", 2), 4: ("b32", 1), 2: ("b16", 1)}  # by bytes: PTX type, words


def elements(dtype: str) -> int:
    """Elements of ``dtype`` in a vector."""
    return VECTOR_BYTES // WIDTHS[dtype]


@dataclass(frozen=True)
class RowSpan:
    """The place of a row in memory; all accesses to the row need it.

    address: address of element 0, in bytes. head, vectors, tail: numbers of elements, vectors, elements. first: address
    of the first vector, a 16-byte boundary.
    """

    address: Int64
    first: Int64
    head: Int32
    vectors: Int32
    tail: Int32


@cute.jit
def row_span(tensor: cute.Tensor, row, dtype: cutlass.Constexpr, edges: cutlass.Constexpr) -> RowSpan:
    """The ``RowSpan`` of row ``row`` of tensor (ROW, ELEMENT), whose elements are contiguous."""
    width, per_vector = WIDTHS[dtype], elements(dtype)
    length = tensor.shape[1]
    address = tensor.iterator.toint() + Int64(row) * Int64(tensor.stride[0]) * width
    first, head, tail = address, Int32(0), Int32(0)
    vectors = length // per_vector
    if cutlass.const_expr(edges):
        past = Int32(address % VECTOR_BYTES) // width
        head = cutlass.min((per_vector - past) % per_vector, length)
        vectors = (length - head) // per_vector
        tail = length - head - vectors * per_vector
        first = address + Int64(head * width)
    return RowSpan(address, first, head, vectors, tail)


@cute.jit
def share_in_cluster(row: RowSpan, cluster: cutlass.Constexpr, step: cutlass.Constexpr = 1) -> tuple:
    """(begin, end) of the CTA's vectors of a row that its cluster shares; there are none unless begin < end. step:
    shares but the last are a multiple of this many vectors."""
    begin, end = Int32(0), row.vectors
    if cutlass.const_expr(cluster > 1):
        share = cute.ceil_div(cute.ceil_div(row.vectors, cluster), step) * step
        begin = cute.arch.block_idx_in_cluster() * share
        end = cutlass.min(begin + share, row.vectors)
    return begin, end


@dataclass(frozen=True)
class Edge:
    """The element of head or tail that a thread has, if it has one. offset: in bytes from the row's start."""

    present: Boolean
    offset: Int32


@cute.jit
def edge_of(row: RowSpan, thread, dtype: cutlass.Constexpr) -> Edge:
    """A thread's edge: threads 0, 1, ...

    have the head's elements; threads from a vector's length on have the tail's.
    """
    width, per_vector = WIDTHS[dtype], elements(dtype)
    in_tail = Boolean(thread >= per_vector)
    index = Int32(cutlass.select_(in_tail, thread - per_vector, thread))
    count = Int32(cutlass.select_(in_tail, row.tail, row.head))
    start = Int32(cutlass.select_(in_tail, row.head + row.vectors * per_vector, Int32(0)))
    return Edge(Boolean(index < count), (start + index) * width)


@cute.jit
def edge_in_group(row: RowSpan, thread, threads: cutlass.Constexpr, rank, dtype: cutlass.Constexpr) -> Edge:
    """``edge_of`` if several CTAs of ``threads`` threads share the row: CTA ``rank`` 0 has all of its edges."""
    return edge_of(row, thread + Int32(cutlass.select_(Boolean(rank == 0), 0, threads)), dtype)


@cute.jit
def load_edge(row: RowSpan, edge: Edge, dtype: cutlass.Constexpr) -> Float32:
    """The edge's element, or -inf if there is none."""
    value = -Float32.inf
    if edge.present:
        pointer = cute.make_ptr(TYPES[dtype], row.address + edge.offset, cute.AddressSpace.gmem)
        value = cute.make_tensor(pointer, cute.make_layout(1))[0].to(Float32)
    return value


@cute.jit
def store_edge(row: RowSpan, edge: Edge, value: Float32, dtype: cutlass.Constexpr):
    """Write the edge's element, if there is one."""
    if edge.present:
        pointer = cute.make_ptr(TYPES[dtype], row.address + edge.offset, cute.AddressSpace.gmem)
        cute.make_tensor(pointer, cute.make_layout(1))[0] = value.to(TYPES[dtype])


def load_vector(words: cute.Tensor, address, offset: int, present, dtype: str, hint: str) -> None:
    """Load the 16 bytes at ``address`` + ``offset`` to words (WORDS) Int32; elements of -inf unless ``present``.

    It is one predicated instruction, so that several loads need no branches between them.
    """
    fill = MINUS_INFINITY[dtype]
    outputs = ", ".join(f"{{$w{i}}}" for i in range(WORDS))
    fills = " ".join(f"@!here mov.b32 {{$w{i}}}, {fill:#x};" for i in range(WORDS))
    loaded = cute.arch.inline_ptx(
        "{ .reg .pred here; setp.ne.b32 here, {$r1}, 0; "
        f"@here ld.global{hint}.v4.b32 {{{outputs}}}, [{{$r0}}+{offset}]; {fills} }}",
        write_only_types=[Int32] * WORDS,
        read_only_args=[address, Int32(present)],
    )
    for i in range(WORDS):
        words[i] = loaded[i]


def unpack(word: Int32, dtype: str) -> list:
    """The one or two elements of a word, as Float32."""
    if dtype == "float32":
        return [word.bitcast(Float32)]
    if dtype == "bfloat16":
        return [(word << HALF_BITS).bitcast(Float32), (word & HIGH_HALF).bitcast(Float32)]
    return list(
        cute.arch.inline_ptx(
            "{ .reg .b16 low_half, high_half; mov.b32 {low_half, high_half}, {$r0}; "
            "cvt.f32.f16 {$w0}, low_half; cvt.f32.f16 {$w1}, high_half; }",
            write_only_types=[Float32, Float32],
            read_only_args=[word],
        )
    )


def as_float(words: cute.Tensor, dtype: str) -> cute.Tensor:
    """The elements of packed ``words`` (WORDS, ...) in new fp32 registers."""
    packed = cute.recast_tensor(words, TYPES[dtype])
    values = cute.make_rmem_tensor(packed.layout, Float32)
    values.store(packed.load().to(Float32))
    return values


def forget(words: cute.Tensor) -> None:
    """Hide from the compiler that words (WORDS, ...) Int32 are unchanged.

    It would otherwise keep what it computed from them, which takes twice as many registers, for the next use.
    """
    for i in range(cute.size(words)):
        words[i] = cute.arch.inline_ptx(
            "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[words[i]]
        )


def store_vector(words: cute.Tensor, address, offset: int, present, store_bytes: int, hint: str) -> None:
    """Store words (WORDS) Int32 to ``address`` + ``offset`` if ``present``, by stores of ``store_bytes``."""
    kind, count = STORES[store_bytes]
    stores = []
    for start in range(0, VECTOR_BYTES, store_bytes):
        first = start // 4
        if kind == "b16":
            value = f"{'high' if start % 4 else 'low'}{first}"
        elif count == 1:
            value = f"{{$r{2 + first}}}"
        else:
            value = "{" + ", ".join(f"{{$r{2 + first + i}}}" for i in range(count)) + "}"
        stores.append(f"@here st.global{hint}.{kind} [{{$r0}}+{offset + start}], {value};")
    halves = ""
    if kind == "b16":
        halves = "".join(
            f" .reg .b16 low{i}, high{i}; mov.b32 {{low{i}, high{i}}}, {{$r{2 + i}}};" for i in range(WORDS)
        )
    cute.arch.inline_ptx(
        "{ .reg .pred here; setp.ne.b32 here, {$r1}, 0;" + halves + " " + " ".join(stores) + " }",
        read_only_args=[address, Int32(present), *(words[i] for i in range(WORDS))],
    )


def read_shared(vectors: cute.Tensor, index) -> cute.Tensor:
    """Load vector ``index`` of vectors (WORDS, VECTOR) Int32 from shared memory to registers."""
    words = cute.make_rmem_tensor(WORDS, Int32)
    cute.autovec_copy(vectors[None, index], words)
    return words


def blank(words: cute.Tensor, present, dtype: str) -> None:
    """Replace words (WORDS) by elements of -inf unless ``present``."""
    fill = Int32(cutlass.Uint32(MINUS_INFINITY[dtype]))
    for i in range(WORDS):
        words[i] = Int32(cutlass.select_(Boolean(present), words[i], fill))
