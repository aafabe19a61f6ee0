"""NVFP4: e2m1 values, an e4m3 scale for every 16 along K, an fp32 global scale. The definition, in torch.

x = value * block_scale * global_scale. Every quantiser of this project gives these bits. With fl() for rounding
to the nearest fp32 (IEEE-754 division and multiplication):

    global = max(fl(amax / 2688), 2**-90)                    2688 = 6 * 448, the largest value times scale
    scale  = e4m3(min(fl(fl(block_amax / 6) / global), 448)) to the nearest, ties to even
    value  = e2m1(fl(x / fl(scale * global)))                to the nearest, ties to even, at most 6; 0 if scale is 0

The floor of the global scale keeps quotients and remainders normal, however they are computed: rows below 2e-24 lose
precision and then become 0.
A block that holds NaN or Inf, or whose global scale is NaN, gets the scale NaN and all values +6; it dequantises to
NaN. A global scale that is computed from amax is NaN if any value is NaN or Inf, and so is everything that it scales.
Negative numbers that round to 0 keep their sign. -0 itself, and values of a block whose scale is 0, become +0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from warpspec.common.checks import (
    check_device,
    check_floating,
    check_int,
    check_kind,
    check_number,
    check_tensor,
)

NVFP4_BLOCK = 16  # values along K that share one scale
CHUNK = (1 << 15) - 1  # values quantised at a time on a CPU: as many as torch gives to one thread
# Adding and subtracting it rounds fp32 below 2**22 to an integer, to nearest, ties to even.
TO_INTEGER = 1.5 * 2.0**23
E2M1_MAX = 6.0
E4M3_MAX = 448.0
AMAX_TO_GLOBAL = E2M1_MAX * E4M3_MAX
MIN_GLOBAL_SCALE = 2.0**-90
# Values of the codes 0 to 7; codes 8 to 15 are their negatives.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SIGN = 8  # bit of an e2m1 code
E4M3_NAN = 0x7F

ATOM_ROWS, ATOM_COLUMNS = 128, 4  # scales that lie together, as tcgen05 reads them
ATOM_BYTES = ATOM_ROWS * ATOM_COLUMNS
ATOM_LANES = 32  # rows r, r + 32, r + 64 and r + 96 share one 16-byte line of an atom

MXFP4_BLOCK = 32  # values that share one scale in MXFP4
UE8M0_BIAS = 127
UE8M0_NAN = 255
E4M3_MIN_EXPONENT, E4M3_MAX_EXPONENT = -9, 8  # exponents of e4m3's powers of two, including subnormal ones


@dataclass(frozen=True)
class NVFP4Tensor:
    """A quantised tensor [..., R, K].

    data: uint8 [..., R, K/2], two e2m1 codes a byte, the lower index in the low nibble. scale: float8_e4m3fn
    [..., R, K/16]. global_scale: fp32 of shape () or a prefix of data.shape[:-1]: [E] is one per expert, [T] one per
    row. Raises TypeError or ValueError naming the field if they do not match.
    """

    data: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor

    def __post_init__(self):
        for name, tensor, dtype in (
            ("data", self.data, torch.uint8),
            ("scale", self.scale, torch.float8_e4m3fn),
            ("global_scale", self.global_scale, torch.float32),
        ):
            check_tensor(name, tensor, (dtype,), None, getattr(self.data, "device", None))
        if self.data.dim() < 1 or self.data.shape[-1] * 2 % NVFP4_BLOCK:
            raise ValueError(
                f"data: must have {NVFP4_BLOCK // 2} bytes a block, got shape {list(self.data.shape)}"
            )
        rows = self.data.shape[:-1]
        if self.scale.shape != (*rows, self.k // NVFP4_BLOCK):
            raise ValueError(
                f"scale: must be {[*rows, self.k // NVFP4_BLOCK]} for data {list(self.data.shape)}, "
                f"got {list(self.scale.shape)}"
            )
        if self.global_scale.shape != rows[: self.global_scale.dim()]:
            raise ValueError(
                f"global_scale: shape must be a prefix of {list(rows)}, got {list(self.global_scale.shape)}"
            )

    @property
    def k(self) -> int:
        """K, the values of a row."""
        return self.data.shape[-1] * 2

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., R, K], the shape of the tensor that was quantised."""
        return (*self.data.shape[:-1], self.k)

    @property
    def device(self) -> torch.device:
        return self.data.device

    def to(self, device) -> NVFP4Tensor:
        """Copy the tensor to another device. Raises TypeError or ValueError for what names none."""
        device = check_device("device", device)
        return NVFP4Tensor(self.data.to(device), self.scale.to(device), self.global_scale.to(device))


def global_scale_of(amax: torch.Tensor) -> torch.Tensor:
    """The global scale, fp32, for largest magnitudes `amax`: fp32 >= 0; NaN or Inf give NaN."""
    amax = amax.float()
    return divided(amax, AMAX_TO_GLOBAL).clamp(min=MIN_GLOBAL_SCALE) + amax * 0.0


def divided(x: torch.Tensor, number: float) -> torch.Tensor:
    """x / number in fp32, rounded once. On a GPU torch multiplies by the reciprocal of a Python number, but divides by
    a tensor. The last bit of a scale matters for codes, because bf16 values are often ties of e2m1."""
    return x / torch.full((), number, dtype=torch.float32, device=x.device)


def quantize(
    x: torch.Tensor, global_scale: torch.Tensor | float | None = None, *, global_dims: int = 0
) -> NVFP4Tensor:
    """Quantise x [..., K], floating, K a multiple of 16.

    global_scale: fp32 of shape () or a prefix of x.shape[:-1], positive; None: computed from the largest magnitude over
    all dimensions of x but the first `global_dims` (0: one for the tensor; 1: one per expert of [E, R, K]; x.dim() - 1:
    one per row). Raises TypeError or ValueError naming the argument.
    """
    check_floating("x", x)
    if x.dim() < 1 or x.shape[-1] % NVFP4_BLOCK:
        raise ValueError(f"x: last dimension must be a multiple of {NVFP4_BLOCK}, got shape {list(x.shape)}")
    check_int("global_dims", global_dims, 0, x.dim() - 1)
    if isinstance(global_scale, torch.Tensor):
        check_tensor("global_scale", global_scale, (torch.float32,))
        if global_scale.is_meta != x.is_meta:
            raise ValueError(f"global_scale: must be on {x.device}, got {global_scale.device}")
    elif global_scale is not None:
        check_number("global_scale", global_scale, positive=True)
    if global_scale is None:
        flat = x.flatten(global_dims)
        if flat.shape[-1]:
            lowest, highest = flat.aminmax(dim=-1)
            amax = torch.maximum(-lowest, highest)
        else:
            amax = flat.new_zeros(flat.shape[:-1])
        global_scale = global_scale_of(amax)
    else:
        global_scale = torch.as_tensor(global_scale, dtype=torch.float32, device=x.device)
        if global_scale.shape != x.shape[: global_scale.dim()] or global_scale.dim() >= x.dim():
            raise ValueError(
                f"global_scale: shape must be a prefix of {list(x.shape[:-1])}, got {list(global_scale.shape)}"
            )
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.flatten(0, -2) if x.dim() > 1 else x[None]
    of_rows = spread_over(global_scale, x.dim() - 1).expand(x.shape[:-1]).reshape(-1)
    # On a CPU, a few rows at a time, so that intermediate results stay in the cache.
    count = max(1, CHUNK // max(1, x.shape[-1])) if x.device.type == "cpu" else max(1, len(rows))
    parts = [
        quantize_rows(part, scales)
        for part, scales in zip(rows.split(count), of_rows.split(count), strict=True)
    ]
    data, scale = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    shape = x.shape[:-1]
    return NVFP4Tensor(
        data.view(*shape, x.shape[-1] // 2),
        scale.view(*shape, x.shape[-1] // NVFP4_BLOCK).view(torch.float8_e4m3fn),
        global_scale,
    )


def quantize_rows(rows: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(data [R, K/2], scale [R, K/16], both uint8) of rows [R, K], each with its own global scale."""
    blocks = rows.float().unflatten(-1, (-1, NVFP4_BLOCK))  # [R, K/16, 16]
    scale = block_scale(blocks.abs().amax(-1), global_scale[:, None])
    divisor = (scale.float() * global_scale[:, None])[..., None]
    quotient = blocks / divisor
    zero = (blocks == 0.0) & ~divisor.isnan() | (divisor == 0.0)
    codes = e2m1_codes(quotient.masked_fill_(zero, 0.0))
    return pack(codes.flatten(-2)), scale.view(torch.uint8)


def block_scale(block_amax: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """The e4m3 scale of blocks with largest magnitudes `block_amax`, fp32, NaN and Inf included."""
    scale = divided(block_amax, E2M1_MAX) / global_scale
    scale = scale.clamp(max=E4M3_MAX) + block_amax * 0.0  # Inf * 0: NaN
    # The sign of a NaN depends on the machine.
    return torch.where(scale.isnan(), torch.nan, scale).to(torch.float8_e4m3fn)


def dequantize(t: NVFP4Tensor) -> torch.Tensor:
    """x [..., K] fp32: fl(fl(value * block_scale) * global_scale); the first product is exact. Raises TypeError for
    anything but an ``NVFP4Tensor``."""
    check_kind("t", t, NVFP4Tensor)
    values = packed_values(t.data).unflatten(-1, (-1, NVFP4_BLOCK))  # [..., K/16, 16]
    scaled = (values * t.scale.float()[..., None]).flatten(-2)
    return scaled * spread_over(t.global_scale, scaled.dim())


def spread_over(global_scale: torch.Tensor, dims: int) -> torch.Tensor:
    """Global scales with trailing dimensions of size 1, `dims` dimensions in all."""
    return global_scale.reshape((*global_scale.shape, *(1,) * (dims - global_scale.dim())))


def e2m1_codes(x: torch.Tensor) -> torch.Tensor:
    """uint8 codes 0..15 of fp32 x, rounded to nearest, ties to the even code; magnitudes above 6 become 6, NaN +6."""
    magnitude = x.abs().clamp_(max=E2M1_MAX)
    # e2m1 has steps of 1/2 below 2, of 1 below 4 and of 2 above. A number's code is how many steps it lies above 0.
    above = (magnitude >= 2).float() + (magnitude >= 4)  # how many of these ranges lie below the number's own
    steps = magnitude.mul_(torch.exp2(1 - above)).add_(TO_INTEGER).sub_(TO_INTEGER)
    code = steps.add_(above, alpha=2).nan_to_num_(7.0).to(torch.uint8)
    return code | (torch.signbit(x) & ~x.isnan()).to(torch.uint8) * SIGN


def e2m1_values(codes: torch.Tensor) -> torch.Tensor:
    """fp32 values of uint8 codes 0..15."""
    table = torch.tensor(
        [*E2M1_VALUES, *(-value for value in E2M1_VALUES)], dtype=torch.float32, device=codes.device
    )
    return table[codes.int()]


def packed_values(data: torch.Tensor) -> torch.Tensor:
    """fp32 values [..., K] of packed data [..., K/2]. The two values of a byte are looked up as one 8-byte item."""
    codes = torch.arange(1 << 8, dtype=torch.uint8, device=data.device)
    pairs = e2m1_values(unpack(codes)).view(torch.float64)
    values = pairs.index_select(0, data.flatten().int()).view(torch.float32)
    return values.view(*data.shape[:-1], 2 * data.shape[-1])  # without -1, because there may be no rows


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes 0..15 [..., K] to uint8 [..., K/2], the lower index in the low nibble."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(data: torch.Tensor) -> torch.Tensor:
    """Unpack data [..., K/2] to codes 0..15, uint8 [..., K]."""
    return torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)


def swizzle_scales(scale: torch.Tensor) -> torch.Tensor:
    """Scales [..., R, C] (1 byte each) in the layout that tcgen05 reads: uint8 [..., ceil(R/128), ceil(C/4), 512].

    Byte (r % 32) * 16 + r // 32 % 4 * 4 + c % 4 of atom (r // 128, c // 4) holds scale (r, c); padding is 0.
    """
    *outer, rows, columns = scale.shape
    atoms_r, atoms_c = -(-rows // ATOM_ROWS), -(-columns // ATOM_COLUMNS)
    padded = scale.new_zeros((*outer, atoms_r * ATOM_ROWS, atoms_c * ATOM_COLUMNS), dtype=torch.uint8)
    padded[..., :rows, :columns] = scale.view(torch.uint8)
    # [..., atom row, r // 32, r % 32, atom column, c % 4]
    tiled = padded.reshape(*outer, atoms_r, ATOM_ROWS // ATOM_LANES, ATOM_LANES, atoms_c, ATOM_COLUMNS)
    first = len(outer)
    order = [*range(first), *(first + dim for dim in (0, 3, 2, 1, 4))]
    return tiled.permute(order).reshape(*outer, atoms_r, atoms_c, ATOM_BYTES)


def unswizzle_scales(swizzled: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Inverse of ``swizzle_scales``: float8_e4m3fn [..., rows, columns] of [..., ceil(R/128), ceil(C/4), 512]."""
    *outer, atoms_r, atoms_c, _ = swizzled.shape
    tiled = swizzled.reshape(*outer, atoms_r, atoms_c, ATOM_LANES, ATOM_ROWS // ATOM_LANES, ATOM_COLUMNS)
    first = len(outer)
    order = [*range(first), *(first + dim for dim in (0, 3, 2, 1, 4))]
    full = tiled.permute(order).reshape(*outer, atoms_r * ATOM_ROWS, atoms_c * ATOM_COLUMNS)
    return full[..., :rows, :columns].contiguous().view(torch.float8_e4m3fn)


def from_mxfp4(data: torch.Tensor, scale: torch.Tensor) -> NVFP4Tensor:
    """Convert MXFP4 (e2m1, one ue8m0 scale per 32) to NVFP4.

    data: uint8 [R, K/2] or [E, R, K/2], low nibble first. scale: uint8 [R, K/32] or [E, R, K/32], 2**(scale - 127), 255
    is NaN. The global scale has shape () for a matrix, [E] for E of them. Raises TypeError or ValueError naming the
    argument.

    Exact if the scales under one global scale span at most 2**17, the range of e4m3's powers of two (2**-9 to 2**8).
    Blocks below that are rounded to e2m1 at the scale 2**-9; the error is at most 2**-19 of the largest scale.
    """
    for name, tensor in (("data", data), ("scale", scale)):
        check_tensor(name, tensor, (torch.uint8,), None, getattr(data, "device", None))
    if data.dim() not in (2, 3):
        raise ValueError(f"data: must be [R, K/2] or [E, R, K/2], got {list(data.shape)}")
    k = data.shape[-1] * 2
    wanted = (*data.shape[:-1], k // MXFP4_BLOCK)
    if k % MXFP4_BLOCK or scale.shape != wanted:
        raise ValueError(
            f"scale: must be {list(wanted)} for data {list(data.shape)}, got {list(scale.shape)}"
        )
    if data.dim() == 3:  # one at a time, because intermediate results are several times as large
        parts = [_matrix_from_mxfp4(*pair) for pair in zip(data, scale, strict=True)]
        data, scale, global_scale = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    else:
        data, scale, global_scale = _matrix_from_mxfp4(data, scale)
    return NVFP4Tensor(data, scale.view(torch.float8_e4m3fn), global_scale)


def _matrix_from_mxfp4(
    data: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(data, scale as uint8, global scale) of one matrix."""
    exponent = scale.int() - UE8M0_BIAS
    matters = (unpack(data) & ~SIGN & 0xF).unflatten(-1, (-1, MXFP4_BLOCK)).bool().any(-1) & (
        scale != UE8M0_NAN
    )
    lowest = math.floor(math.log2(MIN_GLOBAL_SCALE)) + E4M3_MAX_EXPONENT
    largest = torch.where(matters, exponent, lowest).amax().clamp(min=lowest)
    shift = largest - E4M3_MAX_EXPONENT  # global scale: 2**shift
    relative = exponent - shift
    # How often values must be halved, because the scale cannot be.
    below = (E4M3_MIN_EXPONENT - relative).clamp(min=0)
    codes = unpack(data)
    if bool((below * matters).any()):
        halved = e2m1_values(codes).unflatten(-1, (-1, MXFP4_BLOCK)) * torch.exp2(-below.float())[..., None]
        codes = e2m1_codes(halved.flatten(-2))
    power = torch.exp2((relative + below).clamp(max=E4M3_MAX_EXPONENT).float()) * matters
    power = torch.where(scale == UE8M0_NAN, torch.nan, power)
    narrow = (
        power.to(torch.float8_e4m3fn).view(torch.uint8).repeat_interleave(MXFP4_BLOCK // NVFP4_BLOCK, dim=-1)
    )
    return pack(codes), narrow, torch.exp2(shift.float())
