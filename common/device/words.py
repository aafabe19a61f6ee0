"""32-bit words: loads and stores of several, and instructions on registers that the DSL has no function for."""

from __future__ import annotations

from cutlass import Int32, Int64, Uint8, Uint16, Uint32, cute

from warpspec.common.hardware import VECTOR_BYTES, WORD_BYTES

VECTOR_WORDS = VECTOR_BYTES // WORD_BYTES


def permute(word: Uint32, order: int) -> Uint32:
    """Select bytes of ``word`` and of a zero word after it, by the nibbles of ``order`` (prmt)."""
    return cute.arch.inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, 0, {order:#x};", write_only_types=[Uint32], read_only_args=[word]
    )


def interleave(low: Uint32, high: Uint32, order: int) -> Uint32:
    """Select bytes of two words, of which ``high``'s are numbers 4 to 7, by the nibbles of ``order`` (prmt)."""
    return cute.arch.inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {order:#x};",
        write_only_types=[Uint32],
        read_only_args=[low, high],
    )


def multiply_bf16x2(pair: Uint32, factor: Uint32) -> Uint32:
    """Multiply two pairs of bf16."""
    return cute.arch.inline_ptx(
        "mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[pair, factor]
    )


def multiply_add_bf16x2(pair: Uint32, factor: Uint32, added: Uint32) -> Uint32:
    """Multiply two pairs of bf16 and add a third, rounding once."""
    return cute.arch.inline_ptx(
        "fma.rn.bf16x2 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Uint32],
        read_only_args=[pair, factor, added],
    )


def shuffle_address(address: Int64, source) -> Int64:
    """The 64-bit number of another lane."""
    low = Uint32(cute.arch.shuffle_sync(Uint32(address & Int64(0xFFFFFFFF)), source))
    high = Uint32(cute.arch.shuffle_sync(Uint32((address >> Int64(32)) & Int64(0xFFFFFFFF)), source))
    return (Int64(high) << Int64(32)) | Int64(low)


def load_words(row: cute.Tensor, first, count: int) -> cute.Tensor:
    """Load ``count`` words of row (WORD) by the widest accesses. first: index of the first, a multiple of count."""
    words = cute.make_rmem_tensor(count, Uint32)
    step = min(count, VECTOR_WORDS)
    for part in range(count // step):
        source = cute.local_tile(row, (step,), (first // step + part,))
        cute.autovec_copy(source, cute.local_tile(words, (step,), (part,)))
    return words


def load_present(
    address: Int64, present, count: int, *, missing: int = 0, offset: int = 0, cached: str = ""
) -> list:
    """Load ``count`` words, 1, 2 or 4, of global memory at an address, a multiple of their size, and ``offset`` bytes.
    They are ``missing`` if not present (a Boolean or Int32). cached: cache operators of the instruction.

    What stands for missing words is there before the load: a selection behind the load would wait for it.
    """
    names = [f"{{$w{i}}}" for i in range(count)]
    vector, target = (f".v{count}", "{" + ", ".join(names) + "}") if count > 1 else ("", names[0])
    defaults = " ".join(f"mov.b32 {name}, {missing};" for name in names)
    place = f"at+{offset}" if offset else "at"
    found = cute.arch.inline_ptx(
        "{ .reg .pred here; .reg .b64 at; mov.b64 at, {$r0}; setp.ne.b32 here, {$r1}, 0; "
        f"{defaults} @here ld.global{cached}{vector}.b32 {target}, [{place}]; }}",
        write_only_types=[Uint32] * count,
        read_only_args=[address, Int32(present)],
    )
    return [found] if count == 1 else list(found)


def load_present_byte(address: Int64, present) -> Uint32:
    """Load a byte of global memory; 0 if not present (a Boolean or Int32)."""
    return cute.arch.inline_ptx(
        "{ .reg .pred here; setp.ne.b32 here, {$r1}, 0; mov.b32 {$w0}, 0; @here ld.global.u8 {$w0}, [{$r0}]; }",
        write_only_types=[Uint32],
        read_only_args=[address, Int32(present)],
    )


def store_present(address: Int64, present, words: list) -> None:
    """Store four words to global memory at an address, a multiple of their size, if present (a Boolean or Int32)."""
    names = ", ".join(f"{{$r{2 + i}}}" for i in range(VECTOR_WORDS))
    cute.arch.inline_ptx(
        "{ .reg .pred here; setp.ne.b32 here, {$r1}, 0; @here st.global.v4.b32 [{$r0}], {" + names + "}; }",
        read_only_args=[address, Int32(present), *words],
    )


def store_words(row: cute.Tensor, first, words: list) -> None:
    """Store words to row (WORD). first: index of the first, a multiple of their number."""
    step = min(len(words), VECTOR_WORDS)
    vector = cute.make_rmem_tensor(step, Uint32)
    for part in range(len(words) // step):
        for i in range(step):
            vector[i] = words[part * step + i]
        cute.autovec_copy(vector, cute.local_tile(row, (step,), (first // step + part,)))


def scaled_pair(pair: Uint32, factor: int, kind: str) -> Uint32:
    """Multiply two 16-bit numbers with a constant. factor: its bits. kind: "bf16x2" or "f16x2"."""
    return cute.arch.inline_ptx(
        f"{{ .reg .b32 factor; mov.b32 factor, {factor << 16 | factor:#x}; mul.rn.{kind} {{$w0}}, {{$r0}}, factor; }}",
        write_only_types=[Uint32],
        read_only_args=[pair],
    )


def load_shared(address, count: int = VECTOR_WORDS) -> cute.Tensor:
    """(count): words of shared memory at an address that is aligned to their size, at most 16 bytes."""
    words = cute.make_rmem_tensor(count, Uint32)
    cute.autovec_copy(shared_vector(address, count), words)
    return words


def load_shared_byte(address) -> Uint32:
    """A byte of shared memory at an address."""
    return load_shared_number(address, Uint8)


def load_shared_half(address) -> Uint32:
    """Two bytes of shared memory at an even address."""
    return load_shared_number(address, Uint16)


def load_shared_number(address, dtype) -> Uint32:
    """An unsigned number of shared memory at an address."""
    pointer = cute.make_ptr(dtype, Int32(address), cute.AddressSpace.smem)
    return Uint32(cute.make_tensor(pointer, cute.make_layout(1))[0])


def store_shared(address, words: list) -> None:
    """Store 16 bytes to shared memory at an address."""
    vector = cute.make_rmem_tensor(VECTOR_WORDS, Uint32)
    for i in range(VECTOR_WORDS):
        vector[i] = words[i]
    cute.autovec_copy(vector, shared_vector(address))


def shared_vector(address, count: int = VECTOR_WORDS) -> cute.Tensor:
    """(count): words of shared memory at an address."""
    align = count * WORD_BYTES
    pointer = cute.make_ptr(Uint32, Int32(address), cute.AddressSpace.smem, assumed_align=align)
    return cute.make_tensor(pointer, cute.make_layout(count))


def copy_async(target, source, size: int, wanted) -> None:
    """Begin to copy bytes from global to shared memory (cp.async). target, source: addresses, multiples of size, which
    is 4, 8 or 16. wanted: how many are read; zeros stand for the others."""
    cute.arch.inline_ptx(
        f"cp.async.ca.shared.global [{{$r0}}], [{{$r1}}], {size}, {{$r2}};",
        read_only_args=[Int32(target), Int64(source), Int32(wanted)],
    )
