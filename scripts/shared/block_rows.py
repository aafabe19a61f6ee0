"""Rows of ``bench_attention.py``: lists of blocks and ranges of keys, against FlexAttention and flash-attn-4.

The masks are given to FlexAttention as a mask_mod, to flash-attn-4 as the same function in CuTe DSL.
"""

from __future__ import annotations

import functools

import torch
from torch.nn.attention.flex_attention import create_block_mask

from shared import bench_shapes, gpu_bench
from shared.attention_peers import FLASH, FLEX, flash_attention, flash_lists, flex, result_of
from shared.attention_rows import agree, columns, random, without_failing
from shared.gradient_rows import WRONG_GRADIENTS, recorded
from shared.sweep_masks import in_cute, in_torch
from warpspec.fmha import BlockMask, attention

# Masks of ``bench_shapes.BLOCKS``.
MASKS = {"documents": ("equal", 1000), "drawn": ("blocks", 3), "window": ("sliding", 1024)}
IMAGE, TEXT = 256, 250  # tokens of an image, and of text between two


def images_in_cute():
    """``images`` as a function that flash-attn-4 compiles."""
    import cutlass
    import cutlass.cute as cute
    from flash_attn.cute.utils import scalar_to_ssa

    @cute.jit
    def images(batch, head, q, k, seqlen_info, aux_tensors):
        period, text = (scalar_to_ssa(number, cutlass.Int32) for number in (TEXT + IMAGE, TEXT))
        same = (q // period == k // period) & (q % period >= text) & (k % period >= text)
        return (k <= q) | same

    return images


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
        mod = in_torch(MASKS[name], length, "cuda")
        lists = create_block_mask(mod, None, None, length, length, device="cuda")
        own = BlockMask.of(lists, length, length)
        leaves = [random(batch, length, n, d) for n in (heads, heads_kv, heads_kv)]
        forwards = {
            "warpspec": functools.partial(attention, block_mask=own),
            FLEX: functools.partial(flex, mask=lists),
            "dense": attention,
        }
        if flash is not None:
            both, mask_mod = flash_lists(lists), in_cute(MASKS[name])
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
            FLEX: functools.partial(flex, mask=lists),
        }
        if flash is not None:
            both, mask_mod = flash_lists(lists), images_in_cute()
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
