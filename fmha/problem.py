"""The attention problem: every argument checked once, every size derived once.

``AttentionProblem.check`` takes the tensors and options of a call of ``warpspec.fmha.attention`` or
``attention_varlen``, raises ``TypeError`` (wrong kind of object or dtype) or ``ValueError`` (wrong value) with the
argument's name, what it was and what is allowed, and returns a frozen, hashable record without tensors. Nothing has
been launched or written when it raises, and no argument is ever modified.

Checks of single arguments: see checks.py; of values held by tensors (lengths, positions, page numbers): values.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from warpspec.common.checks import check_int, check_rows, shape_of
from warpspec.common.hardware import TMA_ALIGNMENT
from warpspec.common.operands import FLOAT32
from warpspec.fmha import values
from warpspec.fmha.block_mask import Visits
from warpspec.fmha.checks import (
    MOST_SPLITS,
    SIZE_LIMIT,
    check_bias,
    check_blocks,
    check_cuts,
    check_heads,
    check_kinds,
    check_operand,
    check_out,
    check_per_request,
    check_ranges,
    check_shared_size,
    check_sink,
    check_splits,
    check_starts,
    check_table,
    check_tree,
    check_values_size,
    check_window,
)
from warpspec.fmha.features import Format, Mask, RequestLayout, dtype_name
from warpspec.fmha.heads import HeadSizes
from warpspec.fmha.logits import BiasLayout, LogitOptions
from warpspec.fmha.operands import INPUTS, Operands, Options
from warpspec.fmha.quantized import SCALES, check_block_scales, check_scales
from warpspec.fmha.values import POSITION_LIMIT, are_checked, check_values

VISITED = slice(Options._fields.index("block_visits"), Options._fields.index("block_visitors") + 1)
DIGITS_Q = 4  # binary ones of the number of packed queries that plans look at


@dataclass(frozen=True)
class AttentionProblem:
    """Sizes and switches of one attention call: what a kernel may rely on.

    A kernel also gets the problem's tensors: q, k and v (k again if shared) with TMA's alignment, sink (in sink_dtype),
    kv_lengths and q_start contiguous, and outputs of the shapes below to write: o, lse with return_lse, row_max and
    row_sum without normalize. It writes every row of o; with packed queries, only those that belong to a request.
    ``mask.key_range`` says which keys a row sees. If ``is_empty``, no kernel is called.
    """

    batch: int  # B >= 0; with packed queries, the number of requests
    seq_q: int  # Sq >= 0; with packed queries max_seqlen_q, a hint
    seq_k: int  # Sk >= 0; with a page table max_pages * page_size; with packed queries max_seqlen_k if given, a hint
    heads_q: int  # Hq >= 1, a multiple of heads_kv; query head h reads KV head h // group
    heads_kv: int  # Hkv >= 1
    head_dim: int  # D of q and k (``heads.supported``)
    device: torch.device  # the device of every tensor
    logits: LogitOptions  # checked
    mask: Mask = Mask()
    requests: RequestLayout = RequestLayout()
    format: Format = Format()
    v_dim: int = 0  # head size of v and o, 0 for head_dim
    # p - left <= j <= p + right, as far as the sides hide keys (``hiding_window``); None: unbounded, otherwise
    window_left: int | None = None  # 0..POSITION_LIMIT
    window_right: int | None = None
    normalize: bool = True  # False: o in fp32 un-normalised, row_max and row_sum
    return_lse: bool = False  # never where normalize is False
    has_sink: bool = False  # never where normalize is False
    sink_dtype: str = FLOAT32  # as kernels take the sink
    bias: BiasLayout | None = None
    bias_rows: str | None = None  # "aligned" (for TMA), "contiguous" or "strided"
    # T, of packed queries. Problems that differ in it alone, within an eighth, are equal, so that a plan serves many;
    # least_q is T's first binary digits, no larger than T.
    total_q: int | None = field(default=None, compare=False)
    least_q: int | None = None
    # With packed queries over codes in pages: most keys of a request, by the table; over packed ones: most keys of all
    # requests, T of k rounded up as least_q is rounded down.
    most_k: int | None = None
    num_splits: int | None = None  # 1 to MOST_SPLITS; None: the kernel chooses
    block_heads: bool = False  # query heads have each their own lists of blocks (``block_mask``)
    visited: Visits | None = None  # what is known of these lists' lengths
    cut_for: str | None = None  # as in ``Options``

    @property
    def heads(self) -> HeadSizes:
        """Head sizes, and what follows from them."""
        return HeadSizes(self.head_dim, self.v_dim or self.head_dim)

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads_q // self.heads_kv

    @property
    def dtype(self) -> torch.dtype:
        """dtype of q, and of k and v that are not quantised: bfloat16 or float16."""
        return getattr(torch, self.format.dtype)

    @property
    def is_empty(self) -> bool:
        """There is no query row, or no key: nothing to compute."""
        return self.batch == 0 or self.seq_q == 0 or self.seq_k == 0

    @property
    def rows(self) -> tuple[int, int]:
        """(B, Sq), or (1, T) for packed queries: the shape of queries in q, o and the statistics."""
        return (1, self.total_q) if self.requests.packed_q else (self.batch, self.seq_q)

    @property
    def right(self) -> int | None:
        """The most keys after its own position that a query sees, as far as the host knows; None: any number."""
        if self.mask.causal:
            return 0
        placed = self.window_right is not None or self.requests.has_q_start
        return self.window_right if placed else self.seq_q - 1

    @property
    def o_dtype(self) -> torch.dtype:
        """dtype of o: q's, or fp32 un-normalised."""
        return self.dtype if self.normalize else torch.float32

    @property
    def o_shape(self) -> tuple[int, int, int, int]:
        """[B, Sq, Hq, Dv], or [1, T, Hq, Dv] for packed queries."""
        return (*self.rows, self.heads_q, self.heads.v)

    @property
    def stat_count(self) -> int:
        """fp32 statistics per row that are returned: row_max and row_sum, or lse, or none."""
        return 2 if not self.normalize else int(self.return_lse)

    @property
    def stat_shape(self) -> tuple[int, int, int]:
        """[B, Hq, Sq], of packed queries [1, Hq, T]: shape of lse, row_max and row_sum."""
        batch, rows = self.rows
        return (batch, self.heads_q, rows)

    @classmethod
    def of(cls, q, k, v=None, *, out=None, memory: bool = True, **arguments) -> AttentionProblem:
        """The problem of a call of ``attention`` with these arguments. memory: see ``check``."""
        tensors = {name: arguments.pop(name) for name in INPUTS if name in arguments}
        return cls.check(Operands(q, k, v, out, **tensors), Options.of(**arguments), memory)

    @classmethod
    def check(cls, operands: Operands, options: Options, memory: bool = True) -> AttentionProblem:
        """Check a call and derive its problem. o of the operands is the caller's ``out``.

        memory: False for tensors without storage (tracing): addresses and values go unchecked.
        Raises TypeError or ValueError naming the argument.
        """
        check_kinds(operands, options)
        q, k, v, out = operands.q, operands.k, operands.v, operands.o
        sink, bias = operands.sink, operands.bias
        given = {name: tensor for name, tensor in (("q", q), ("k", k), ("v", v)) if tensor is not None}
        for name, tensor in given.items():
            check_operand(name, tensor, operands)
        check_heads(q, k, options.v_dim)
        for name, tensor in given.items():
            check_rows(name, tensor, memory)
        heads_q, head_dim = q.shape[-2:]
        if options.v_dim is not None:
            v_dim = check_shared_size(options.v_dim, v, head_dim)
        else:
            v_dim = head_dim if v is None else check_values_size(v, k)
        sizes = _rectangle(operands) if operands.cu_seqlens_q is None else _packed(operands, options)
        batch, seq_q, seq_k = sizes["batch"], sizes["seq_q"], sizes["seq_k"]

        logits = options.logits.checked(head_dim)
        window = _check_numbers(options)
        _check_optional(operands, options, (batch, heads_q, seq_q, seq_k), memory)
        if memory and are_checked(q.device):
            _check_values(operands)
        window_left, window_right = window = hiding_window(*window, operands, options.causal)

        problem = cls(
            **sizes,
            heads_q=heads_q,
            heads_kv=k.shape[-2],
            head_dim=head_dim,
            v_dim=0 if v_dim == head_dim else v_dim,
            device=q.device,
            logits=logits,
            mask=Mask.of(operands, options._replace(window=window)),
            requests=RequestLayout.of(operands),
            format=Format.of(operands, options),
            window_left=window_left,
            window_right=window_right,
            normalize=options.normalize,
            return_lse=options.return_lse and options.normalize,
            has_sink=sink is not None,
            sink_dtype=sink_dtype(sink),
            **({} if bias is None else {"bias": BiasLayout.of(bias), "bias_rows": _bias_rows(bias, memory)}),
            num_splits=options.num_splits,
            block_heads=operands.kv_visits is not None and operands.kv_visits.shape[1] > 1,
            visited=None if options.block_visits is None else Visits(*options[VISITED]),
            cut_for=options.cut_for,
        )
        if problem.num_splits is not None:
            check_splits(problem.num_splits, math.prod(problem.stat_shape), problem.heads.v_state)
        if out is not None:
            check_out(operands, problem.o_dtype, memory, v_dim)
        return problem


def _check_numbers(options: Options) -> tuple[int | None, int | None]:
    """Check key_stride, num_splits and window; returns the window's left and right."""
    key_stride, window = options.key_stride, options.window
    check_int("key_stride", key_stride, 1, POSITION_LIMIT)
    if options.num_splits is not None:
        check_int("num_splits", options.num_splits, 1, MOST_SPLITS)
    left, right = check_window(window)
    if key_stride != 1 and (left is not None or right is not None):
        raise ValueError(f"window: needs key_stride 1, got key_stride={key_stride} with window={window}")
    return left, right


def hiding_window(
    left: int | None, right: int | None, operands: Operands, causal: bool
) -> tuple[int | None, int | None]:
    """A window's sides, None for one that hides no key, so that kernels spare what it costs them.

    A causal mask hides all that a right side would. Otherwise the shapes decide, which hold for every call that a CUDA
    graph repeats; max_seqlen_q and max_seqlen_k are hints and do not. n queries stand at the positions L - n to L - 1
    of their L keys, unless q_start says where; drafts of a tree stand there, too.
    """
    if causal:
        right = None
    q, k, table = operands.q, operands.k, operands.page_table
    queries, keys = q.shape[-3], k.shape[-3] if table is None else k.shape[-3] * table.shape[1]
    if operands.q_start is not None or not (isinstance(queries, int) and isinstance(keys, int)):
        return left, right  # (a symbol, of a call that is traced, is compared with nothing)
    left = None if left is None or left >= keys - 1 else left
    return left, None if right is None or right >= queries - 1 else right


def _check_optional(operands: Operands, options: Options, sizes: tuple, memory: bool) -> None:
    """Check the tensors that a call need not have. sizes: (B, Hq, Sq, Sk). memory: as in ``AttentionProblem.check``."""
    batch, heads_q, seq_q, _ = sizes
    sink, device = operands.sink, operands.q.device
    if sink is not None:
        check_sink(sink, heads_q, device)
        if not options.normalize:
            raise ValueError(
                "sink: must be None with normalize=False (give it to merge(), which applies it once), "
                f"got shape {shape_of(sink)}"
            )
    if operands.bias is not None:
        check_bias(operands.bias, sizes, device)
    for name in ("kv_lengths", "q_start"):
        check_per_request(name, getattr(operands, name), batch, device)
    check_scales(operands, batch, operands.k.shape[-2], device)
    check_block_scales(operands, options.swizzled, memory)
    if operands.tree is not None:
        check_tree(operands, options, seq_q)
    if operands.ranges is not None:
        check_ranges(operands, options)
    if operands.kv_visits is not None:
        check_blocks(operands, options, sizes)
    if operands.cuts is not None or options.cut_for is not None:
        check_cuts(operands, options)


def sink_dtype(sink: torch.Tensor | None) -> str:
    """Name of the dtype in which kernels take a sink: its own unless that is float64."""
    return FLOAT32 if sink is None or sink.dtype is torch.float64 else dtype_name(sink.dtype)


def _check_values(operands: Operands) -> None:
    """``check_values`` for a call."""
    q, k, page_table = operands.q, operands.k, operands.page_table
    page_size = None if page_table is None else k.shape[1]
    starts = (
        ("cu_seqlens_q", operands.cu_seqlens_q, len(q), "q"),
        ("cu_seqlens_k", operands.cu_seqlens_k, len(k), "k"),
    )
    seq_k = k.shape[1] if page_table is None else page_table.shape[1] * page_size
    check_values(
        operands.kv_lengths,
        operands.q_start,
        page_table,
        seq_k=seq_k,
        pages=k.shape[0],
        page_size=page_size,
        starts=[(name, tensor, rows, packed) for name, tensor, rows, packed in starts if tensor is not None],
    )
    if operands.ranges is not None:
        values.check_ranges(operands, seq_k)
    for name in SCALES:
        values.check_scale(name, getattr(operands, name))


def _rectangle(operands: Operands) -> dict:
    """Fields of the problem: sizes of a call with the same number of queries in each batch row."""
    q, k, page_table = operands.q, operands.k, operands.page_table
    batch, seq_q = q.shape[:2]
    if page_table is not None:
        seq_k = check_table(operands, batch) * page_table.shape[1]
    else:
        seq_k = k.shape[1]
        if k.shape[0] != batch:
            raise ValueError(f"k: batch must be q's, {batch}, got {k.shape[0]} (shape {shape_of(k)})")
    for name, size in (("q", seq_q), ("k", seq_k)):
        if size > POSITION_LIMIT:
            raise ValueError(f"{name}: sequence must be at most {POSITION_LIMIT}, got {size}")
    return {"batch": batch, "seq_q": seq_q, "seq_k": seq_k}


def _packed(operands: Operands, options: Options) -> dict:
    """Fields of the problem: sizes of a call with packed queries.

    The hints are clipped to what there is, so that seq_q and seq_k are 0 just where there is no query or no key.
    """
    k, page_table, cu_seqlens_k = operands.k, operands.page_table, operands.cu_seqlens_k
    total_q = operands.q.shape[0]
    batch = check_starts("cu_seqlens_q", operands.cu_seqlens_q, operands.q.device)
    if page_table is not None:
        if cu_seqlens_k is not None:
            raise ValueError(
                "cu_seqlens_k: must be None with a page_table (kv_lengths says how many keys a request has), "
                f"got shape {shape_of(cu_seqlens_k)}"
            )
        most_keys = check_table(operands, batch) * page_table.shape[1]
    else:
        if cu_seqlens_k is None:
            raise ValueError("cu_seqlens_k: must be given, or a page_table with kv_lengths; got neither")
        if operands.kv_lengths is not None:
            raise ValueError(
                "kv_lengths: must be None with cu_seqlens_k, which says how many keys a request has, "
                f"got shape {shape_of(operands.kv_lengths)}"
            )
        check_starts("cu_seqlens_k", cu_seqlens_k, operands.q.device, batch)
        most_keys = k.shape[0]
    for name, size in (("q", total_q), ("k", most_keys)):
        if size > POSITION_LIMIT:
            raise ValueError(f"{name}: must hold at most {POSITION_LIMIT} rows, got {size}")
    hint_k = most_keys if options.max_seqlen_k is None else options.max_seqlen_k
    for name, hint in (("max_seqlen_q", options.max_seqlen_q), ("max_seqlen_k", hint_k)):
        check_int(name, hint, 0, SIZE_LIMIT)
    return {
        "batch": batch,
        "seq_q": min(max(options.max_seqlen_q, 1), total_q),
        "seq_k": min(max(hint_k, 1), most_keys),
        "total_q": total_q,
        "least_q": _coarse(total_q),
        "most_k": _most_codes(operands, most_keys),
    }


def _most_codes(operands: Operands, most_keys: int) -> int | None:
    """The field most_k of a problem with packed queries."""
    if operands.k.dtype == operands.q.dtype:
        return None
    if operands.page_table is not None:
        return most_keys
    return _coarse(most_keys, up=True)


def _coarse(rows: int | torch.SymInt, up: bool = False) -> int | torch.SymInt:
    """A number rounded down, or up, to DIGITS_Q binary digits. A symbol, of a call that is traced, stays as it is:
    rounding would make it a number, and each other number would be traced again."""
    if not isinstance(rows, int):
        return rows
    spare = max(rows.bit_length() - DIGITS_Q, 0)
    return -(-rows >> spare) << spare if up else rows >> spare << spare


def _bias_rows(bias, memory) -> str:
    """Field of the problem: whether TMA can read the rows of a bias."""
    aligned = not memory or bias.data_ptr() % TMA_ALIGNMENT == 0
    for dim in range(3):
        aligned &= bias.shape[dim] <= 1 or bias.stride(dim) * bias.element_size() % TMA_ALIGNMENT == 0
    contiguous = bias.shape[3] <= 1 or bias.stride(3) == 1
    return "strided" if not contiguous else "aligned" if aligned else "contiguous"
