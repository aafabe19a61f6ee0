"""Times of the latent caches' kernels on a GPU, in CUDA graphs.

    python scripts/bench_latent.py [--only insert compress ...]

One line a shape: microseconds, and what is reached of memory's or the tensor cores' speed. Inputs rotate through more
memory than L2 holds. FlashMLA and DeepGEMM take turns with ours where WARPSPEC_LATENT_PEERS names a folder that
``scripts/latent_peers/build.sh`` has filled; where the package sgl-flash-mla is installed, its FlashMLA also does for
rows of FP8. What they compute is compared with ours, without the rotation.
"""

from __future__ import annotations

import torch
from shared import bench_shapes, driver
from shared.gpu_bench import graph_time, graph_times, rotation, table
from shared.latent_peers import deep_gemm_scores, flash_mla_decode, flash_mla_prefill
from shared.mla_peers import rows_decode

from warpspec.latent.cache import (
    DEEPSEEK_V4_FLASH,
    IndexPool,
    LatentPool,
    StateCache,
    compress,
    insert_window,
    rope_table,
    store_rows,
)
from warpspec.latent.cache.reference import rotate
from warpspec.latent.gathered import KeySet, gathered_attention
from warpspec.latent.indexer import index_queries, index_scores, index_topk
from warpspec.latent.projection import Float8Tensor, output_projection

POSITIONS = 65536


def angles() -> torch.Tensor:
    return rope_table(1e4 ** (-torch.arange(32, device="cuda") / 32), POSITIONS)


def random_bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def bench_insert() -> str:
    """Queries and keys of new tokens: bytes read and written once, over the time."""
    cos_sin, weight, rows = angles(), torch.ones(512, device="cuda"), []
    for tokens, heads in bench_shapes.INSERTED:
        bytes_moved = tokens * (heads * 2 * 1024 + 1024 + 584)
        pool = LatentPool.empty(-(-tokens // 64) * 2, 64, "v4-fp8", device="cuda")
        slots = torch.arange(tokens, dtype=torch.int32, device="cuda")

        def make(_, tokens=tokens, heads=heads):
            return random_bf16(tokens, heads, 512), random_bf16(tokens, 512)

        def call(q, kv, pool=pool, slots=slots):
            insert_window(q, kv, cos_sin, slots, weight=weight, pool=pool, slots=slots, out=q)

        microseconds = graph_time(call, rotation(make, bytes_moved))
        rows.append((tokens, heads, microseconds, bytes_moved / microseconds * 1e-6))
    return table(("tokens", "heads", "us", "TB/s"), rows)


def bench_compress() -> str:
    """New tokens' projections to entries."""
    cos_sin, weight, rows = angles(), torch.ones(512, device="cuda"), []
    for kind, requests, count in bench_shapes.COMPRESSED:
        # Calls repeat a token.
        state = StateCache(DEEPSEEK_V4_FLASH, kind, requests, max_draft=1, device="cuda")
        width, tokens = state.tail.series * 512, requests * count
        ape = torch.randn(state.tail.stride, width, device="cuda")
        pool = LatentPool.empty(-(-tokens // 64), 64, "v4-fp8", device="cuda")
        slots = torch.arange(tokens, dtype=torch.int32, device="cuda")
        batch = dict(
            tail=state.tail,
            requests=torch.arange(requests, dtype=torch.int32, device="cuda"),
            starts=torch.full(
                (requests,), 0 if count > 1 else state.tail.stride - 1, dtype=torch.int32, device="cuda"
            ),
            cu_seqlens=torch.arange(0, tokens + 1, count, dtype=torch.int32, device="cuda"),
            pool=pool,
            slots=slots,
        )
        state.tail.progress.fill_(int(batch["starts"][0]))
        bytes_moved = tokens * 2 * width * 4

        def make(_, shape=(tokens, 2, width)):
            return (torch.randn(shape, device="cuda"),)

        def call(content_gate, ape=ape, batch=batch):
            compress(content_gate, ape, weight, cos_sin, **batch)

        microseconds = graph_time(call, rotation(make, bytes_moved))
        rows.append((kind, requests, count, microseconds, bytes_moved / microseconds * 1e-6))
    return table(("kind", "requests", "tokens", "us", "TB/s"), rows)


GATHERED_ROWS = 1 << 18  # of the pool with the entries
WINDOW_ROWS = 1 << 14


def random_pool(rows: int, format: str) -> LatentPool:
    pool = LatentPool.empty(rows // 64, 64, format, device="cuda")
    numbers, slots = (
        random_bf16(rows, pool.row_format.dim),
        torch.arange(rows, dtype=torch.int32, device="cuda"),
    )
    if format == "v3.2-fp8":  # which no kernel writes
        pool.write(slots, numbers)
    else:
        store_rows(numbers, pool, slots)
    return pool


def bench_gathered() -> str:
    """Decoding and prefill over a window and selected entries, DeepSeek V3.2's over selected rows: operations of both
    products over the time."""
    rows = []
    for queries, heads, slots, format in bench_shapes.GATHERED:
        sizes = (min(WINDOW_ROWS, GATHERED_ROWS), GATHERED_ROWS if format == "v4-fp8" else GATHERED_ROWS // 4)
        pools = [random_pool(size, format) for size in sizes[-len(slots) :]]
        dim = pools[0].row_format.dim
        sink = torch.randn(heads, device="cuda")
        positions = torch.full((queries,), 1000, dtype=torch.int32, device="cuda")
        keys, cos_sin = sum(slots), angles()
        rotation = (cos_sin, positions) if dim == 512 else None

        def make(_, shape=(queries, heads), pools=pools, slots=slots, dim=dim):
            sets = [
                KeySet(pool, torch.randint(0, pool.capacity, (shape[0], k), dtype=torch.int32, device="cuda"))
                for pool, k in zip(pools, slots, strict=True)
            ]
            out = torch.empty(*shape, 512, dtype=torch.bfloat16, device="cuda")
            # FlashMLA's prefill takes one set: all slots in the larger pool.
            return random_bf16(*shape, dim), sets, out, torch.cat([each.slots for each in sets], 1)

        def call(q, sets, out, _, sink=sink, rotate_back=rotation):
            gathered_attention(q, sets, sink=sink, rotate_back=rotate_back, out=out)

        candidates = {"ours": call}
        inputs = [make(i) for i in range(4 if queries < 1000 else 2)]
        error = None
        if format == "v4-fp8":
            decode = flash_mla_decode(queries, heads, slots) or rows_decode(heads, format)
        else:
            decode = rows_decode(heads, format)
        if decode is not None:
            candidates["FlashMLA"] = lambda q, sets, out, _, decode=decode, sink=sink: decode(
                q, sets, sink, out
            )
        if format == "bf16" and (prefill := flash_mla_prefill(queries, heads)):
            whole = pools[1].data.view(torch.bfloat16).view(-1, 512)

            def call_peer(q, sets, out, joined, prefill=prefill, sink=sink, whole=whole):
                prefill(q, whole, joined, sink, out)

            candidates["FlashMLA"] = call_peer
        if "FlashMLA" in candidates:
            q, sets, out, _ = inputs[0]
            found = candidates["FlashMLA"](*inputs[0])
            out = out if found is None else found
            if format == "bf16":
                sets = [KeySet(pools[1], each.slots) for each in sets]
            wanted = gathered_attention(q, sets, sink=sink, rotate_back=rotation).float()
            if rotation is not None:
                wanted = rotate(wanted, cos_sin[positions.long(), None])
            error = ((out.float() - wanted).norm() / wanted.norm()).item()
        operations = 2 * (dim + 512) * heads * queries * keys
        times = graph_times(candidates, inputs)
        rates = [operations / times[name] * 1e-6 if name in times else None for name in ("ours", "FlashMLA")]
        row = (queries, heads, "+".join(map(str, slots)), format, times["ours"], rates[0])
        rows.append((*row, times.get("FlashMLA"), rates[1], None if error is None else f"{error:.0e}"))
    columns = ("queries", "heads", "keys", "rows", "us", "TFLOP/s", "FlashMLA us", "TFLOP/s", "apart")
    return table(columns, rows)


def bench_select() -> str:
    """The k largest of rows of normal logits, and torch.topk, which sorts them."""
    rows = []
    for count, length, k in bench_shapes.SELECTED:

        def make(_, shape=(count, length)):
            return (torch.randn(shape, device="cuda"),)

        inputs = rotation(make, count * length * 4)
        ours = graph_time(lambda x, k=k: index_topk(x, k), inputs)
        theirs = graph_time(lambda x, k=k: x.topk(k), inputs)
        rows.append((count, length, k, ours, theirs))
    return table(("rows", "logits", "k", "us", "torch.topk"), rows)


def bench_scores() -> str:
    """Scores of index keys, 64 heads, each query its own entries: bytes of keys and logits, over the time."""
    rows = []
    for format in ("mxfp4", "fp8"):
        for queries, entries in bench_shapes.SCORED:
            pages = entries // 64
            q, weights = random_bf16(queries, 64, 128), torch.randn(queries, 64, device="cuda")
            at = torch.arange(queries, dtype=torch.int32, device="cuda")
            asked = index_queries(q, weights, angles(), at, format=format)
            pool = IndexPool.empty(queries * pages, 64, format, device="cuda")
            for first in range(0, pool.capacity, 1 << 18):
                slots = torch.arange(
                    first, min(first + (1 << 18), pool.capacity), dtype=torch.int32, device="cuda"
                )
                store_rows(random_bf16(len(slots), 128), pool, slots)
            table_ = torch.randperm(queries * pages, device="cuda").to(torch.int32).view(queries, pages)
            lengths = torch.full((queries,), entries, dtype=torch.int32, device="cuda")

            def call(asked, pool, table_, at=at, lengths=lengths):
                return index_scores(asked, pool, table_, at, lengths)

            candidates, error = {"ours": call}, None
            if format == "fp8" and (peer := deep_gemm_scores(queries, entries)):
                scales = asked.pool.data[:, 64 * 128 :].view(torch.float32)  # DeepGEMM's weights have them
                values, scaled = asked.pool.data[:, : 64 * 128].contiguous(), weights * scales

                def call_peer(asked, pool, table_, peer=peer, values=values, scaled=scaled, lengths=lengths):
                    return peer(values, scaled, pool, table_, lengths)

                candidates["DeepGEMM"] = call_peer
                got, wanted = call_peer(asked, pool, table_), call(asked, pool, table_)
                error = ((got - wanted).norm() / wanted.norm()).item()
            times = graph_times(candidates, [(asked, pool, table_)])
            moved = queries * entries * (pool.row_format.row_bytes + 4)
            rate = moved / times["ours"] * 1e-6
            apart = None if error is None else f"{error:.0e}"
            rows.append((format, queries, entries, times["ours"], rate, times.get("DeepGEMM"), apart))
    return table(("keys", "queries", "entries", "us", "TB/s", "DeepGEMM us", "apart"), rows)


def bench_projection() -> str:
    """wo_a, a product for each group of heads: bf16 and FP8, against torch.bmm in bf16; 2 T G K N operations."""
    rows, depth, columns = [], 4096, 1024
    for tokens, groups in bench_shapes.PROJECTED:

        def make(_, shape=(tokens, groups)):
            o = random_bf16(shape[0], shape[1] * depth // 512, 512)
            weight = random_bf16(shape[1], columns, depth)
            out = torch.empty(*shape, columns, dtype=torch.bfloat16, device="cuda")
            return o, weight, Float8Tensor.quantize(o), Float8Tensor.quantize(weight, 128), out

        candidates = {
            "bf16": lambda o, weight, o8, weight8, out: output_projection(o, weight, out=out),
            "FP8": lambda o, weight, o8, weight8, out: output_projection(o8, weight8, out=out),
            "torch.bmm": lambda o, weight, o8, weight8, out: torch.bmm(
                o.view(len(o), len(weight), depth).transpose(0, 1), weight.transpose(1, 2)
            ),
        }
        times = graph_times(candidates, [make(i) for i in range(3)])
        operations = 2 * tokens * groups * depth * columns
        rates = [operations / times[name] * 1e-6 for name in candidates]
        rows.append((tokens, groups, *(x for pair in zip(times.values(), rates, strict=True) for x in pair)))
    names = [x for name in candidates for x in (f"{name} us", "TFLOP/s")]
    return table(("tokens", "groups", *names), rows)


BENCHES = {
    "projection": bench_projection,
    "scores": bench_scores,
    "insert": bench_insert,
    "compress": bench_compress,
    "gathered": bench_gathered,
    "select": bench_select,
}


def main() -> None:
    chosen = driver.parser(__doc__, only=BENCHES).parse_args().only
    driver.begin()
    for name in chosen:
        print(f"\n{name}: {BENCHES[name].__doc__.splitlines()[0]}\n{BENCHES[name]()}", flush=True)


if __name__ == "__main__":
    main()
