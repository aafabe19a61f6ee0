"""What keys and values in FP8 and NVFP4 cost in accuracy, and whether attention finds one key among many.

    python scripts/validate_kv_formats.py                          # an H200 or H100: up to 131072 keys
    python scripts/validate_kv_formats.py --keys 1000 --backend sim

Keys and values are stored by `warpspec.cache.insert` into pages and read by `warpspec.fmha.attention`, with a query of
each request (decode) and with 128 causal queries at the end of one (chunked prefill). Codes past a request's length
and in pages of nobody are NaN. In each KV head one key, the needle, points where the queries of its group do, so that
it gets about half of their weight, and the others share the rest; the last of three rows is decode without needles,
where every key weighs little. Columns:

- elements, o: relative L2 error of stored numbers and of the result against keys and values that were never rounded;
- kernel: worst head's relative L2 error against FP64 over the numbers that are stored; lse: largest difference;
- needle: largest difference between the weight that the needle's value has in the result and the weight it should
  have, over the stored numbers.

Exit status 1 where the kernel's error is above 4e-3, lse's above 1e-3, the needle's weight off by more than 1e-2, or a
format's elements further from what they should be than its bound.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass

import torch

from warpspec.cache import insert
from warpspec.cache.quantize import dequantize_float8, dequantize_nvfp4
from warpspec.common.kv_formats import FORMATS
from warpspec.fmha import attention

HEADS_KV, GROUP, PAGE = 4, 8, 64
KERNEL, LSE, NEEDLE = 4e-3, 1e-3, 1e-2  # bounds
ELEMENTS = {"bfloat16": 0.003, "e4m3": 0.035, "e5m2": 0.07, "nvfp4": 0.12}
SCALES = {"bfloat16": None, "e4m3": 4.0 / 448, "e5m2": 4.0 / 57344, "nvfp4": 4.0 / (6 * 448)}
CODE_OF_NAN = {"bfloat16": math.nan, "e4m3": 0x7F, "e5m2": 0x7F, "nvfp4": 0x77}
KEYS = (1024, 8192, 131072)
ROWS = ((2, 1, True), (1, 128, True), (2, 1, False))  # requests, queries of each, whether there are needles
SEED = 20261126


@dataclass(frozen=True)
class Problem:
    """Requests of some keys each, queries of theirs, and what is stored. q [B, Sq, Hq, D] bf16; k, v [B, L, Hkv, D]
    fp32, rounded to bf16. needles [B, Hkv]: positions."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    needles: torch.Tensor

    @classmethod
    def of(cls, batch: int, queries: int, keys: int, dim: int, device: str, hides: bool) -> Problem:
        """Random numbers, and with ``hides`` a needle in each KV head that all queries may see."""
        generator = torch.Generator(device).manual_seed(SEED + keys)

        def normal(*shape):
            return torch.randn(shape, generator=generator, device=device)

        towards = normal(batch, 1, HEADS_KV, 1, dim)
        q = towards + 0.3 * normal(batch, queries, HEADS_KV, GROUP, dim)
        k, v = (normal(batch, keys, HEADS_KV, dim).bfloat16().float() for _ in range(2))
        needles = torch.randint(keys - queries + 1, (batch, HEADS_KV), generator=generator, device=device)
        needles[0, 0], needles[-1, -1] = 0, keys - queries
        length = (math.log(keys) + 0.5 + math.log(q.square().mean())) / math.sqrt(dim)
        b, h = torch.arange(batch, device=device)[:, None], torch.arange(HEADS_KV, device=device)
        if hides:
            k[b, needles, h] = (towards[:, 0, :, 0] * length).bfloat16().float()
        return cls(q.flatten(2, 3).bfloat16(), k, v, needles)


def stored(problem: Problem, name: str, backend: str) -> tuple[dict, tuple]:
    """(arguments of ``attention`` but q, (k, v) as they are stored, fp64 [B, L, Hkv, D])."""
    k, v = problem.k, problem.v
    (batch, keys, heads, dim), device = k.shape, k.device
    slots_each, fmt = -(-keys // PAGE), FORMATS[name]
    pages = 1 + torch.randperm(batch * slots_each + 1, device=device)[: batch * slots_each]
    table = pages.view(batch, slots_each).int()
    dtype = torch.uint8 if fmt.scaled else torch.bfloat16
    caches = [
        torch.full((batch * slots_each + 3, PAGE, heads, dim * fmt.bits // 8 // dtype.itemsize), CODE_OF_NAN[name],
                   dtype=dtype, device=device) for _ in range(2)
    ]  # fmt: skip
    scale = None if SCALES[name] is None else torch.tensor(SCALES[name], device=device)
    extras = {}
    if fmt.scaled:
        extras = {"k_scale": scale, "v_scale": scale}
    if fmt.block:
        for one in ("k_block_scales", "v_block_scales"):
            extras[one] = torch.full(
                (*caches[0].shape[:3], dim // fmt.block), 0x7F, dtype=torch.uint8, device=device
            )
    place = torch.arange(keys, device=device)
    slots = (table[:, place // PAGE].long() * PAGE + place % PAGE).flatten()
    insert(
        k.flatten(0, 1).bfloat16(), v.flatten(0, 1).bfloat16(), *caches, slots,
        format=name if fmt.scaled else None, backend=backend, **extras,
    )  # fmt: skip

    def numbers(cache, blocks):
        codes = cache.flatten(0, 1)[slots]
        if not fmt.scaled:
            return codes.double()
        if fmt.block:
            return dequantize_nvfp4(codes, blocks.flatten(0, 1)[slots], scale).double()
        return dequantize_float8(codes, scale, name).double()

    blocks = [extras.get(f"{one}_block_scales") for one in "kv"]
    values = tuple(numbers(*pair).view(problem.k.shape) for pair in zip(caches, blocks, strict=True))
    codes = [cache if not fmt.scaled or fmt.block else cache.view(fmt.dtype) for cache in caches]
    lengths = torch.full((batch,), keys, dtype=torch.int32, device=device)
    arguments = dict(k=codes[0], v=codes[1], page_table=table, kv_lengths=lengths, **extras)
    return arguments, values


def exact(
    problem: Problem, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(o [B, Hq, Sq, D], lse [B, Hq, Sq], the needle's weight [B, Hq, Sq]) of causal attention in FP64."""
    batch, queries, heads, dim = problem.q.shape
    keys, found = k.shape[1], []
    hidden = (
        torch.arange(keys, device=k.device) > keys - queries + torch.arange(queries, device=k.device)[:, None]
    )
    for b in range(batch):
        for h in range(heads):
            own = h // GROUP
            scores = problem.q[b, :, h].double() @ k[b, :, own].T.double() / math.sqrt(dim)
            scores.masked_fill_(hidden, -math.inf)
            weights = scores.softmax(-1)
            found.append(
                (weights @ v[b, :, own].double(), scores.logsumexp(-1), weights[:, problem.needles[b, own]])
            )
    return tuple(torch.stack(part).unflatten(0, (batch, heads)) for part in zip(*found, strict=True))


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """||got - wanted|| / ||wanted||."""
    return ((got - wanted).norm() / wanted.norm()).item()


def measure(name: str, problem: Problem, backend: str) -> dict[str, float]:
    """The columns of a row of the table."""
    batch = len(problem.q)
    arguments, (k, v) = stored(problem, name, backend)
    o, lse = attention(problem.q, causal=True, return_lse=True, backend=backend, **arguments)
    o = o.double().transpose(1, 2)  # [B, Hq, Sq, D]
    wanted, wanted_lse, weight = exact(problem, k, v)
    plain, *_ = exact(problem, problem.k, problem.v)
    worst = ((o - wanted).flatten(2).norm(dim=-1) / wanted.flatten(2).norm(dim=-1)).max().item()
    b, h = torch.arange(batch, device=k.device)[:, None], torch.arange(HEADS_KV, device=k.device)
    needle = v[b, problem.needles, h].repeat_interleave(GROUP, dim=1)[:, :, None]  # [B, Hq, 1, D]
    size = needle.square().sum(-1)
    # What other keys add along the needle's value is in both.
    found = weight + ((o - wanted) * needle).sum(-1) / size
    return {
        "elements": relative(k, problem.k.double()),
        "o": relative(o, plain),
        "kernel": worst,
        "lse": (lse.double() - wanted_lse).abs().max().item(),
        "needle": (found - weight).abs().max().item(),
        "weight": weight.median().item(),
    }


def beyond(name: str, row: dict[str, float]) -> list[str]:
    """Columns that are not within their bounds; a NaN is not."""
    bounds = {"elements": ELEMENTS[name], "kernel": KERNEL, "lse": LSE, "needle": NEEDLE}
    return [column for column, bound in bounds.items() if not row[column] <= bound]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--formats", nargs="+", default=list(ELEMENTS), choices=list(ELEMENTS), metavar="NAME"
    )
    parser.add_argument("--keys", nargs="+", type=int, default=list(KEYS))
    parser.add_argument("--dims", nargs="+", type=int, default=[128], choices=[64, 128, 256])
    parser.add_argument("--backend", default="auto")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and arguments.backend in ("auto", "sm90", "sm100") else "cpu"
    if device == "cuda":
        print(f"{torch.cuda.get_device_name()}, seed {SEED}")
    print("| format | D | keys | queries | elements | o | kernel | lse | needle | its weight |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    failed = []
    for name in arguments.formats:
        for dim in arguments.dims:
            for keys in arguments.keys:
                for batch, queries, hides in ROWS:
                    problem = Problem.of(batch, min(queries, keys), keys, dim, device, hides)
                    row = measure(name, problem, arguments.backend)
                    cells = " | ".join(f"{value:.2g}" for value in row.values())
                    print(f"| {name} | {dim} | {keys} | {batch} x {queries} | {cells} |", flush=True)
                    failed += [
                        f"{name}, D {dim}, {keys} keys, {queries} queries: {each}"
                        for each in beyond(name, row)
                    ]
    for each in failed:
        print(f"beyond its bound: {each}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
