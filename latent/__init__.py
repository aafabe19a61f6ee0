"""Latent attention: DeepSeek-V4's serving path (caches of latent keys, the indexer, attention over selected rows, the
output projection), and MLA's decode of DeepSeek V2 and V3.

Each step of a layer has its own package, and all public names can be imported from here:

- ``warpspec.latent.cache``: row formats, paged pools, states of requests; insert and compress
- ``warpspec.latent.indexer``: queries, scores and selection of the indexer
- ``warpspec.latent.gathered``: attention over rows that are found by slot
- ``warpspec.latent.projection``: the grouped output projection
- ``warpspec.latent.mla``: MLA's decode, rows of 576 numbers in pages

docs/latent.md has an example of a layer, from insert to output.
"""

from __future__ import annotations

from warpspec.latent.cache import (
    DEEPSEEK_V4_FLASH,
    DEEPSEEK_V4_PRO,
    INDEX_FORMATS,
    LATENT_FORMATS,
    MODELS,
    NO_SLOT,
    CacheConfig,
    IndexPool,
    LatentPool,
    RowFormat,
    StateCache,
    Tail,
    bytes_per_token,
    compress,
    insert_window,
    rope_table,
    store_rows,
    table_slots,
)
from warpspec.latent.gathered import KeySet, gathered_attention
from warpspec.latent.indexer import IndexQueries, index_queries, index_scores, index_topk, select_entries
from warpspec.latent.mla import mla_decode, mla_schedule
from warpspec.latent.projection import Float8Tensor, output_projection, quantize_output

__all__ = [
    "DEEPSEEK_V4_FLASH",
    "DEEPSEEK_V4_PRO",
    "INDEX_FORMATS",
    "LATENT_FORMATS",
    "MODELS",
    "NO_SLOT",
    "CacheConfig",
    "Float8Tensor",
    "IndexPool",
    "IndexQueries",
    "KeySet",
    "LatentPool",
    "RowFormat",
    "StateCache",
    "Tail",
    "bytes_per_token",
    "compress",
    "gathered_attention",
    "index_queries",
    "index_scores",
    "index_topk",
    "insert_window",
    "mla_decode",
    "mla_schedule",
    "output_projection",
    "quantize_output",
    "rope_table",
    "select_entries",
    "store_rows",
    "table_slots",
]
