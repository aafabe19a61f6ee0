"""The data that a model's layers keep of their tokens, and the bytes that it takes. Plain Python.

There are three kinds of layers. "window" keeps plain keys of the last tokens. "csa" keeps the window and an entry for
every ``csa_stride`` tokens, each with an index key by which the indexer selects it. "hca" keeps the window and an entry
for every ``hca_stride`` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from warpspec.common.checks import check_choice, check_int, check_kind, kind_of
from warpspec.common.hardware import FP32_BYTES
from warpspec.latent.cache.formats import INDEX_FORMATS, LATENT_FORMATS, format_named

KINDS = ("window", "csa", "hca")
OVERLAP = 2  # windows that a CSA entry is pooled from: its own and the one before
POSITION_LIMIT = 2**30
CONTENT_AND_GATE = 2  # the compressor's two projections, C and Z
SIZES = ("dim", "rope_dim", "window", "csa_stride", "hca_stride", "index_dim", "index_heads", "top_k")
ONLINE_NUMBERS = 3  # numbers a channel of an unfinished HCA window: largest gate, sum, weighted sum


@dataclass(frozen=True)
class CacheConfig:
    """Shapes of a model's caches.

    layers: how many layers of each kind. dim: numbers of a latent row, of which the last rope_dim are rotated. window:
    plain keys that a token sees, its own included. index_dim, index_heads: numbers of an index key, and heads of the
    indexer's queries. top_k: entries that the indexer selects. latent, index: names of the pools' formats. Raises
    TypeError or ValueError naming the field.
    """

    layers: tuple[tuple[str, int], ...]
    dim: int = 512
    rope_dim: int = 64
    window: int = 128
    csa_stride: int = 4
    hca_stride: int = 128
    index_dim: int = 128
    index_heads: int = 64
    top_k: int = 512
    latent: str = "v4-fp8"
    index: str = "mxfp4"

    def __post_init__(self):
        format_named(LATENT_FORMATS, self.latent, "latent")
        format_named(INDEX_FORMATS, self.index, "index")
        check_kind("layers", self.layers, tuple)
        for number, layer in enumerate(self.layers):
            if not isinstance(layer, tuple) or len(layer) != 2:
                raise TypeError(
                    f"layers: must be pairs (kind, count), got {kind_of(layer)} at index {number}"
                )
            check_choice(f"layers: kind {number}", layer[0], KINDS)
            check_int(f"layers: count {number}", layer[1], 0)
        for name in SIZES:
            check_int(name, getattr(self, name), 1)

    def stride(self, kind: str) -> int:
        """Tokens of an entry; 0 for layers without entries. Raises TypeError or ValueError for an unknown kind."""
        check_choice("kind", kind, KINDS)
        return {"window": 0, "csa": self.csa_stride, "hca": self.hca_stride}[kind]

    def bytes_per_token(self) -> float:
        """Bytes that a token adds to the pools of all layers together: entries and index keys, when pages are full."""
        latent = LATENT_FORMATS[self.latent].row_bytes
        index = INDEX_FORMATS[self.index].row_bytes
        of_kind = {"window": 0.0, "csa": (latent + index) / self.csa_stride, "hca": latent / self.hca_stride}
        return sum(count * of_kind[kind] for kind, count in self.layers)

    def state_bytes(self, kind: str, max_draft: int = 0) -> int:
        """Bytes of a request's state in one layer (``StateCache``); they do not depend on its length.

        kind: "window", "csa" or "hca". max_draft: the most draft tokens of a call. Raises TypeError or ValueError
        naming the argument.
        """
        check_choice("kind", kind, KINDS)
        check_int("max_draft", max_draft, 0)
        ring = LATENT_FORMATS[self.latent].page_stride(self.window + max_draft)
        if kind == "csa":
            rows = OVERLAP * self.csa_stride + max_draft
            return ring + rows * CONTENT_AND_GATE * OVERLAP * (self.dim + self.index_dim) * FP32_BYTES
        if kind == "hca":
            return ring + (ONLINE_NUMBERS + max_draft * CONTENT_AND_GATE) * self.dim * FP32_BYTES
        return ring

    def bytes_per_request(self, max_draft: int = 0) -> int:
        """Bytes of a request's states in all layers.

        max_draft: the most draft tokens of a call. Raises TypeError or ValueError naming it.
        """
        check_int("max_draft", max_draft, 0)
        return sum(count * self.state_bytes(kind, max_draft) for kind, count in self.layers)


DEEPSEEK_V4_FLASH = CacheConfig((("window", 2), ("csa", 21), ("hca", 20)))
DEEPSEEK_V4_PRO = CacheConfig((("csa", 30), ("hca", 31)), top_k=1024)
MODELS = {"deepseek-v4-flash": DEEPSEEK_V4_FLASH, "deepseek-v4-pro": DEEPSEEK_V4_PRO}


def bytes_per_token(model: str, **formats: str) -> float:
    """Bytes of cache that a token adds in all layers of a model of ``MODELS``; a request's fixed states come on top.

    formats: ``latent=`` and ``index=`` replace the model's own. Raises TypeError or ValueError naming the argument.
    """
    check_choice("model", model, MODELS)
    for name in formats.keys() - {"latent", "index"}:
        raise TypeError(f"{name}: is not an argument of bytes_per_token, which takes latent and index")
    return replace(MODELS[model], **formats).bytes_per_token()
