"""Peers of the experts' layer on Hopper: both GEMMs of a layer of random weights, tokens sorted beforehand.

The environment variable WARPSPEC_MOE_PEERS names the folder that ``fetch_moe_peers.py`` makes (triton_kernels,
humming, marlin); those that are not there are no peers; ``peers_of`` has them all. Every expert of a peer has the same
codes in memory of its own, so that one product is a check for all. A peer's weights are made once a model; its function
of sets of tokens sorts them, checks a result and returns what is timed, a function of (x, ids, weights), or None where
it has nothing for this many tokens.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from shared.moe_random import DEVICE
from warpspec.common import nvfp4
from warpspec.moe.permute import sort_tokens

FOLDER_VARIABLE = "WARPSPEC_MOE_PEERS"
MXFP4_BLOCK = 32
E8M0_ONE = 127
SCALE_POWER = -7  # of the random weights: results are of the tokens' size
TOLERANCE = 2e-2
BF16_BYTES = 40 << 30  # of weights, at most
FEW_WARPS, MANY_WARPS, MANY_WARPS_TOKENS = 4, 8, 2048  # of triton_kernels
ALPHA = {"swiglu_oai": 1.702, "swiglu": 1.0}
E2M1 = 2 | 1 << 8 | 1 << 16 | 1 << 49  # Marlin's number of the type: exponent, mantissa, signed, finite
# Rows of K; features; rows.
MARLIN_K_TILE, MARLIN_N_PER_WORKSPACE, MARLIN_BLOCKS = (16, 64, (8, 16, 32, 48, 64))


def has(package: str) -> bool:
    """Whether the folder has a package; it can be imported then."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder or not (Path(folder) / package).is_dir():
        return False
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return True


def random_codes(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed e2m1 codes uint8 [n, k/2], lower half first; their values fp32 [n, k], scales included)."""
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=DEVICE)
    return packed, nvfp4.e2m1_values(nvfp4.unpack(packed)) * 2.0**SCALE_POWER


def check(called: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
    error = ((got.float() - wanted).norm() / wanted.norm()).item()
    if not error < TOLERANCE:
        raise ValueError(f"{called}: off by {error:.3g}")


def triton_kernels(model, num_warps: int) -> Callable | None:
    """OpenAI's matmul_ogs with MXFP4 weights, activation in the first GEMM, weighted sum after the second."""
    if not has("triton_kernels"):
        return None
    from triton_kernels import matmul_ogs as ogs
    from triton_kernels import swiglu
    from triton_kernels.matmul_ogs_details import opt_flags

    opt_flags.reset_opt_flags_constraints()
    opt_flags.update_opt_flags_constraints({"split_k": 1})
    w13, b13, precision13, values13 = triton_weights(model, 2 * model.width, model.hidden, num_warps)
    w2, b2, precision2, values2 = triton_weights(model, model.hidden, model.width, num_warps)
    act = ogs.FusedActivation(
        ogs.FnSpecs("swiglu", swiglu.swiglu_fn, ("alpha", "limit")), (ALPHA[model.activation], model.limit), 2
    )

    def bind(sets):
        if num_warps == MANY_WARPS and len(sets[0][0]) < MANY_WARPS_TOKENS:
            return None  # after fewer warps
        kept = {id(ids): triton_order(model, ids, weights) for _, ids, weights in sets}

        def call(x, ids, weights):
            data, gather, scatter = kept[id(ids)]
            first = dict(gather_indx=gather, precision_config=precision13, fused_activation=act)
            h = ogs.matmul_ogs(x, w13, b13, data, **first)
            second = dict(scatter_indx=scatter, precision_config=precision2, gammas=data.gate_scal)
            return ogs.matmul_ogs(h, w2, b2, data, **second)

        x, _, topk_weights = sets[0]
        y = x[:1].float() @ values13.T
        gate, up = y[:, 0::2].clamp(max=model.limit), y[:, 1::2].clamp(-model.limit, model.limit)
        h = gate * torch.sigmoid(ALPHA[model.activation] * gate) * (up + 1)
        check("triton_kernels", call(*sets[0])[:1], (h @ values2.T) * topk_weights[0].sum())
        return call

    return bind


def triton_weights(model, n: int, k: int, num_warps: int) -> tuple:
    """(weights, bias, precision, the values of one expert's weights): a GEMM's in triton_kernels' layouts."""
    from triton_kernels import matmul_ogs as ogs
    from triton_kernels.tensor import FP4, Storage, convert_layout, wrap_torch_tensor
    from triton_kernels.tensor_details.layout import HopperMXScaleLayout, HopperMXValueLayout

    def repeated(one):
        """The tensor of one expert, for all of them."""
        size = tuple(one.shape[1:])
        own = one.storage.layout
        data = one.storage.data.mT.contiguous().repeat(model.experts, 1, 1).mT
        options = {"num_warps": own.num_warps} if hasattr(own, "num_warps") else {}
        layout = type(own)((model.experts, *size), mx_axis=1, **options)
        return replace(one, storage=Storage(data, layout), shape=[model.experts, *size], shape_max=None)

    codes, values = random_codes(n, k)
    scales = torch.full((1, n, k // MXFP4_BLOCK), E8M0_ONE + SCALE_POWER, dtype=torch.uint8, device=DEVICE)
    w = convert_layout(wrap_torch_tensor(codes[None].mT, dtype=FP4), HopperMXValueLayout, mx_axis=1)
    s = convert_layout(wrap_torch_tensor(scales.mT), HopperMXScaleLayout, mx_axis=1, num_warps=num_warps)
    bias = torch.zeros(model.experts, n, device=DEVICE) if model.biases else None
    return repeated(w), bias, ogs.PrecisionConfig(weight_scale=repeated(s)), values


def triton_order(model, ids: torch.Tensor, topk_weights: torch.Tensor) -> tuple:
    """Tokens' choices sorted by expert, as triton_kernels wants them: (routing, gather, scatter)."""
    from triton_kernels import routing

    flat = ids.flatten()
    order = torch.argsort(flat, stable=True)
    back = torch.argsort(order, stable=True)
    hist = torch.bincount(flat, minlength=model.experts).int()
    data = routing.compute_expt_data(hist, model.experts, flat.numel())
    gammas = topk_weights.flatten()[order].bfloat16()
    return (
        routing.RoutingData(gammas, hist, model.experts, model.choices, data),
        routing.GatherIndx(src_indx=order.int(), dst_indx=back.int()),
        routing.ScatterIndx(src_indx=back.int(), dst_indx=order.int()),
    )


def humming(model) -> Callable | None:
    """Humming's grouped GEMM with MXFP4 weights on rows gathered beforehand; no activation, no sum."""
    if not has("humming"):
        return None
    from humming.layer import HummingLayer

    def layer(n, k):
        """(the layer, the values of its weights)."""
        codes, values = random_codes(n, k)
        made = HummingLayer(
            *(n, k, {"quant_method": "mxfp4"}),
            pad_n_to_multiple=128,  # what its tiles need
            num_experts=model.experts,
            torch_dtype=torch.bfloat16,
        ).cuda()
        made.weight.data.copy_(codes.expand(model.experts, n, k // 2))
        made.weight_scale.data.fill_(E8M0_ONE + SCALE_POWER)
        made.transform()
        return made, values

    w13, values13 = layer(2 * model.width, model.hidden)
    w2, _ = layer(model.hidden, model.width)
    options = {"compute_config": {"gemm_type": "grouped_contiguous"}, "top_k": model.choices}

    def sort(x, ids):
        flat = ids.flatten()
        order = torch.argsort(flat, stable=True)
        ends = torch.bincount(flat, minlength=model.experts).cumsum(0)
        h = torch.randn(len(flat), model.width, device=DEVICE).bfloat16()
        return x[order // model.choices].contiguous(), h, torch.nn.functional.pad(ends, (1, 0))

    def bind(sets):
        kept = {id(ids): sort(x, ids) for x, ids, _ in sets}

        def call(x, ids, weights):
            rows, h, layout = kept[id(ids)]
            w2(h, expert_layout=layout, **options)
            return w13(rows, expert_layout=layout, **options)

        check("humming", call(*sets[0]), kept[id(sets[0][1])][0].float() @ values13.T)
        return call

    return bind


def marlin(model) -> Callable | None:
    """Marlin on rows sorted beforehand, NVFP4 or MXFP4 as the model has it, with the options that sglang gives it; the
    second GEMM multiplies by the choices' weights; no activation, no sum."""
    if not has("marlin"):
        return None
    import tvm_ffi

    module = tvm_ffi.load_module(str(Path(os.environ[FOLDER_VARIABLE]) / "marlin" / "marlin.so"))
    nvfp4_blocks = model.block == nvfp4.NVFP4_BLOCK
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    multiple = 128 if model.hidden % 128 else 64
    width = -(-model.width // multiple) * multiple
    none = {dtype: torch.empty(0, dtype=dtype, device=DEVICE) for dtype in (torch.bfloat16, torch.int32)}
    workspace = torch.zeros(4 * sms, dtype=torch.int32, device=DEVICE)

    w13, w2 = (
        marlin_weights(module, model, *size) for size in ((2 * width, model.hidden), (model.hidden, width))
    )

    def product(rows, out, weights, blocks, block, top, weigh, by):
        packed, scales, global_scale, n, k, _ = weights
        order, experts, padded = blocks
        partial = min(n * len(order), 4 * sms * block * 256) * (2 if block == 8 else 1)
        module.gemm(
            *(rows, out, packed, none[torch.bfloat16], scales, global_scale, none[torch.bfloat16]),
            *(none[torch.int32], none[torch.int32], workspace, order, experts, padded, by),
            *(none[torch.bfloat16], torch.empty(0 if nvfp4_blocks else partial, device=DEVICE)),
            *(block, top, weigh, False, E2M1, len(rows), n, k, False, False, True, False),
            *(k // model.block, model.block, nvfp4_blocks, True, False),
        )
        return out

    def bind(sets):
        kept = {id(ids): marlin_order(ids, model.experts) for _, ids, _ in sets}
        rows = sets[0][1].numel()
        h = torch.randn(rows, width, device=DEVICE).bfloat16()
        outs = [torch.empty(rows, n, dtype=torch.bfloat16, device=DEVICE) for n in (2 * width, model.hidden)]

        def call(x, ids, weights):
            blocks, block = kept[id(ids)]
            first = product(x, outs[0], w13, blocks, block, model.choices, False, weights)
            product(h, outs[1], w2, blocks, block, 1, True, weights)
            return first

        x, _, weights = sets[0]
        first = (x[:1].float() @ w13[-1].T).expand(model.choices, -1)
        check("marlin, first", call(*sets[0])[: model.choices], first)
        second = h[: model.choices].float() @ w2[-1].T * weights[0, :, None]
        check("marlin, second", outs[1][: model.choices], second)
        return call

    return bind


def marlin_weights(module, model, n: int, k: int) -> tuple:
    """(codes as Marlin has them, scales, global scales, n, k, the values of the weights). module: Marlin's."""
    codes, values = random_codes(n, k)
    packed = torch.empty(k // MARLIN_K_TILE, 2 * n, dtype=torch.int32, device=DEVICE)
    no_order = torch.empty(0, dtype=torch.int32, device=DEVICE)
    module.repack(codes.view(torch.int32).T.contiguous(), no_order, packed, k, n, 4)
    if model.block == nvfp4.NVFP4_BLOCK:  # e4m3 as the upper byte of a half's bits, shifted by its sign
        dtype = torch.float8_e4m3fn
        scale = (torch.tensor([2.0**7]).half().view(torch.int16) << 1).view(torch.uint8)[1].item()
        global_scale = torch.full((model.experts,), 2.0 ** (SCALE_POWER + 126 - 7), device=DEVICE).bfloat16()
    else:
        dtype, scale = torch.float8_e8m0fnu, E8M0_ONE + SCALE_POWER
        global_scale = torch.empty(0, dtype=torch.bfloat16, device=DEVICE)
    shape = model.experts, k // model.block, n
    scales = torch.full(shape, scale, dtype=torch.uint8, device=DEVICE).view(dtype)
    return packed.expand(model.experts, -1, -1).contiguous(), scales, global_scale, n, k, values


def marlin_order(ids: torch.Tensor, experts: int) -> tuple[tuple, int]:
    """(choices by expert, padded to whole blocks; the blocks' experts; (rows, blocks of none)), rows of a block."""
    mean = ids.numel() / experts
    block = next((block for block in MARLIN_BLOCKS if mean / block < 0.9), MARLIN_BLOCKS[-1])
    flat = ids.flatten().long()
    counts = torch.bincount(flat, minlength=experts)
    padded = -(-counts // block) * block
    order = torch.full((int(padded.sum()),), flat.numel(), dtype=torch.int32, device=ids.device)
    choices = torch.argsort(flat, stable=True)
    first = (padded.cumsum(0) - padded)[flat[choices]] - (counts.cumsum(0) - counts)[flat[choices]]
    order[first + torch.arange(flat.numel(), device=ids.device)] = choices.int()
    of_blocks = torch.arange(experts, device=ids.device).repeat_interleave(padded // block).int()
    return (order, of_blocks, torch.tensor([len(order), 0], dtype=torch.int32, device=ids.device)), block


def of_bf16(model, product: Callable) -> Callable | None:
    """A grouped GEMM on bf16 weights, rows sorted beforehand; no activation, no sum. product(rows, weights [E, K, N],
    ends of the experts' rows)."""
    if model.experts * model.hidden * model.width * 6 > BF16_BYTES:
        return None
    shapes = ((2 * model.width, model.hidden), (model.hidden, model.width))
    w13, w2 = (
        torch.randn(model.experts, *s, device=DEVICE, dtype=torch.bfloat16).mul_(0.02).mT for s in shapes
    )

    def bind(sets):
        rows = sets[0][1].numel()
        a, h = (torch.randn(rows, k, device=DEVICE, dtype=torch.bfloat16) for _, k in shapes)
        offsets = {id(ids): sort_tokens(ids, model.experts).offsets for _, ids, _ in sets}

        def call(x, ids, weights):
            product(a, w13, offsets[id(ids)])
            return product(h, w2, offsets[id(ids)])

        first = int(offsets[id(sets[0][1])].nonzero()[0])
        check("bf16", call(*sets[0])[:1], h[:1].float() @ w2[first].float())
        return call

    return bind


def grouped_mm(model) -> Callable | None:
    """torch._grouped_mm."""
    return of_bf16(model, lambda rows, w, ends: torch._grouped_mm(rows, w, offs=ends))


def quack(model) -> Callable | None:
    """QuACK's GEMM of rows of several lengths."""
    from quack.gemm_interface import gemm

    starts = {}  # of the experts' rows, by the tensor of their ends

    def product(rows, w, ends):
        if id(ends) not in starts:
            starts[id(ends)] = ends, torch.nn.functional.pad(ends, (1, 0))
        return gemm(rows, w, cu_seqlens_m=starts[id(ends)][1], tuned=False)

    return of_bf16(model, product)


def peers_of(model, bf16: bool) -> dict[str, Callable]:
    """Peers that are installed, by name; prints why one is not to stderr. bf16: those with bf16 weights, too."""
    makers = {
        "triton_kernels, 4 warps": lambda: triton_kernels(model, FEW_WARPS),
        "triton_kernels, 8 warps": lambda: triton_kernels(model, MANY_WARPS),
        "humming": lambda: humming(model),
        "marlin": lambda: marlin(model),
        "QuACK bf16": lambda: quack(model) if bf16 else None,
        "grouped_mm bf16": lambda: grouped_mm(model) if bf16 else None,
    }
    found = {}
    for name, make in makers.items():
        try:
            found[name] = make()
        except Exception as error:  # others' code: one that fails is no peer
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return {name: bind for name, bind in found.items() if bind}
