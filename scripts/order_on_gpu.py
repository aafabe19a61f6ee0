"""Runs on a Hopper GPU what the order checker says hardware tolerates, and what it reports, and counts what goes wrong.

    python scripts/order_on_gpu.py [--rounds N]

Two questions of docs/notebook/checker.md ("What hardware gives beyond the ISA's text"):

- exit: CTAs fill their shared memory, begin bulk copies (or reductions) of all of it to global memory, and exit without
  a wait. The next CTA on the SM fills the same memory. A word that is not the CTA's own shows that the memory was given
  away too early. The control overwrites its own memory behind the copies, and must be wrong.
- scope: one CTA of a cluster writes and arrives on the other's mbarrier, by an arrival without a scope or by
  `.release.cluster`; the other CTA reads after its wait. Counted are words of an earlier round.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent / "microbench"))
from driver import SM_COUNT, Gpu

HEAD = ".version 8.6\n.target sm_90a\n.address_size 64\n"
CHUNK = 16384  # bytes of a bulk copy

EXIT = """
.extern .shared .align 128 .b8 memory[];
.visible .entry exits(.param .u64 out) .maxntid 1024, 1, 1 {
  .reg .pred %p; .reg .b32 %r<16>; .reg .b64 %rd<4>;
  mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, memory;
  ld.param.u64 %rd1, [out]; cvta.to.global.u64 %rd1, %rd1;
  mul.lo.u32 %r4, %r2, WORDS; mul.wide.u32 %rd2, %r2, BYTES; add.u64 %rd1, %rd1, %rd2;
  mov.u32 %r5, %r1;
fill:
  shl.b32 %r6, %r5, 2; add.u32 %r6, %r6, %r3; add.u32 %r7, %r4, %r5; st.shared.b32 [%r6], %r7;
  add.u32 %r5, %r5, 1024; setp.lt.u32 %p, %r5, WORDS; @%p bra fill;
  fence.proxy.async.shared::cta; bar.sync 0;
  setp.ne.u32 %p, %r1, 0; @%p bra issued;
COPIES
  cp.async.bulk.commit_group; WAIT
issued:
  AFTER
  ret;
}
"""
COPY = {
    "copy": "cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r3], {n};",
    "reduction": "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd1], [%r3], {n};",
}
STEP = " add.u64 %rd1, %rd1, {n}; add.u32 %r3, %r3, {n};"
OVERWRITE = """bar.sync 0; mov.u32 %r5, %r1; mov.u32 %r3, memory;
again: shl.b32 %r6, %r5, 2; add.u32 %r6, %r6, %r3; st.shared.b32 [%r6], 0xdeadbeef;
  add.u32 %r5, %r5, 1024; setp.lt.u32 %p, %r5, WORDS; @%p bra again; bar.sync 0;
  cp.async.bulk.wait_group 0;"""
# name: (instruction, bytes of shared memory, what follows the commit, what follows all)
EXITS = {
    "control: overwritten after the copies": ("copy", 12 * CHUNK, "", OVERWRITE),
    "control: waits": ("copy", 12 * CHUNK, "cp.async.bulk.wait_group.read 0;", ""),
    "copies, one CTA an SM": ("copy", 12 * CHUNK, "", ""),
    "copies, two CTAs an SM": ("copy", 6 * CHUNK, "", ""),
    "copies of 256 bytes": ("copy of 256", 12 * CHUNK, "", ""),
    "reductions, one CTA an SM": ("reduction", 12 * CHUNK, "", ""),
    "reductions, two CTAs an SM": ("reduction", 6 * CHUNK, "", ""),
}
CTAS = 20  # an SM

# Of a CTA; 32-bit words a thread writes a round; rounds of global memory.
THREADS, WORDS_EACH, SLOTS = (128, 32, 64)
SCOPE = """
.shared .align 128 .b8 data[BYTES];
.shared .align 8 .b64 full;
.shared .align 8 .b64 empty;
.visible .entry scope(.param .u64 wrong, .param .u64 source, .param .u64 slots, .param .u32 rounds)
  .reqnctapercluster 2, 1, 1 .maxntid 128, 1, 1 {
  .reg .pred %p, %q; .reg .b32 %r<40>; .reg .b64 %rd<16>;
  mov.u32 %r1, %tid.x; mov.u32 %r2, %cluster_ctarank; mov.u32 %r3, full; mov.u32 %r4, empty; mov.u32 %r5, data;
  ld.param.u64 %rd1, [wrong]; cvta.to.global.u64 %rd1, %rd1; ld.param.u32 %r6, [rounds];
  ld.param.u64 %rd2, [source]; cvta.to.global.u64 %rd2, %rd2; ld.param.u64 %rd3, [slots]; cvta.to.global.u64 %rd3, %rd3;
  mov.u32 %r7, %clusterid.x; mul.wide.u32 %rd4, %r7, SLOTBYTES; add.u64 %rd3, %rd3, %rd4;
  setp.ne.u32 %p, %r1, 0;
  @!%p mbarrier.init.shared.b64 [%r3], 128; @!%p mbarrier.init.shared.b64 [%r4], 128;
  @!%p fence.mbarrier_init.release.cluster;
  barrier.cluster.arrive; barrier.cluster.wait;
  mapa.shared::cluster.u32 %r8, %r3, 0; mapa.shared::cluster.u32 %r9, %r4, 1; mapa.shared::cluster.u32 %r10, %r5, 1;
  mapa.shared::cluster.u32 %r20, %r5, 0;
  mov.u32 %r11, 0; mov.u32 %r12, 0; shl.b32 %r13, %r1, 4;
  setp.ne.u32 %q, %r2, 1; @%q bra reader;
writer:
  setp.ge.u32 %p, %r11, %r6; @%p bra done;
  and.b32 %r15, %r11, SLOTMASK; mul.wide.u32 %rd5, %r15, BYTES; add.u64 %rd6, %rd3, %rd5; cvt.u64.u32 %rd7, %r13;
  add.u64 %rd6, %rd6, %rd7; add.u32 %r14, %r5, %r13; add.u32 %r21, %r20, %r13;
  mul.wide.u32 %rd8, %r11, 2048; add.u64 %rd8, %rd2, %rd8; add.u64 %rd8, %rd8, %rd7;
WRITES
  ARRIVE
  and.b32 %r16, %r11, 1;
wait_empty:
  mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p, [%r4], %r16; @!%p bra wait_empty;
  add.u32 %r11, %r11, 1; bra writer;
reader:
  setp.ge.u32 %p, %r11, %r6; @%p bra count;
  and.b32 %r16, %r11, 1;
wait_full:
  mbarrier.try_wait.parity.shared::cta.b64 %p, [%r3], %r16; @!%p bra wait_full;
  and.b32 %r15, %r11, SLOTMASK; mul.wide.u32 %rd5, %r15, BYTES; add.u64 %rd6, %rd3, %rd5;
  sub.u32 %r17, 2032, %r13; cvt.u64.u32 %rd7, %r17; add.u64 %rd6, %rd6, %rd7;
  add.u32 %r14, %r10, %r17; add.u32 %r21, %r5, %r17;
READS
  mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r9];
  add.u32 %r11, %r11, 1; bra reader;
count:
  red.global.add.u32 [%rd1], %r12;
done:
  barrier.cluster.arrive; barrier.cluster.wait; ret;
}
"""
PARTS = WORDS_EACH // 4  # vectors of 16 bytes a thread
VALUE = "{%r11, %r11, %r11, %r11}"
CHECK = "".join(f" setp.ne.u32 %p, %r{word}, %r11; @%p add.u32 %r12, %r12, 1;" for word in (24, 27))
LOADED = "{%r24, %r25, %r26, %r27}"
FENCE = "fence.proxy.async.shared::cta;"
# name: (a write of 16 bytes at {at}, what follows all writes, a read of 16 bytes)
WRITES = {
    "own shared memory, proxy fence": ("st.shared.v4.b32 [%r14+{at}], VALUE;", FENCE,
                                       "ld.shared::cluster.v4.b32 LOADED, [%r14+{at}];"),
    "own shared memory": ("st.shared.v4.b32 [%r14+{at}], VALUE;", "",
                          "ld.shared::cluster.v4.b32 LOADED, [%r14+{at}];"),
    "own shared memory by cp.async": ("cp.async.cg.shared.global [%r14+{at}], [%rd8], 16;", "cp.async.wait_all;",
                                      "ld.shared::cluster.v4.b32 LOADED, [%r14+{at}];"),
    "the other CTA's shared memory": ("st.shared::cluster.v4.b32 [%r21+{at}], VALUE;", "",
                                      "ld.shared.v4.b32 LOADED, [%r21+{at}];"),
    "the other CTA's, proxy fence": ("st.shared::cluster.v4.b32 [%r21+{at}], VALUE;", FENCE,
                                     "ld.shared.v4.b32 LOADED, [%r21+{at}];"),
    "global memory": ("st.global.v4.b32 [%rd6+{at}], VALUE;", "", "ld.global.cg.v4.b32 LOADED, [%rd6+{at}];"),
}  # fmt: skip
ARRIVALS = {
    "no scope": "mbarrier.arrive.shared::cluster.b64 _, [%r8];",
    ".release.cluster": "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r8];",
}
BYTES = THREADS * WORDS_EACH * 4


def filled(text: str, **values) -> bytes:
    """A PTX module with names replaced by values, longest names first."""
    for name in sorted(values, key=len, reverse=True):
        text = text.replace(name, str(values[name]))
    return (HEAD + text).encode()


def exit_module(kind: str, nbytes: int, wait: str, after: str) -> bytes:
    """The module of one row of EXITS."""
    name, _, size = kind.partition(" of ")
    n = int(size or CHUNK)
    copies = (COPY[name] + STEP).format(n=n) + "\n"
    if nbytes // n > 64:
        repeat = f"mov.u32 %r9, {nbytes // n};\nmore: {copies} sub.u32 %r9, %r9, 1; "
        repeat += "setp.ne.u32 %p, %r9, 0; @%p bra more;"
    else:
        repeat = copies * (nbytes // n)
    return filled(EXIT.replace("AFTER", after), COPIES=repeat, WAIT=wait, WORDS=nbytes // 4, BYTES=nbytes)


def scope_module(write: str, fence: str, read: str, arrive: str) -> bytes:
    """The module of one row of WRITES with an arrival."""
    places = [128 * 16 * part for part in range(PARTS)]
    writes = "\n".join(write.replace("{at}", str(at)).replace("VALUE", VALUE) for at in places) + "\n" + fence
    reads = "\n".join(read.replace("{at}", str(at)).replace("LOADED", LOADED) + CHECK for at in places)
    return filled(
        SCOPE,
        WRITES=writes,
        READS=reads,
        ARRIVE=arrive,
        SLOTBYTES=BYTES * SLOTS,
        SLOTMASK=SLOTS - 1,
        BYTES=BYTES,
    )


def run_exit(gpu: Gpu, row: tuple, rounds: int) -> tuple[int, int]:
    """(wrong words, words) of one row of EXITS."""
    _, nbytes, *_ = row
    module = gpu.load(exit_module(*row))
    function = gpu.function(module, "exits", nbytes)
    grid = gpu.attribute(SM_COUNT) * CTAS
    total, wrong = grid * nbytes // 4, 0
    out = gpu.allocate(total * 4)
    expected = np.arange(total, dtype=np.uint32)
    for _ in range(rounds):
        gpu.check(gpu.cuda.cuMemsetD8_v2(out, 0, ctypes.c_size_t(total * 4)))
        gpu.launch(function, grid, 1024, nbytes, [out])
        gpu.check(gpu.cuda.cuCtxSynchronize())
        wrong += int((gpu.get(out, (total,), np.uint32) != expected).sum())
    gpu.check(gpu.cuda.cuMemFree_v2(out))
    gpu.unload(module)
    return wrong, total * rounds


def run_scope(gpu: Gpu, row: tuple, arrive: str, rounds: int) -> tuple[int, int]:
    """(stale words, words compared) of one row of WRITES."""
    module = gpu.load(scope_module(*row, arrive))
    function = gpu.function(module, "scope", 0)
    clusters = gpu.attribute(SM_COUNT) // 2
    wrong, slots = gpu.allocate(4), gpu.allocate(clusters * SLOTS * BYTES)
    source = gpu.allocate(rounds * 2048)  # 16 bytes a thread and round
    gpu.put(source, np.repeat(np.arange(rounds, dtype=np.uint32), 512))
    gpu.launch(function, 2 * clusters, THREADS, 0, [wrong, source, slots, ctypes.c_uint32(rounds)])
    gpu.check(gpu.cuda.cuCtxSynchronize())
    found = int(gpu.get(wrong, (1,), np.uint32)[0])
    for address in (wrong, slots, source):
        gpu.check(gpu.cuda.cuMemFree_v2(address))
    gpu.unload(module)
    return found, clusters * rounds * THREADS * PARTS * 2


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20000, help="hand-overs of each row of scope")
    parser.add_argument("--launches", type=int, default=4, help="launches of each row of exit")
    options = parser.parse_args()
    gpu = Gpu()
    print(gpu.name(), flush=True)
    for name, row in EXITS.items():
        wrong, words = run_exit(gpu, row, options.launches)
        print(f"exit, {name}: {wrong} of {words:.2e} words wrong", flush=True)
    for name, row in WRITES.items():
        for scope, arrive in ARRIVALS.items():
            stale, words = run_scope(gpu, row, arrive, options.rounds)
            print(f"scope, {name}, {scope}: {stale} of {words:.2e} words stale", flush=True)


if __name__ == "__main__":
    main()
