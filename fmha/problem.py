"""The attention problem: every argument checked once, every size derived once.

``AttentionProblem.check`` takes the tensors and options of a call of ``warpspec.fmha.attention``, raises
``TypeError`` (wrong kind of object or dtype) or ``ValueError`` (wrong value) with the argument's name, what
it was and what is allowed, and returns a frozen, hashable record without tensors. Nothing has been launched
or written when it raises, and no argument is ever modified.

Values held by tensors (kv_lengths, q_start, page_table): see values.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from warpspec.common.hardware import TMA_ALIGNMENT
from warpspec.fmha.operands import INPUTS, Operands, Options
from warpspec.fmha.values import POSITION_LIMIT, are_checked, check_values

HEAD_DIMS = (64, 128, 256, 512)
DTYPES = (torch.bfloat16, torch.float16)
SINK_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
BIAS_DTYPES = (torch.bfloat16, torch.float32)
SIZE_LIMIT = 2**31 - 1  # int32 indices in kernels


@dataclass(frozen=True)
class AttentionProblem:
    """Sizes and switches of one attention call: what a kernel may rely on.

    With it a kernel gets the tensors the problem was made from: q, k and v (k again where shared) with TMA's
    alignment, sink as contiguous fp32, kv_lengths and q_start contiguous, and outputs of the shapes below to
    write completely: o, lse with return_lse, row_max and row_sum without normalize. Which keys a row sees is
    ``mask.key_range``. Where ``is_empty``, no kernel is called.
    """

    batch: int  # B >= 0
    seq_q: int  # Sq >= 0
    seq_k: int  # Sk >= 0; with a page table max_pages * page_size
    heads_q: int  # Hq >= 1, a multiple of heads_kv; query head h reads KV head h // group
    heads_kv: int  # Hkv >= 1
    head_dim: int  # D, one of HEAD_DIMS, of q, k and v alike
    dtype: torch.dtype  # of q, k and v: bfloat16 or float16
    device: torch.device  # of every tensor
    scale: float  # finite; logit = scale * q.k + bias
    causal: bool = False  # key j visible when (j + 1) * key_stride - 1 <= p
    window_left: int | None = None  # p - left <= j; None: unbounded, otherwise 0..POSITION_LIMIT
    window_right: int | None = None  # j <= p + right; likewise
    key_stride: int = 1  # >= 1; above 1 there is no window
    normalize: bool = True  # False: o in fp32 un-normalised, row_max and row_sum
    return_lse: bool = False  # never where normalize is False
    shared_kv: bool = False  # v was None: V is K
    has_sink: bool = False  # never where normalize is False
    has_bias: bool = False
    bias_dtype: torch.dtype | None = None  # one of BIAS_DTYPES
    bias_heads: bool = False  # query heads have each their own bias
    bias_batches: bool = False  # batch rows have each their own bias
    bias_rows: str | None = None  # "aligned" (for TMA), "contiguous" or "strided"
    has_kv_lengths: bool = False  # otherwise L = Sk for every batch row
    has_q_start: bool = False  # otherwise query i of batch row b stands at p = L[b] - Sq + i
    packed_q: bool = False  # q is [1, T, Hq, D]; batch, seq_q: requests, most queries of one (a hint)
    packed_k: bool = False  # k and v are [1, Tk, Hkv, D]; seq_k: most keys of a request (a hint)
    total_q: int | None = None  # T, of packed queries
    page_size: int | None = None  # keys to a page; None: no page table
    num_splits: int | None = None  # >= 1; None: the kernel chooses

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads_q // self.heads_kv

    @property
    def paged(self) -> bool:
        """K and V are reached through a page table."""
        return self.page_size is not None

    @property
    def is_empty(self) -> bool:
        """There is no query row, or no key: nothing to compute."""
        return self.batch == 0 or self.seq_q == 0 or self.seq_k == 0

    @property
    def o_dtype(self) -> torch.dtype:
        """dtype of o: q's, or fp32 un-normalised."""
        return self.dtype if self.normalize else torch.float32

    @property
    def o_shape(self) -> tuple[int, int, int, int]:
        """[B, Sq, Hq, D]."""
        return (self.batch, self.seq_q, self.heads_q, self.head_dim)

    @property
    def stat_count(self) -> int:
        """fp32 statistics per row that are returned: row_max and row_sum, or lse, or none."""
        return 2 if not self.normalize else int(self.return_lse)

    @property
    def stat_shape(self) -> tuple[int, int, int]:
        """[B, Hq, Sq]: shape of lse, row_max and row_sum."""
        return (self.batch, self.heads_q, self.seq_q)

    @classmethod
    def of(cls, q, k, v=None, *, out=None, memory: bool = True, **arguments) -> AttentionProblem:
        """The problem of a call of ``attention`` with these arguments, of the same names. memory: see ``check``."""
        tensors = {name: arguments.pop(name) for name in INPUTS if name in arguments}
        return cls.check(Operands(q, k, v, out, **tensors), Options(**arguments), memory)

    @classmethod
    def check(cls, operands: Operands, options: Options, memory: bool = True) -> AttentionProblem:
        """Check a call and derive its problem. o of the operands is the caller's ``out``.

        memory: False for tensors without storage (tracing): addresses and values go unchecked.
        Raises TypeError or ValueError naming the argument.
        """
        check_kinds(operands, options)
        q, k, v, out = operands.q, operands.k, operands.v, operands.o
        sink, bias = operands.sink, operands.bias
        kv_lengths, q_start, page_table = operands.kv_lengths, operands.q_start, operands.page_table
        scale, causal, window, key_stride, normalize, return_lse, num_splits, *_ = options
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if tensor is not None:
                _check_operand(name, tensor, q, memory)
        batch, seq_q, heads_q, head_dim = q.shape
        if head_dim not in HEAD_DIMS:
            raise ValueError(f"q: head size must be one of {HEAD_DIMS}, got {head_dim} (shape {_shape(q)})")
        if heads_q == 0:
            raise ValueError(f"q: needs at least one head, got shape {_shape(q)}")
        heads_kv = k.shape[2]
        if k.shape[3] != head_dim:
            raise ValueError(f"k: head size must be q's, {head_dim}, got {k.shape[3]} (shape {_shape(k)})")
        if heads_kv == 0 or heads_q % heads_kv != 0:
            raise ValueError(
                f"k: head count must divide q's, {heads_q}, got {heads_kv} (shape {_shape(k)}, q {_shape(q)})"
            )
        if v is not None and v.shape != k.shape:
            raise ValueError(f"v: shape must be k's, {_shape(k)}, got {_shape(v)}")

        page_size = None
        if page_table is not None:
            _check_tensor("page_table", page_table, (torch.int32,), q.device)
            if page_table.dim() != 2 or page_table.shape[0] != batch:
                raise ValueError(
                    f"page_table: shape must be [B={batch}, max_pages], got {_shape(page_table)}"
                )
            if kv_lengths is None:
                raise ValueError("page_table: needs kv_lengths, got kv_lengths=None")
            page_size = k.shape[1]
            if page_size == 0:
                raise ValueError(f"k: pages must hold at least one key, got shape {_shape(k)}")
            seq_k = page_table.shape[1] * page_size
        else:
            seq_k = k.shape[1]
            if k.shape[0] != batch:
                raise ValueError(f"k: batch must be q's, {batch}, got {k.shape[0]} (shape {_shape(k)})")
        for name, size in (("q", seq_q), ("k", seq_k)):
            if size > POSITION_LIMIT:
                raise ValueError(f"{name}: sequence must be at most {POSITION_LIMIT}, got {size}")

        scale = _check_scale(scale, head_dim)
        _check_within("key_stride", key_stride, 1, POSITION_LIMIT)
        if num_splits is not None:
            _check_within("num_splits", num_splits, 1, SIZE_LIMIT)
        window_left, window_right = check_window(window)
        if key_stride != 1 and (window_left is not None or window_right is not None):
            raise ValueError(f"window: needs key_stride 1, got key_stride={key_stride} with window={window}")

        if sink is not None:
            _check_sink(sink, heads_q, q.device)
            if not normalize:
                raise ValueError(
                    "sink: must be None with normalize=False (give it to merge(), which applies it once), "
                    f"got shape {_shape(sink)}"
                )
        if bias is not None:
            _check_bias(bias, (batch, heads_q, seq_q, seq_k), q.device)
        _check_per_batch("kv_lengths", kv_lengths, batch, q.device)
        _check_per_batch("q_start", q_start, batch, q.device)
        if memory and are_checked(q.device):
            sizes = dict(seq_k=seq_k, pages=k.shape[0], page_size=page_size)
            check_values(kv_lengths, q_start, page_table, **sizes)

        problem = cls(
            batch=batch,
            seq_q=seq_q,
            seq_k=seq_k,
            heads_q=heads_q,
            heads_kv=heads_kv,
            head_dim=head_dim,
            dtype=q.dtype,
            device=q.device,
            scale=scale,
            causal=causal,
            window_left=window_left,
            window_right=window_right,
            key_stride=key_stride,
            normalize=normalize,
            return_lse=return_lse and normalize,
            shared_kv=v is None,
            has_sink=sink is not None,
            has_bias=bias is not None,
            **({} if bias is None else _bias_layout(bias, memory)),
            has_kv_lengths=kv_lengths is not None,
            has_q_start=q_start is not None,
            page_size=page_size,
            num_splits=num_splits,
        )
        if out is not None:
            _check_out(out, problem, operands.inputs, memory)
        return problem


def check_kinds(operands: Operands, options: Options) -> None:
    """Raise TypeError for an argument that is not even the right kind of Python object.

    Apart from the other checks because it comes before torch's dispatcher, which would complain in its own words.
    """
    for name, tensor in {**operands.inputs, "out": operands.o}.items():
        if not isinstance(tensor, torch.Tensor) and (tensor is not None or name in ("q", "k")):
            raise TypeError(f"{name}: must be a torch.Tensor, got {_kind(tensor)}")
    for name in ("causal", "normalize", "return_lse"):
        flag = getattr(options, name)
        if not isinstance(flag, bool):
            raise TypeError(f"{name}: must be a bool, got {_kind(flag)}")
    for name in ("key_stride", "num_splits"):
        value = getattr(options, name)
        if value is not None or name == "key_stride":
            _check_is_int(name, value)
    scale = options.scale
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, (int, float))):
        raise TypeError(f"scale: must be a float, got {_kind(scale)}")


def check_window(window) -> tuple[int | None, int | None]:
    """(left, right) of a window argument, (None, None) of None; TypeError or ValueError for anything else."""
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window: must be (left, right), each None or an int, got {_kind(window)}")
    left, right = window
    for side, reach in (("left", left), ("right", right)):
        if reach is not None:
            _check_is_int(f"window {side}", reach)
            _check_within(f"window {side}", reach, 0, POSITION_LIMIT)
    return left, right


def _check_is_int(name, value):
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name}: must be an int, got {_kind(value)}")


def _check_operand(name, tensor, q, memory):
    """q, k or v: [., ., ., D] of one dtype and device, rows TMA can address."""
    _check_tensor(name, tensor, DTYPES, None)
    if tensor.dim() != 4:
        raise ValueError(
            f"{name}: must have 4 dimensions [batch, sequence, heads, head size], got {_shape(tensor)}"
        )
    if tensor.dtype != q.dtype:
        raise TypeError(f"{name}: dtype must be q's, {q.dtype}, got {tensor.dtype}")
    if tensor.device != q.device:
        raise ValueError(f"{name}: device must be q's, {q.device}, got {tensor.device}")
    _check_rows(name, tensor, memory)


def _check_rows(name, tensor, memory):
    """Last dimension contiguous; address and every other stride a multiple of 16 bytes."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: last dimension must be contiguous, got strides {tuple(tensor.stride())}")
    if tensor.numel() == 0:
        return
    for dim in range(tensor.dim() - 1):
        step = tensor.stride(dim) * tensor.element_size()
        if tensor.shape[dim] > 1 and step % TMA_ALIGNMENT != 0:
            raise ValueError(
                f"{name}: rows must be aligned to {TMA_ALIGNMENT} bytes, got a stride of {step} bytes in "
                f"dimension {dim} (strides {tuple(tensor.stride())})"
            )
    if memory and tensor.data_ptr() % TMA_ALIGNMENT != 0:
        raise ValueError(
            f"{name}: rows must be aligned to {TMA_ALIGNMENT} bytes, got an address "
            f"{tensor.data_ptr() % TMA_ALIGNMENT} bytes off (storage offset {tensor.storage_offset()})"
        )


def _check_tensor(name, tensor, dtypes, device):
    if tensor.layout != torch.strided:
        raise TypeError(f"{name}: must be a strided tensor, got layout {tensor.layout}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: dtype must be one of {', '.join(map(str, dtypes))}, got {tensor.dtype}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}: device must be q's, {device}, got {tensor.device}")


def _check_scale(scale, head_dim):
    if scale is None:
        return head_dim**-0.5
    if not math.isfinite(scale):
        raise ValueError(f"scale: must be finite, got {scale}")
    return float(scale)


def _check_within(name, value, lowest, highest):
    if not lowest <= value <= highest:
        raise ValueError(f"{name}: must be within {lowest}..{highest}, got {value}")


def _check_sink(sink, heads_q, device):
    _check_tensor("sink", sink, SINK_DTYPES, device)
    if tuple(sink.shape) != (heads_q,):
        raise ValueError(f"sink: shape must be [Hq={heads_q}], got {_shape(sink)}")


def _check_bias(bias, full, device):
    _check_tensor("bias", bias, BIAS_DTYPES, device)
    batch, heads_q, seq_q, seq_k = full
    shape = tuple(bias.shape)
    if (
        len(shape) != 4
        or shape[0] not in (1, batch)
        or shape[1] not in (1, heads_q)
        or shape[2:] != (seq_q, seq_k)
    ):
        raise ValueError(
            f"bias: shape must be [B={batch} or 1, Hq={heads_q} or 1, Sq={seq_q}, Sk={seq_k}], "
            f"got {_shape(bias)}"
        )


def _bias_layout(bias, memory) -> dict:
    """Fields of the problem: what differs along a dimension, and whether TMA can read it."""
    aligned = not memory or bias.data_ptr() % TMA_ALIGNMENT == 0
    for dim in range(3):
        aligned &= bias.shape[dim] <= 1 or bias.stride(dim) * bias.element_size() % TMA_ALIGNMENT == 0
    contiguous = bias.shape[3] <= 1 or bias.stride(3) == 1
    return {
        "bias_dtype": bias.dtype,
        "bias_heads": bias.shape[1] > 1 and bias.stride(1) != 0,
        "bias_batches": bias.shape[0] > 1 and bias.stride(0) != 0,
        "bias_rows": "strided" if not contiguous else "aligned" if aligned else "contiguous",
    }


def _check_per_batch(name, tensor, batch, device):
    if tensor is None:
        return
    _check_tensor(name, tensor, (torch.int32,), device)
    if tuple(tensor.shape) != (batch,):
        raise ValueError(f"{name}: shape must be [B={batch}], got {_shape(tensor)}")


def _check_out(out, problem, inputs, memory):
    _check_tensor("out", out, (problem.o_dtype,), problem.device)
    if tuple(out.shape) != problem.o_shape:
        raise ValueError(f"out: shape must be [B, Sq, Hq, D] = {list(problem.o_shape)}, got {_shape(out)}")
    _check_rows("out", out, memory)
    if out.numel() == 0:
        return
    # Dimensions in order of stride: each must step over all that the smaller ones span.
    span = 0
    for size, step in sorted(zip(out.shape, out.stride(), strict=True), key=lambda dim: dim[1]):
        if size > 1:
            if step <= span:
                raise ValueError(
                    f"out: elements must not overlap each other, got strides {tuple(out.stride())}"
                )
            span += (size - 1) * step
    if memory:
        check_apart(out, inputs)


def check_apart(out: torch.Tensor, inputs: dict[str, torch.Tensor | None]) -> None:
    """Raise ValueError where ``out`` shares addresses with another of a call's tensors, by name."""
    for name, tensor in inputs.items():
        if tensor is not None and overlap(out, span_bytes(out), tensor, span_bytes(tensor)):
            raise ValueError(
                f"out: must not overlap an input's memory, got one that shares addresses with {name}"
            )


def overlap(a: torch.Tensor, a_bytes: int, b: torch.Tensor, b_bytes: int) -> bool:
    """Whether two tensors of so many bytes (``span_bytes``) share addresses."""
    first, other = a.data_ptr(), b.data_ptr()
    return a_bytes > 0 and b_bytes > 0 and first < other + b_bytes and other < first + a_bytes


def span_bytes(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last; 0 where it has none."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _shape(tensor):
    return list(tensor.shape)


def _kind(value):
    return f"{value!r} ({type(value).__name__})"
