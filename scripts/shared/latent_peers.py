"""FlashMLA's and DeepGEMM's kernels for sm_90a, called through ctypes; built by ``scripts/latent_peers/build.sh``.

The environment variable WARPSPEC_LATENT_PEERS names the folder with flash_mla.so and deep_gemm.so; without it there are
no peers. Their workspaces and schedules are made once, outside what is timed.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path

import torch

FOLDER_VARIABLE = "WARPSPEC_LATENT_PEERS"
SCALE = 512**-0.5
SCHEDULE_WORDS = 8  # of a part, of FlashMLA's schedule
LOGITS_STEP = 256  # DeepGEMM's rows of logits are a multiple of it


@functools.cache
def library(name: str) -> ctypes.CDLL | None:
    """A peer's library, None where it is not there."""
    folder = os.environ.get(FOLDER_VARIABLE)
    path = Path(folder) / f"{name}.so" if folder else None
    if path is None or not path.exists():
        return None
    ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(path))


def pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def sms() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def flash_mla_decode(tokens: int, heads: int, slots: tuple[int, int]) -> Callable | None:
    """A function of (q, key_sets, sink, out) like ``gathered_attention``'s, of two sets of "v4-fp8" rows."""
    found = library("flash_mla")
    if found is None or heads not in (64, 128):
        return None
    parts = max(1, sms() // (heads // 64))
    schedule = torch.zeros(parts, SCHEDULE_WORDS, dtype=torch.int32, device="cuda")
    num_splits = torch.zeros(tokens + 1, dtype=torch.int32, device="cuda")
    lse_parts = torch.empty(tokens + parts, heads, device="cuda")
    o_parts = torch.empty(tokens + parts, heads, 512, device="cuda")
    lse = torch.empty(tokens, heads, device="cuda")
    made = []

    def call(q, key_sets, sink, out):
        window, entries = (each.pool for each in key_sets)
        first, second = (each.slots for each in key_sets)
        found.fm_decode(
            tokens, heads, ctypes.c_float(SCALE), len(window.data), window.page_size, slots[0], pointer(q),
            pointer(window.data), pointer(first), pointer(sink), pointer(lse), pointer(out), len(entries.data),
            entries.page_size, slots[1], pointer(entries.data), pointer(second), window.data.stride(0),
            entries.data.stride(0), pointer(schedule), pointer(num_splits), pointer(lse_parts), pointer(o_parts), parts,
            int(not made), stream(),
        )  # fmt: skip
        made.append(True)

    return call


def flash_mla_prefill(tokens: int, heads: int) -> Callable | None:
    """A function of (q, rows bf16 [N, 512], slots [T, K], sink, out): all keys of one set."""
    found = library("flash_mla")
    if found is None:
        return None
    statistics = [torch.empty(tokens, heads, device="cuda") for _ in range(2)]

    def call(q, rows, slots, sink, out):
        found.fm_prefill(
            tokens, len(rows), heads, slots.shape[1], ctypes.c_float(SCALE), pointer(q), pointer(rows), pointer(slots),
            pointer(sink), pointer(out), *map(pointer, statistics), sms(), stream(),
        )  # fmt: skip

    return call


def deep_gemm_scores(queries: int, entries: int) -> Callable | None:
    """A function of (queries' values e4m3 [T, 64, 128], weights [T, 64], pool "fp8" of pages of 64, table, lengths)."""
    found = library("deep_gemm")
    if found is None or queries > LOGITS_STEP:
        return None
    schedule = torch.zeros(sms() + 1, 2, dtype=torch.int32, device="cuda")
    pitch = -(-entries // LOGITS_STEP) * LOGITS_STEP
    logits = torch.empty(queries, pitch, device="cuda")
    made = []

    def call(values, weights, pool, table, lengths):
        failed = found.dg_logits(
            queries, pointer(values), pointer(pool.data), len(pool.data), ctypes.c_long(pool.data.stride(0)),
            pointer(weights), pointer(lengths), pointer(logits), pitch, pointer(table), table.shape[1],
            pointer(schedule), int(not made), stream(),
        )  # fmt: skip
        if failed:
            raise RuntimeError(f"DeepGEMM: CUDA error {failed}")
        made.append(True)
        return logits[:, :entries]

    return call
