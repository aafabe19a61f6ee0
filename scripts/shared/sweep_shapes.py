"""Shapes of calls that engines make; ``sweep_draws`` draws them.

A shape says everything about a call but the values in its tensors: heads, lengths of each request, pages, windows; or
rows and columns. Shapes are written to and read from JSON.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from warpspec.aot.models import CALLS, PACKED, PAGED

from .sweep_masks import pairs_of

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
PROBABILITY_BYTES = 4 + 4  # of a result of top-k: fp32, int32

MOST_BYTES = 8e9  # of the tensors of a call
# Kinds of shapes whose backward pass is timed, not their forward pass: of the tuned head sizes; of further ones; of
# masks given as lists of blocks.
GRADIENTS, SIZE_GRADIENTS, LIST_GRADIENTS = "gradients", "size-gradients", "list-gradients"
BACKWARD = (GRADIENTS, SIZE_GRADIENTS, LIST_GRADIENTS)
FLOAT8, NVFP4 = "fp8", "nvfp4"  # kinds of shapes whose keys and values are e4m3, or NVFP4
CODE_BITS = {FLOAT8: 8, NVFP4: 4.5}  # of a number of K and V, with its share of block scales
# Kinds of further models' shapes: head sizes and soft caps; MLA's decode; masks given as lists of blocks.
SIZES, MLA, LISTS = "sizes", "mla", "lists"
# Parts of all shapes.
SHARES = {
    "prefill": 20,
    "chunked": 14,
    "speculative": 12,
    "decode": 26,
    "mixed": 12,
    "shared": 6,
    "softmax": 15,
    "top-k": 15,
    GRADIENTS: 20,
    SIZE_GRADIENTS: 8,
    LIST_GRADIENTS: 6,
    FLOAT8: 20,
    NVFP4: 20,
    SIZES: 20,
    MLA: 10,
    LISTS: 14,
}
KINDS = tuple(SHARES)


@dataclass(frozen=True)
class AttentionShape:
    """A call of ``attention`` or ``attention_varlen`` in bf16.

    kind: of KINDS. form: how requests are told apart, of ``aot.models.CALLS``. queries, keys: of each request.
    page_size: 0 without pages. window: keys that a query sees, its own among them; None: all. v_dim: head size of V, 0
    for head_dim; if V is K, that of the part that V is. mask: name and number of a mask of ``sweep_masks``, given as
    lists of blocks.
    """

    kind: str
    model: str
    heads_q: int
    heads_kv: int
    head_dim: int
    form: str
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    page_size: int = 0
    window: int | None = None
    sink: bool = False
    causal: bool = True
    shared_kv: bool = False
    v_dim: int = 0
    softcap: float | None = None
    mask: tuple[str, int] | None = None

    def __post_init__(self):
        assert self.kind in KINDS and self.form in CALLS
        assert len(self.queries) == len(self.keys)
        assert bool(self.page_size) == (self.form in PAGED)
        assert self.form in PACKED or len(set(self.queries)) == 1
        assert self.form != "plain" or len(set(self.keys)) == 1

    @property
    def batch(self) -> int:
        return len(self.queries)

    @property
    def group(self) -> int:
        return self.heads_q // self.heads_kv

    @property
    def dims(self) -> tuple[int, int]:
        """Head sizes of K and of V."""
        return self.head_dim, self.v_dim or self.head_dim

    @property
    def name(self) -> str:
        def lengths(values):
            return f"{values[0]}" if len(set(values)) == 1 else f"{min(values)}..{max(values)}"

        extras = [f"p{self.page_size}"] if self.page_size else []
        extras += [f"w{self.window}"] if self.window else []
        extras += ["sink"] if self.sink else []
        extras += [f"cap{self.softcap:g}"] if self.softcap else []
        extras += [f"{self.mask[0]}{self.mask[1]}"] if self.mask else [] if self.causal else ["full"]
        sizes = f"B{self.batch} q{lengths(self.queries)} k{lengths(self.keys)}"
        dims = f"{self.head_dim}/{self.v_dim}" if self.v_dim else f"{self.head_dim}"
        heads = f"{self.heads_q}/{self.heads_kv} D{dims}"
        return " ".join((sizes, heads, self.form, *extras))

    @property
    def visible_keys(self) -> tuple[int, ...]:
        """Keys of each request that some query of it sees."""
        if self.window is None:
            return self.keys
        return tuple(
            min(k, self.window - 1 + q) if q else 0 for q, k in zip(self.queries, self.keys, strict=True)
        )

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V for one key."""
        return self._kv_bytes(CODE_BITS.get(self.kind, 8 * ELEMENT_BYTES["bfloat16"]))

    def _kv_bytes(self, bits: float) -> int:
        """As ``kv_bytes``, of numbers of this many bits."""
        return round((self.head_dim if self.shared_kv else sum(self.dims)) * self.heads_kv * bits / 8)

    @property
    def qo_bytes(self) -> int:
        """Bytes of Q and O."""
        return sum(self.queries) * self.heads_q * sum(self.dims) * ELEMENT_BYTES["bfloat16"]

    @property
    def copies(self) -> int:
        """How often each tensor counts: with its gradient where that is computed."""
        return 2 if self.kind in BACKWARD else 1

    @property
    def bytes(self) -> int:
        """Bytes that the call must move: Q, O and the visible part of K and V, each once; and their gradients."""
        return self.copies * (sum(self.visible_keys) * self.kv_bytes + self.qo_bytes)

    @property
    def held_bytes(self) -> int:
        """Bytes of all tensors of the shape."""
        keys = max(self.keys) * self.batch if self.form in ("plain", "ranges") else sum(self.keys)
        wide = self._kv_bytes(16) if self.kind in CODE_BITS else 0  # peers read the same values in bf16
        return self.copies * (keys * (self.kv_bytes + wide) + self.qo_bytes)

    @property
    def flops(self) -> int:
        pairs = sum(self._pairs(q, k) for q, k in zip(self.queries, self.keys, strict=True))
        qk, v = self.dims
        # Backward, S is made again, and dP, dV, dQ and dK beside it.
        columns = 3 * qk + 2 * v if self.kind in BACKWARD else qk + v
        return 2 * pairs * self.heads_q * columns

    def _pairs(self, queries: int, keys: int) -> int:
        """Count the pairs of a query and a key that it sees. The last query stands at the last key."""
        if self.mask is not None:
            return pairs_of(self.mask, queries)
        if not self.causal:
            return queries * keys
        most = keys if self.window is None else min(keys, self.window)
        first = keys - queries + 1  # keys up to the first query's own
        rising = max(0, min(queries, most - first))  # queries that see fewer than ``most``
        return rising * first + rising * (rising - 1) // 2 + (queries - rising) * most


@dataclass(frozen=True)
class RowShape:
    """A call of ``softmax`` or ``softmax_topk`` (kind "top-k") on a matrix. dtype: name."""

    kind: str
    rows: int
    length: int
    dtype: str
    k: int = 0
    renormalize: bool = False

    @property
    def name(self) -> str:
        kind = f" k{self.k}" if self.k else ""
        return f"{self.rows}x{self.length}{kind} {self.dtype}{' renormalized' if self.renormalize else ''}"

    @property
    def bytes(self) -> int:
        read = self.rows * self.length * ELEMENT_BYTES[self.dtype]
        return read + self.rows * self.k * PROBABILITY_BYTES if self.k else 2 * read

    @property
    def held_bytes(self) -> int:
        return self.bytes

    @property
    def flops(self) -> int:
        return 0


Shape = AttentionShape | RowShape


def to_json(shape: Shape) -> dict:
    return asdict(shape)


def from_json(fields: dict) -> Shape:
    if "length" in fields:
        return RowShape(**fields)
    lengths = {name: tuple(fields[name]) for name in ("queries", "keys", "mask") if fields.get(name)}
    return AttentionShape(**(fields | lengths))
