"""Rows of ``bench_attention.py``: lists of blocks and ranges of keys, against FlexAttention and flash-attn-4.

The masks are given to FlexAttention as a mask_mod, to flash-attn-4 as the same function in CuTe DSL.
"""

from __future__ import annotations

import functools

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from shared import bench_shapes, gpu_bench
from shared.attention_peers import FLASH, flash_attention, result_of
from shared.attention_rows import agree, columns, random, without_failing
from shared.gradient_rows import WRONG_GRADIENTS, recorded
from warpspec.fmha import BlockMask, attention

FLEX = "FlexAttention"
DOCUMENT, WINDOW, SINKS = 1000, 1024, 4  # tokens
PART = 5  # one of so many blocks is visited where blocks are drawn at random
IMAGE, TEXT = 256, 250  # tokens of an image, and of text between two


def documents(b, h, q, k):
    """Causal within documents of a fixed length."""
    return (q // DOCUMENT == k // DOCUMENT) & (q >= k)


def window(b, h, q, k):
    """A causal window, and the first tokens."""
    return (q >= k) & ((q - k < WINDOW) | (k < SINKS))


def in_cute(name: str):
    """A mask as a function that flash-attn-4 compiles; None for blocks that are listed in full."""
    import cutlass
    import cutlass.cute as cute
    from flash_attn.cute.utils import scalar_to_ssa

    def number(value):
        return scalar_to_ssa(value, cutlass.Int32)

    @cute.jit
    def documents(batch, head, q, k, seqlen_info, aux_tensors):
        length = number(DOCUMENT)
        return (q // length == k // length) & (k <= q)

    @cute.jit
    def window(batch, head, q, k, seqlen_info, aux_tensors):
        return (k <= q) & ((q < k + number(WINDOW)) | (k < number(SINKS)))

    @cute.jit
    def images(batch, head, q, k, seqlen_info, aux_tensors):
        period, text = number(TEXT + IMAGE), number(TEXT)
        same = (q // period == k // period) & (q % period >= text) & (k % period >= text)
        return (k <= q) | same

    return locals().get(name)


def drawn(length: int):
    """A mask of whole blocks, one in PART of them, the diagonal among them."""
    count = length // 128
    table = torch.rand(count, count, device="cuda") < 1 / PART
    table |= torch.eye(count, dtype=torch.bool, device="cuda")
    return lambda b, h, q, k: table[q // 128, k // 128]


def images(b, h, q, k):
    """Causal, and all of one's own image."""
    period = TEXT + IMAGE
    same = (q // period == k // period) & (q % period >= TEXT) & (k % period >= TEXT)
    return (q >= k) | same


def image_ranges(batch: int, length: int) -> torch.Tensor:
    """``images`` as ranges, int32 [B, S, 2]."""
    position = torch.arange(length, device="cuda")
    first = position // (TEXT + IMAGE) * (TEXT + IMAGE) + TEXT
    found = torch.stack([first, (first + IMAGE - 1).clamp(max=length - 1)], dim=-1)
    found[position < first] = -1
    return found.int().repeat(batch, 1, 1)


def flex_calls(q, mask):
    """FlexAttention on tensors [B, S, H, D]."""
    compiled = torch.compile(flex_attention)

    def call(q, k, v):
        heads_first = (t.transpose(1, 2) for t in (q, k, v))
        grouped = q.shape[2] != k.shape[2]
        return compiled(*heads_first, block_mask=mask, enable_gqa=grouped).transpose(1, 2)

    return call


def flash_lists(lists):
    """The lists of a FlexAttention mask as flash-attn-4 takes them: (forward, backward)."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    kv = (lists.kv_num_blocks, lists.kv_indices, lists.full_kv_num_blocks, lists.full_kv_indices)
    q = (lists.q_num_blocks, lists.q_indices, lists.full_q_num_blocks, lists.full_q_indices)
    return tuple(BlockSparseTensorsTorch(*fields, block_size=(128, 128)) for fields in (kv, q))


def visited(lists: BlockMask) -> float:
    """The visited blocks' share of all."""
    counts = lists.kv_counts[..., 1]
    return counts.sum().item() / (counts.numel() * lists.kv_visits.shape[-2])


def blocks(gradients: bool = False) -> list[list]:
    """Masks by lists of blocks; FLOPs are those of the visited blocks. "dense": this library without a mask, times the
    share of the blocks that are visited. gradients: time them instead of results."""
    rows, flash = [], flash_attention()
    shapes = bench_shapes.BLOCK_GRADIENTS if gradients else bench_shapes.BLOCKS
    for name, batch, heads, heads_kv, length, d in shapes:
        mod = drawn(length) if name == "drawn" else globals()[name]
        lists = create_block_mask(mod, None, None, length, length, device="cuda")
        own = BlockMask.of(lists, length, length)
        leaves = [random(batch, length, n, d) for n in (heads, heads_kv, heads_kv)]
        forwards = {
            "warpspec": functools.partial(attention, block_mask=own),
            FLEX: flex_calls(leaves[0], lists),
            "dense": attention,
        }
        if flash is not None:
            both, mask_mod = flash_lists(lists), in_cute(name)
            forwards[FLASH] = lambda q, k, v, both=both, mask_mod=mask_mod: result_of(
                flash.dense(
                    q, k, v, mask_mod=mask_mod, block_sparse_tensors=both[0], block_sparse_tensors_bwd=both[1]
                )
            )
        calls = timed_calls(forwards, leaves, gradients)
        found = {each: call() for each, call in calls.items() if each != "dense"}
        title = f"{name} B{batch} {heads}/{heads_kv} S{length} D{d}"
        for peer in found:
            pairs = (
                zip(found["warpspec"], found[peer], strict=True)
                if gradients
                else [(found["warpspec"], found[peer])]
            )
            for pair in pairs:
                agree(f"{title} {peer}", *pair, WRONG_GRADIENTS if gradients else 1e-2)
        times = gpu_bench.gpu_times(calls, [()], **gpu_bench.SHORT_ROUNDS)
        print(title, times, flush=True)  # if the table is cut off
        share = visited(own)
        flops = (10 if gradients else 4) * batch * heads * length * length * d * share
        cells = columns(times, flops * 1e-6, (FLASH, FLEX))
        rows.append([title, share, *cells, times["warpspec"] / (share * times["dense"])])
    return rows


def timed_calls(forwards: dict, leaves: list[torch.Tensor], gradients: bool) -> dict:
    """Functions of nothing: results, or gradients, of those peers that have them."""
    if gradients:
        leaves = [t.requires_grad_() for t in leaves]
        do = torch.randn_like(leaves[0])
        return without_failing({name: recorded(each, leaves, do) for name, each in forwards.items()})
    return without_failing({name: functools.partial(each, *leaves) for name, each in forwards.items()})


def ranges() -> list[list]:
    """Causal queries among which images see all of themselves; FLOPs as if all were causal."""
    rows, flash = [], flash_attention()
    for batch, heads, heads_kv, length, d in bench_shapes.RANGES:
        leaves = [random(batch, length, n, d) for n in (heads, heads_kv, heads_kv)]
        lists = create_block_mask(images, None, None, length, length, device="cuda")
        own = BlockMask.of(lists, length, length)
        forwards = {
            "warpspec": functools.partial(attention, causal=True, ranges=image_ranges(batch, length)),
            "lists": functools.partial(attention, block_mask=own),
            "causal": functools.partial(attention, causal=True),
            FLEX: flex_calls(leaves[0], lists),
        }
        if flash is not None:
            both, mask_mod = flash_lists(lists), in_cute("images")
            forwards[FLASH] = lambda q, k, v, both=both, mask_mod=mask_mod: result_of(
                flash.dense(q, k, v, mask_mod=mask_mod, block_sparse_tensors=both[0])
            )
        calls = timed_calls(forwards, leaves, False)
        expected = calls["warpspec"]()
        title = f"B{batch} {heads}/{heads_kv} S{length} D{d}"
        for peer in calls:
            if peer != "causal":
                agree(f"{title} {peer}", expected, calls[peer](), 1e-2)
        times = gpu_bench.gpu_times(calls, [()], **gpu_bench.SHORT_ROUNDS)
        print(title, times, flush=True)
        flops = 2 * batch * heads * length * length * d
        cells = columns(times, flops * 1e-6, (FLASH, FLEX))
        rows.append([title, *cells, times["warpspec"] / times["causal"], times["warpspec"] / times["lists"]])
    return rows
