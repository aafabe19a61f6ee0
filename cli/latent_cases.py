"""MLA's decode and attention over gathered rows at the command line's shapes, on random inputs."""

from __future__ import annotations

import argparse

import torch

from warpspec.cli.case import ATTENTION_TOLERANCE, Case, random_numbers
from warpspec.cli.options import KV_DTYPES

MLA_ROW, MLA_SCALE = 576, 192**-0.5  # numbers of a row, and the factor of the logits: DeepSeek V3's
PAGE = 64  # rows
POOL_ROWS = 1 << 14  # least rows of the pool from which gathered rows are picked
# Against the kernels' own definition on the same codes.
GATHERED_TOLERANCE = 4e-3


def mla_case(options: argparse.Namespace, device: str) -> Case:
    """MLA's decode: --queries new tokens of each of --batch requests, each with --keys rows in pages of a table."""
    from warpspec.latent import mla_decode

    randn = random_numbers(options, device)
    pages = -(-options.keys // PAGE)
    q = randn(options.batch, options.queries, options.heads, MLA_ROW)
    kv = randn(options.batch * pages, PAGE, MLA_ROW).to(KV_DTYPES[options.kv_dtype] or q.dtype)
    order = torch.randperm(options.batch * pages, generator=torch.Generator().manual_seed(options.seed))
    table = order.view(options.batch, pages).to(device, torch.int32)
    lengths = torch.full((options.batch,), options.keys, dtype=torch.int32, device=device)

    def run(backend):
        return [mla_decode(q, kv, table, lengths, scale=MLA_SCALE, backend=backend)]

    title = f"MLA decode B{options.batch} Sq{options.queries} Sk{options.keys} {options.heads} heads"
    title += f" {options.dtype}{_rows_of(options)}"
    tolerance = ATTENTION_TOLERANCE[options.dtype]
    return Case(title, run, lambda: run("reference"), None, tolerance, by_head=True)


def gathered_case(options: argparse.Namespace, device: str) -> Case:
    """Attention of --batch times --queries queries, each over --keys rows of its own, picked at random from a pool."""
    from warpspec.latent import KeySet, LatentPool, gathered_attention

    queries, rows = options.batch * options.queries, max(POOL_ROWS, options.keys)
    randn = random_numbers(options, device)
    pool = LatentPool.empty(-(-rows // PAGE), PAGE, options.row_format, device=device)
    dim = pool.row_format.dim
    pool.write(torch.arange(pool.capacity, dtype=torch.int32, device=device), randn(pool.capacity, dim))
    q = randn(queries, options.heads, dim)
    generator = torch.Generator(device).manual_seed(options.seed)
    slots = torch.randint(0, pool.capacity, (queries, options.keys), generator=generator, device=device)
    sets = [KeySet(pool, slots.int())]

    def run(backend):
        return [gathered_attention(q, sets, backend=backend)]

    title = f"gathered attention T{queries} {options.keys} rows {options.row_format} {options.heads} heads"
    return Case(title, run, lambda: run("reference"), None, GATHERED_TOLERANCE, by_head=True)


def _rows_of(options: argparse.Namespace) -> str:
    return "" if options.kv_dtype is None else f" over {options.kv_dtype} rows"
