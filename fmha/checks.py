"""Checks of single arguments of an attention call; each raises TypeError or ValueError with the argument, its value and
what is allowed. Nothing is launched or written, and no argument is modified.
"""

from __future__ import annotations

import torch

from warpspec.common.checks import check_bool, check_int, check_rows, check_tensor, kind_of, shape_of
from warpspec.common.hardware import FP32_BYTES
from warpspec.common.outputs import check_apart, check_elements, refuse_negated
from warpspec.fmha.block_mask import OWN_PATTERNS, WORD_BITS
from warpspec.fmha.heads import CLASSES, LARGEST, LATENT, STEP, supported
from warpspec.fmha.line import KEPT_WORDS
from warpspec.fmha.lists import ORDER_WORDS
from warpspec.fmha.operands import Operands, Options
from warpspec.fmha.quantized import FORMATS, head_size
from warpspec.fmha.tree import MOST_DRAFTS
from warpspec.fmha.values import POSITION_LIMIT

HEAD_SIZES = f"a multiple of {STEP} up to {LARGEST}, or {CLASSES[-1]}"
DTYPES = (torch.bfloat16, torch.float16)
SINK_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
BIAS_DTYPES = (torch.bfloat16, torch.float32)
SIZE_LIMIT = 2**31 - 1  # int32 indices in kernels
MOST_SPLITS = 1024  # of the keys, each with fp32 results of its own in memory
SPLIT_BYTES = 16 << 30  # most memory of these results


def check_kinds(operands: Operands, options: Options) -> None:
    """Raise TypeError for an argument that is not even the right kind of Python object, ValueError for a negated out.

    Separate from the other checks because it runs before torch's dispatcher, whose own messages are less clear.
    """
    for name, tensor in {**operands.inputs, "out": operands.o}.items():
        if not isinstance(tensor, torch.Tensor) and (tensor is not None or name in ("q", "k")):
            raise TypeError(f"{name}: must be a torch.Tensor, got {kind_of(tensor)}")
    if operands.o is not None:
        refuse_negated("out", operands.o)
    for name in ("causal", "normalize", "return_lse", "deterministic", "swizzled"):
        flag = getattr(options, name)
        check_bool(name, flag)
    needed = ("key_stride",) if operands.cu_seqlens_q is None else ("key_stride", "max_seqlen_q")
    for name in ("key_stride", "num_splits", "max_seqlen_q", "max_seqlen_k", "v_dim"):
        value = getattr(options, name)
        if value is not None or name in needed:
            check_int(name, value)
    options.logits.check_kinds()


def check_window(window) -> tuple[int | None, int | None]:
    """(left, right) from a window argument, (None, None) for None; TypeError or ValueError for anything else."""
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window: must be (left, right), each None or an int, got {kind_of(window)}")
    left, right = window
    for side, reach in (("left", left), ("right", right)):
        if reach is not None:
            check_int(f"window {side}", reach, 0, POSITION_LIMIT)
    return left, right


def layout(name: str, operands: Operands) -> tuple[str, ...]:
    """The meaning of the dimensions of q, k or v."""
    if operands.cu_seqlens_q is None:
        return ("batch", "sequence", "heads", "head size")
    if name == "q":
        return ("rows", "heads", "head size")
    return (
        ("keys", "heads", "head size")
        if operands.page_table is None
        else ("pages", "keys", "heads", "head size")
    )


def check_operand(name, tensor, operands):
    """Check q, k or v: number of dimensions, one dtype and device."""
    check_tensor(name, tensor, DTYPES if name == "q" else (*DTYPES, *FORMATS))
    q, dimensions = operands.q, layout(name, operands)
    if tensor.dim() != len(dimensions):
        raise ValueError(
            f"{name}: must have {len(dimensions)} dimensions [{', '.join(dimensions)}], got {shape_of(tensor)}"
        )
    if tensor.dtype not in FORMATS and tensor.dtype != q.dtype:
        raise TypeError(
            f"{name}: dtype must be q's, {q.dtype}, or one of FP8 or NVFP4 (torch.uint8), got {tensor.dtype}"
        )
    if name == "v" and tensor.dtype != operands.k.dtype:
        raise TypeError(f"v: dtype must be k's, {operands.k.dtype}, got {tensor.dtype}")
    if tensor.device != q.device:
        raise ValueError(f"{name}: device must be q's, {q.device}, got {tensor.device}")


def check_heads(q, k, v_dim: int | None = None):
    """Check that head sizes and head counts match. v_dim: the option."""
    heads_q, head_dim = q.shape[-2:]
    if not supported(head_dim) and (head_dim, v_dim) != LATENT:
        raise ValueError(
            f"q: head size must be {HEAD_SIZES} (or {LATENT[0]} with v_dim={LATENT[1]}), got {head_dim} (shape "
            f"{shape_of(q)})"
        )
    if heads_q == 0:
        raise ValueError(f"q: needs at least one head, got shape {shape_of(q)}")
    heads_kv = k.shape[-2]
    if head_size(k) != head_dim:
        raise ValueError(f"k: head size must be q's, {head_dim}, got {head_size(k)} (shape {shape_of(k)})")
    if heads_kv == 0 or heads_q % heads_kv != 0:
        raise ValueError(
            f"k: head count must divide q's, {heads_q}, got {heads_kv} (shape {shape_of(k)}, q {shape_of(q)})"
        )


def check_values_size(v, k) -> int:
    """Check v's head size; its other dimensions are k's. 512 goes only with 512."""
    size, largest = head_size(v), CLASSES[-1]
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"v: shape must be k's but for the head size, {shape_of(k)}, got {shape_of(v)}")
    if not supported(size) or (largest in (size, head_size(k)) and size != head_size(k)):
        raise ValueError(
            f"v: head size must be {HEAD_SIZES} where k's is, too, got {size} (shape {shape_of(v)}, k {shape_of(k)})"
        )
    return size


def check_shared_size(v_dim, v, head_dim) -> int:
    """Check V's head size where V is the first part of K's rows."""
    if v is not None:
        raise ValueError(f"v_dim: must be None where v is given, got {v_dim}")
    if v_dim != head_dim and (head_dim, v_dim) != LATENT:
        raise ValueError(
            f"v_dim: must be q's head size, {head_dim}, or {LATENT[1]} with one of {LATENT[0]}, got {v_dim}"
        )
    return v_dim


def check_sink(sink, heads_q, device):
    check_tensor("sink", sink, SINK_DTYPES, None, device)
    if tuple(sink.shape) != (heads_q,):
        raise ValueError(f"sink: shape must be [Hq={heads_q}], got {shape_of(sink)}")


def check_bias(bias, full, device):
    check_tensor("bias", bias, BIAS_DTYPES, None, device)
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
            f"got {shape_of(bias)}"
        )


def check_per_request(name, tensor, batch, device):
    """Check int32 [B] or None: a value for each batch row or request."""
    if tensor is None:
        return
    check_tensor(name, tensor, (torch.int32,), None, device)
    if tuple(tensor.shape) != (batch,):
        raise ValueError(f"{name}: shape must be [B={batch}], got {shape_of(tensor)}")


def check_tree(operands: Operands, options: Options, seq_q: int) -> None:
    """Check the words of a draft tree and the arguments they require. seq_q: the most queries of a request."""
    q, tree = operands.q, operands.tree
    check_tensor("tree", tree, (torch.int64,), None, q.device)
    rows = shape_of(q)[: q.dim() - 2]
    if shape_of(tree) != rows:
        dimensions = "[T]" if q.dim() == 3 else "[B, Sq]"
        raise ValueError(f"tree: shape must be {dimensions} = {rows}, got {shape_of(tree)}")
    if not options.causal or options.key_stride != 1:
        raise ValueError(
            f"tree: needs causal=True and key_stride 1, got causal={options.causal}, key_stride={options.key_stride}"
        )
    if seq_q > MOST_DRAFTS:
        raise ValueError(f"tree: a request may have at most {MOST_DRAFTS} queries, got {seq_q}")


def check_ranges(operands: Operands, options: Options) -> None:
    """Check the key ranges of queries and the arguments they require."""
    q, ranges = operands.q, operands.ranges
    check_tensor("ranges", ranges, (torch.int32,), None, q.device)
    wanted = [*shape_of(q)[: q.dim() - 2], 2]
    if shape_of(ranges) != wanted:
        dimensions = "[T, 2]" if q.dim() == 3 else "[B, Sq, 2]"
        raise ValueError(f"ranges: shape must be {dimensions} = {wanted}, got {shape_of(ranges)}")
    if not options.causal or options.key_stride != 1:
        raise ValueError(
            f"ranges: needs causal=True and key_stride 1, got causal={options.causal}, key_stride={options.key_stride}"
        )
    if operands.tree is not None:
        raise ValueError(f"ranges: must be None with a tree, got shape {shape_of(ranges)}")


def check_blocks(operands: Operands, options: Options, sizes: tuple[int, int, int, int]) -> None:
    """Check the tensors of a ``BlockMask`` and the arguments it excludes. sizes: B, Hq, Sq, Sk."""
    if operands.tree is not None:
        raise ValueError("block_mask: must be None with tree")
    batch, heads, seq_q, seq_k = sizes
    size = (options.block_queries, options.block_keys)
    rows, columns = (max(-(-n // each), 1) for n, each in zip((seq_q, seq_k), size, strict=True))
    # Lists of packed requests are for the longest ones, which the host does not know, and those of pages for as many
    # keys as the caller likes: requests see nothing past them.
    if operands.kv_visits.dim() == 5:
        if operands.cu_seqlens_q is not None:
            rows = max(operands.kv_visits.shape[2], 1)
        if operands.cu_seqlens_q is not None or operands.page_table is not None:
            columns = max(operands.kv_visits.shape[3], 1)
    wanted = {
        "kv_visits": (rows, columns, 2),
        "kv_counts": (rows, 2),
        **({} if operands.kv_order is None else {"kv_order": (rows, ORDER_WORDS)}),
        "q_visits": (columns, rows, 3),
        "q_counts": (columns, 4),
    }
    if operands.patterns is not None:
        words = [-(-n // WORD_BITS) for n in size]
        wanted |= {"patterns": (size[0], words[1]), "q_patterns": (size[1], words[0])}
    for name, last in wanted.items():
        tensor = getattr(operands, name)
        check_tensor(f"block_mask: {name}", tensor, (torch.int32,), None, operands.q.device)
        shape, listed = tuple(tensor.shape), "patterns" not in name
        first = shape[: -len(last)]
        fits = (
            len(first) == 2 and first[0] in (1, batch) and first[1] in (1, heads)
            if listed
            else len(first) == 1 and first[0] >= OWN_PATTERNS
        )
        if shape[-len(last) :] != last or not fits:
            begin = f"B={batch} or 1, Hq={heads} or 1" if listed else f"n >= {OWN_PATTERNS}"
            raise ValueError(
                f"block_mask: {name}: shape must be [{begin}, {', '.join(map(str, last))}], got {shape_of(tensor)}"
            )
    if len({tuple(getattr(operands, name).shape[:2]) for name in wanted if "patterns" not in name}) > 1:
        raise ValueError("block_mask: lists must all have the same batch rows and heads")
    if operands.patterns is not None and len(operands.patterns) != len(operands.q_patterns):
        numbers = len(operands.patterns), len(operands.q_patterns)
        raise ValueError(
            f"block_mask: patterns and q_patterns must be as many, got {numbers[0]} and {numbers[1]}"
        )


def check_splits(num_splits: int, rows: int | torch.SymInt, columns: int) -> None:
    """Raise ValueError if the results of num_splits splits take more memory than SPLIT_BYTES. num_splits: in range.
    rows: rows of o in one split, those of all heads. columns: fp32 numbers of a row."""
    each = rows * columns * FP32_BYTES
    if num_splits > 1 and num_splits * each > SPLIT_BYTES:
        raise ValueError(
            f"num_splits: {num_splits} splits of this call need {num_splits * each / 1e9:.1f} GB for their results, "
            f"allowed are {SPLIT_BYTES / 1e9:.1f} GB: at most {max(SPLIT_BYTES // each, 1)} splits"
        )


def check_cuts(operands: Operands, options: Options) -> None:
    """Check the cuts of a schedule."""
    if operands.cuts is None or options.cut_for is None:
        raise ValueError("schedule: cuts and what they were made for must both be given, or neither")
    check_tensor("schedule", operands.cuts, (torch.int32,), None, operands.q.device)
    if operands.cuts.dim() != 3 or operands.cuts.shape[2] != KEPT_WORDS or not operands.cuts.is_contiguous():
        raise ValueError(
            f"schedule: cuts must be contiguous, [CTAs, rounds, {KEPT_WORDS}], got {shape_of(operands.cuts)}"
        )


def check_starts(name, tensor, device, batch=None) -> int:
    """Check cu_seqlens, int32 [B + 1], and return B. batch: the required B, if known."""
    check_tensor(name, tensor, (torch.int32,), None, device)
    if tensor.dim() != 1 or tensor.shape[0] == 0 or batch not in (None, tensor.shape[0] - 1):
        wanted = "[B + 1]" if batch is None else f"[B + 1 = {batch + 1}]"
        raise ValueError(f"{name}: shape must be {wanted}, got {shape_of(tensor)}")
    return tensor.shape[0] - 1


def check_table(operands, batch) -> int:
    """Check a page table and return the page size."""
    k, page_table = operands.k, operands.page_table
    check_tensor("page_table", page_table, (torch.int32,), None, operands.q.device)
    if page_table.dim() != 2 or page_table.shape[0] != batch:
        raise ValueError(f"page_table: shape must be [B={batch}, max_pages], got {shape_of(page_table)}")
    if operands.kv_lengths is None:
        raise ValueError("page_table: needs kv_lengths, got kv_lengths=None")
    if k.shape[1] == 0:
        raise ValueError(f"k: pages must hold at least one key, got shape {shape_of(k)}")
    return k.shape[1]


def check_out(operands, dtype, memory, size):
    """Check out: q's device and shape, except V's head size; no two elements share memory, and it overlaps no input."""
    q, out = operands.q, operands.o
    check_tensor("out", out, (dtype,), None, q.device)
    shape = [*q.shape[:-1], size]
    if shape_of(out) != shape:
        dimensions = "[T, Hq, D]" if q.dim() == 3 else "[B, Sq, Hq, D]"
        raise ValueError(f"out: shape must be {dimensions} = {shape}, got {shape_of(out)}")
    check_rows("out", out, memory)
    if out.numel() == 0:
        return
    check_elements("out", out)
    if memory:
        check_apart({"out": out}, operands.inputs)
