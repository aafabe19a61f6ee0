"""Operands of the grouped GEMMs: activation rows and weights in NVFP4, laid out for TMA and tcgen05.

Data rows are padded to a multiple of 16 bytes, as TMA requires of a pitch; scales lie in the swizzled layout of
``warpspec.common.nvfp4``. K is counted in whole blocks of 16; a matrix whose own K is smaller is padded with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from warpspec.common import nvfp4
from warpspec.common.checks import (
    ANY,
    check_bool,
    check_device,
    check_floating,
    check_int,
    check_kind,
    check_tensor,
    kind_of,
)
from warpspec.common.hardware import TMA_ALIGNMENT
from warpspec.common.nvfp4 import ATOM_BYTES, ATOM_COLUMNS, ATOM_ROWS, NVFP4_BLOCK, NVFP4Tensor
from warpspec.moe.weights import INTERLEAVE, ExpertWeights, interleave

SIZE_LIMIT = 2**31 - 1  # int32 indices in kernels


def pitch_of(k: int) -> int:
    """Bytes from one packed row of k values to the next."""
    return -(-k // (2 * TMA_ALIGNMENT)) * TMA_ALIGNMENT


def scale_atoms(k: int) -> int:
    """Number of scale atoms along K."""
    return -(-k // (NVFP4_BLOCK * ATOM_COLUMNS))


def row_atoms_bound(rows: int, experts: int) -> int:
    """The most scale atoms that `rows` rows of `experts` experts need; each expert begins a new atom."""
    return rows // ATOM_ROWS + min(experts, rows)


def first_atoms(offsets: torch.Tensor) -> torch.Tensor:
    """int32 [E]: the first scale atom of each expert's rows. offsets: int32 [E], running ends."""
    counts = torch.diff(offsets, prepend=offsets.new_zeros(1))
    atoms = (counts + (ATOM_ROWS - 1)) // ATOM_ROWS
    return (torch.cumsum(atoms, 0) - atoms).int()


def check_offsets(offsets, rows) -> None:
    """Raise ValueError unless offsets are running ends, which never fall and lie within 0..rows.

    Synchronises on CUDA.
    """
    ends = offsets.tolist()
    for e, (before, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if not before <= end <= rows:
            raise ValueError(
                f"offsets: must never fall and stay within 0..{rows} (rows), got {end} after {before} at expert {e}"
            )


@dataclass(frozen=True)
class QuantizedRows:
    """Rows sorted by expert, [R, K] in NVFP4.

    data: uint8 [R, pitch], two codes a byte, low nibble first; bytes after K/2 are not read. scales: uint8
    [atoms, ceil(K/64), 512], swizzled; each expert's rows begin a new atom of 128 rows (`first_atoms`). Columns after
    K/16 in the last atom are 0; rows after an expert's last are undefined. row_scale: fp32 [R], the global scale of
    each row, or None if the scale is fixed and already multiplied into the weights'. k: K, a multiple of 16.
    """

    data: torch.Tensor
    scales: torch.Tensor
    row_scale: torch.Tensor | None
    k: int

    @property
    def rows(self) -> int:
        return self.data.shape[0]

    @classmethod
    def empty(cls, rows: int, k: int, experts: int, device, *, row_scale: bool) -> QuantizedRows:
        """Uninitialised rows, with room for any distribution over the experts. k is rounded up to a multiple of 16.
        Raises TypeError or ValueError naming the argument."""
        for name, size in (("rows", rows), ("k", k), ("experts", experts)):
            check_int(name, size, 0, SIZE_LIMIT)
        check_bool("row_scale", row_scale)
        device = check_device("device", device)
        k = -(-k // NVFP4_BLOCK) * NVFP4_BLOCK
        atoms = row_atoms_bound(rows, experts)
        return cls(
            torch.empty(rows, pitch_of(k), dtype=torch.uint8, device=device),
            torch.empty(atoms, scale_atoms(k), ATOM_BYTES, dtype=torch.uint8, device=device),
            torch.empty(rows, dtype=torch.float32, device=device) if row_scale else None,
            k,
        )

    @classmethod
    def from_rows(
        cls, rows: torch.Tensor, offsets: torch.Tensor, *, out_scale: torch.Tensor | None = None
    ) -> QuantizedRows:
        """Quantise rows [R, K] floating that are sorted already. This is the quantiser's definition, in torch
        operations.

        offsets: int32 [E]. out_scale: fp32 [E], a global scale for each expert's rows (row_scale is then None); None:
        each row gets one from its amax. K is padded with zeros to a multiple of 16. Rows from offsets[-1] on are left
        0. Synchronises. Raises TypeError or ValueError naming the argument.
        """
        check_floating("rows", rows, (ANY, ANY))
        check_tensor("offsets", offsets, (torch.int32,), (ANY,), rows.device)
        check_offsets(offsets, len(rows))
        if out_scale is not None:
            check_tensor("out_scale", out_scale, (torch.float32,), (len(offsets),), rows.device)
        used = int(offsets[-1]) if len(offsets) else 0
        result = cls.empty(len(rows), rows.shape[1], len(offsets), rows.device, row_scale=out_scale is None)
        for tensor in (result.data, result.scales, result.row_scale):
            if tensor is not None:
                tensor.zero_()
        rows = pad_columns(rows[:used].float(), NVFP4_BLOCK)
        if out_scale is None:
            t = nvfp4.quantize(rows, global_dims=1)
            result.row_scale[:used] = t.global_scale
        else:
            expert = torch.searchsorted(offsets, torch.arange(used, device=offsets.device), right=True)
            t = nvfp4.quantize(rows, out_scale[expert])
        result.data[:used, : rows.shape[1] // 2] = t.data
        start = 0
        for end, atom in zip(offsets.tolist(), first_atoms(offsets).tolist(), strict=True):
            swizzled = nvfp4.swizzle_scales(t.scale[start:end])
            result.scales[atom : atom + len(swizzled)] = swizzled
            start = end
        return result

    def dequantize(self, offsets: torch.Tensor) -> torch.Tensor:
        """fp32 [offsets[-1], K], including row_scale if there is one. offsets: int32 [E]. Synchronises. Raises
        TypeError or ValueError naming the argument."""
        check_tensor("offsets", offsets, (torch.int32,), (ANY,), self.data.device)
        check_offsets(offsets, self.rows)
        columns = self.k // NVFP4_BLOCK
        parts, start = [], 0
        for end, atom in zip(offsets.tolist(), first_atoms(offsets).tolist(), strict=True):
            atoms = -(-(end - start) // ATOM_ROWS)
            parts.append(nvfp4.unswizzle_scales(self.scales[atom : atom + atoms], end - start, columns))
            start = end
        if not parts:
            return torch.zeros(0, self.k, dtype=torch.float32, device=self.data.device)
        scale = torch.cat([part.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
        unit = (
            torch.ones((), dtype=torch.float32, device=scale.device)
            if self.row_scale is None
            else self.row_scale[:start]
        )
        return nvfp4.dequantize(NVFP4Tensor(self.data[:start, : self.k // 2].contiguous(), scale, unit))


@dataclass(frozen=True)
class PreparedWeights(ExpertWeights):
    """The weights [N, K] of E experts in NVFP4, as the kernel reads them.

    data: uint8 [E, N, pitch], bytes after K/2 are 0. scales: uint8 [E, ceil(N/128), ceil(K/64), 512], padding 0.
    global_scale: fp32 [E, 2] for gate and up, or [E, 1]. Gate and up alternate by 8 rows: rows 0-7 are gate's 0-7, rows
    8-15 up's 0-7, ... bias: fp32 [E, N] with rows in the same order, or None; it is added after the global scale,
    before clamp and activation. k: K, a multiple of 16.
    """

    data: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor
    n: int
    k: int
    bias: torch.Tensor | None = None

    TENSORS: ClassVar[tuple[str, ...]] = ("data", "scales", "global_scale", "bias")
    layout: ClassVar[str] = "sm100"  # the backend whose kernels read them

    def dequantize(self, experts: slice = slice(None)) -> torch.Tensor:
        """fp32 [E, N, K] of some experts; gate and up stay interleaved. Raises TypeError unless experts is a slice."""
        check_kind("experts", experts, slice)
        scale = nvfp4.unswizzle_scales(self.scales[experts], self.n, self.k // NVFP4_BLOCK)
        data, rows = self.data[experts, :, : self.k // 2], self.row_scales()[experts]
        return nvfp4.dequantize(NVFP4Tensor(data.contiguous(), scale, rows))

    def row_bias(self, e: int) -> torch.Tensor:
        """fp32 [N]: the bias of expert e. Raises TypeError or ValueError for what is no expert."""
        check_int("e", e, 0, self.experts - 1)
        return self.bias[e]


def deinterleave(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split [E, 2I, ...] into (gate, up), each [E, I, ...]."""
    gate, up = rows.unflatten(1, (-1, 2, INTERLEAVE)).unbind(2)
    return gate.flatten(1, 2), up.flatten(1, 2)


def pad_columns(x: torch.Tensor, multiple: int) -> torch.Tensor:
    """Pad x's last dimension with zeros to a multiple."""
    extra = -x.shape[-1] % multiple
    return torch.nn.functional.pad(x, (0, extra)) if extra else x


def prepare_w13(
    gate: torch.Tensor | NVFP4Tensor,
    up: torch.Tensor | NVFP4Tensor,
    *,
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
) -> PreparedWeights:
    """Make w13 of `grouped_swiglu`: gate and up, interleaved by 8 rows.

    gate, up: [E, I, H], I a multiple of 8: NVFP4Tensors with global_scale () or [E], or bf16 or fp32. The latter two
    are quantised here with one global scale for each expert and matrix, and H is padded with zeros to a multiple of 16.
    gate_bias, up_bias: [E, I] floating, both or neither. Raises TypeError or ValueError naming the argument.
    """
    given = gate, up
    gate, up = _experts_of("gate", gate), _experts_of("up", up)
    shapes = [list(each.shape) for each in given]  # before H is padded
    if shapes[0] != shapes[1]:
        raise ValueError(f"up: shape must be gate's, {shapes[0]}, got {shapes[1]}")
    if gate.device != up.device:
        raise ValueError(f"up: device must be gate's, {gate.device}, got {up.device}")
    _, width, k = gate.shape
    if width % INTERLEAVE:
        raise ValueError(
            f"gate: I must be a multiple of {INTERLEAVE}, got {width} (shape {list(gate.shape)})"
        )
    if (gate_bias is None) != (up_bias is None):
        raise ValueError("gate_bias: must be given together with up_bias")
    bias = None
    if gate_bias is not None:
        biases = [_bias_of(name, b, gate) for name, b in (("gate_bias", gate_bias), ("up_bias", up_bias))]
        bias = interleave(*biases).contiguous()
    scale = interleave(gate.scale.view(torch.uint8), up.scale.view(torch.uint8))
    return PreparedWeights(
        data=pad_columns(interleave(gate.data, up.data), TMA_ALIGNMENT).contiguous(),
        scales=nvfp4.swizzle_scales(scale),
        global_scale=torch.stack([gate.global_scale, up.global_scale], dim=1),
        n=2 * width,
        k=k,
        bias=bias,
    )


def prepare_w2(
    down: torch.Tensor | NVFP4Tensor,
    *,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> PreparedWeights:
    """Make w2 of the layer: down [E, H, I] as the second GEMM reads it.

    down: as gate in `prepare_w13`. input_scale: fp32 [E], the fixed global scale of the GEMM's A operand, which is
    multiplied into the global scale here; None if A has row scales. bias: [E, H] floating. Raises like `prepare_w13`.
    """
    down = _experts_of("down", down)
    experts, n, k = down.shape
    global_scale = down.global_scale[:, None]
    if input_scale is not None:
        check_floating("input_scale", input_scale, (experts,), down.device)
        global_scale = global_scale * input_scale.to(global_scale)[:, None]
    return PreparedWeights(
        data=pad_columns(down.data, TMA_ALIGNMENT).contiguous(),
        scales=nvfp4.swizzle_scales(down.scale),
        global_scale=global_scale.contiguous(),
        n=n,
        k=k,
        bias=None if bias is None else _bias_of("bias", bias, down).contiguous(),
    )


def _experts_of(name: str, weights) -> NVFP4Tensor:
    """weights [E, N, K] as NVFP4, with K padded to a multiple of 16 and one global scale an expert."""
    if not isinstance(weights, NVFP4Tensor):
        if not isinstance(weights, torch.Tensor):
            raise TypeError(
                f"{name}: must be an NVFP4Tensor or a bf16 or fp32 tensor, got {kind_of(weights)}"
            )
        check_tensor(name, weights, (torch.bfloat16, torch.float32))
        if weights.dim() != 3 or weights.shape[0] == 0:
            raise ValueError(f"{name}: must be [experts, rows, columns], got shape {list(weights.shape)}")
        # Expert by expert, because quantising takes several times the memory of its input.
        parts = [nvfp4.quantize(pad_columns(matrix.detach(), NVFP4_BLOCK)) for matrix in weights]
        return NVFP4Tensor(
            torch.stack([part.data for part in parts]),
            torch.stack([part.scale.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn),
            torch.stack([part.global_scale for part in parts]),
        )
    if len(weights.shape) != 3 or weights.shape[0] == 0:
        raise ValueError(f"{name}: must be [experts, rows, columns], got shape {list(weights.shape)}")
    if weights.global_scale.dim() > 1:
        raise ValueError(
            f"{name}: global_scale must be () or [E={weights.shape[0]}], got {list(weights.global_scale.shape)}"
        )
    return NVFP4Tensor(weights.data, weights.scale, weights.global_scale.expand(weights.shape[0]))


def _bias_of(name: str, bias: torch.Tensor, weights: NVFP4Tensor) -> torch.Tensor:
    """The bias [E, N] in fp32; raises if it does not fit the weights."""
    check_floating(name, bias, tuple(weights.shape[:2]), weights.device)
    return bias.detach().float()
