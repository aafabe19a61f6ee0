"""Row formats: sizes as engines' kernels have them, and stored bits against a search through all numbers of a type."""

import math

import pytest
import torch

from warpspec.latent.cache import INDEX_FORMATS, LATENT_FORMATS, MODELS, LatentPool, bytes_per_token
from warpspec.latent.cache.quantize import dequantize_rows, quantize_rows, round_trip

FORMATS = {
    **{f"latent {n}": f for n, f in LATENT_FORMATS.items()},
    **{f"index {n}": f for n, f in INDEX_FORMATS.items()},
}
QUANTIZED = [name for name, fmt in FORMATS.items() if fmt.block]


def e4m3_numbers() -> list[float]:
    """Values of the codes 0 to 126, by the format's definition."""
    return [
        (code % 8) * 2.0**-9 if code < 8 else (1 + code % 8 / 8) * 2.0 ** (code // 8 - 7)
        for code in range(127)
    ]


NUMBERS = {"e4m3": e4m3_numbers(), "e2m1": [0, 0.5, 1, 1.5, 2, 3, 4, 6]}
SIGN = {"e4m3": 0x80, "e2m1": 8}


def nearest_code(x: float, value: str) -> int:
    """Find the code of the number nearest to x by search; of two as near the even one; with x's sign."""
    numbers = NUMBERS[value]
    code = min(range(len(numbers)), key=lambda c: (abs(abs(x) - numbers[c]), c % 2))
    return code | (SIGN[value] if math.copysign(1.0, x) < 0 else 0)


def expected_block(block: list[float], fmt) -> tuple[list[int], int]:
    """(codes, exponent k) of a block: k by trying all."""
    if not all(map(math.isfinite, block)):
        return [{"e4m3": 0x7F, "e2m1": 7}[fmt.value]] * len(block), 128
    # The floor is an fp32 number.
    amax = max(*map(abs, block), float(torch.tensor(fmt.min_amax)))
    k = next(k for k in range(-140, 140) if amax <= max(NUMBERS[fmt.value]) * 2.0**k)
    return [nearest_code(x * 2.0**-k, fmt.value) for x in block], k


@pytest.mark.parametrize("name", FORMATS)
def test_no_rows(name):
    """What is left of rows whose slots all store nothing."""
    fmt = FORMATS[name]
    data, scales = quantize_rows(torch.randn(2, fmt.dim)[torch.tensor([False, False])], fmt)
    assert (data.shape, scales.shape) == ((0, fmt.data_bytes), (0, fmt.scale_bytes))


def adversarial_rows(fmt) -> torch.Tensor:
    """bf16 rows: any magnitudes; ties; largest values at the edge of a power of two; zeros, tiny, NaN and Inf."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(10, fmt.dim, generator=generator)
    rows[1] *= torch.exp2(40 * torch.randn(fmt.dim, generator=generator))
    rows[2] = torch.tensor(NUMBERS[fmt.value])[torch.randint(0, 8, (fmt.dim,), generator=generator)]
    middle = [(a + b) / 2 for a, b in zip(NUMBERS[fmt.value], NUMBERS[fmt.value][1:], strict=False)]
    rows[3] = torch.tensor(middle)[torch.randint(0, len(middle), (fmt.dim,), generator=generator)]
    rows[3, :: fmt.block] = max(NUMBERS[fmt.value])
    # A power of two times the largest.
    rows[4, :: fmt.block] = 7 * 2.0**20 if fmt.value == "e4m3" else 3 * 2.0**20
    rows[5] = rows[4] * (1 + 2.0**-7)
    rows[6] = 0
    rows[6, 1] = -0.0
    rows[7] *= 1e-38
    rows[8, 0], rows[8, fmt.values - 1] = torch.nan, -torch.inf
    # The largest itself would read as Inf.
    rows[9] = torch.finfo(torch.bfloat16).max / 2 * torch.sign(rows[9])
    return rows.bfloat16()


@pytest.mark.parametrize("name", QUANTIZED)
def test_bits_are_those_of_a_search(name):
    fmt = FORMATS[name]
    rows = adversarial_rows(fmt)
    data, scales = quantize_rows(rows, fmt)
    assert data.shape == (len(rows), fmt.data_bytes) and scales.shape == (len(rows), fmt.scale_bytes)
    for row, stored, factors in zip(rows.float().tolist(), data, scales, strict=True):
        codes = stored[: fmt.value_bytes]
        if fmt.value == "e2m1":
            codes = torch.stack((codes & 15, codes >> 4), dim=1).flatten()
        codes = codes.tolist()
        for b in range(fmt.blocks):
            at = slice(b * fmt.block, (b + 1) * fmt.block)
            wanted, k = expected_block(row[at], fmt)
            assert codes[at] == wanted
            if fmt.scale == "ue8m0":
                assert factors[b] == k + 127
            else:
                scale = factors.view(torch.float32)[b].item()
                assert scale == 2.0**k if k != 128 else math.isnan(scale)
        assert not factors[fmt.scale_bytes - fmt.padding :].any()
    tail = data[:, fmt.value_bytes :].contiguous().view(torch.bfloat16)
    assert torch.equal(tail.view(torch.int16), rows[:, fmt.values :].contiguous().view(torch.int16))


@pytest.mark.parametrize("name", QUANTIZED)
def test_reads_what_was_stored(name):
    """Within half a step of the largest value's; exact the second time; a block with NaN is NaN throughout."""
    fmt = FORMATS[name]
    rows = adversarial_rows(fmt)
    once = round_trip(rows, fmt)
    blocks, read = (t[:, : fmt.values].unflatten(1, (fmt.blocks, fmt.block)) for t in (rows.float(), once))
    bad = ~blocks.isfinite().all(-1)
    assert bad.sum() == 1 + (fmt.blocks > 1) and read[bad].isnan().all() and not read[~bad].isnan().any()
    step = {"e4m3": 2.0**-4, "e2m1": 2.0**-2}[fmt.value]
    amax = blocks.abs().amax(-1, keepdim=True).clamp(min=fmt.min_amax)
    assert ((read - blocks).abs() <= step * amax)[~bad].all()
    again = round_trip(once.nan_to_num(0.0), fmt)
    assert torch.equal(again[:8], once.nan_to_num(0.0)[:8])


def test_scales_that_are_no_powers_of_two():
    """vLLM's rows: amax / 448, at least FLT_MIN, where blocks are zeros too."""
    fmt, tiny = LATENT_FORMATS["v3.2-fp8"], torch.finfo(torch.float32).tiny
    rows = adversarial_rows(fmt)
    pool = LatentPool.empty(1, len(rows), fmt.name)
    slots = torch.arange(len(rows))
    pool.write(slots, rows, powers=False)
    stored = pool.data[0, : len(rows) * fmt.row_bytes].view(len(rows), fmt.row_bytes)
    scales = stored[:, fmt.value_bytes : fmt.tail_offset].contiguous().view(torch.float32)
    blocks = rows[:, : fmt.values].float().unflatten(1, (fmt.blocks, fmt.block))
    finite = blocks.isfinite().all(-1)
    wanted = (blocks.abs().amax(-1) / 448).clamp(min=tiny)
    assert torch.equal(scales[finite], wanted[finite]) and scales[~finite].isnan().all()
    assert (scales[6] == tiny).all() and scales[finite].log2().frac().any()
    for row, b in finite.nonzero().tolist():
        codes = stored[row, b * fmt.block : (b + 1) * fmt.block].tolist()
        assert codes == [nearest_code(x, "e4m3") for x in (blocks[row, b] / wanted[row, b]).tolist()]
    read = pool.read(slots)[:, : fmt.values].unflatten(1, (fmt.blocks, fmt.block))
    assert ((read - blocks).abs() <= 2.0**-4 * blocks.abs() + 2.0**-10 * wanted[..., None])[finite].all()
    stored[:, fmt.value_bytes : fmt.tail_offset] = 0  # as SGLang's scales of zeros are
    assert not pool.read(slots)[finite.all(1), : fmt.values].any()
    with pytest.raises(ValueError, match=r"powers: .*'v4-fp8' are powers of two"):
        LatentPool.empty(1, 1, "v4-fp8").write(slots[:1], rows[:1, :512], powers=False)


@pytest.mark.parametrize("name", [n for n in FORMATS if n.endswith("bf16")])
def test_bf16_rows_are_kept(name):
    fmt = FORMATS[name]
    rows = torch.randn(3, fmt.dim).bfloat16()
    data, scales = quantize_rows(rows, fmt)
    assert scales.shape == (3, 0) and torch.equal(dequantize_rows(data, scales, fmt), rows.float())


def test_sizes():
    """FlashMLA's and DeepGEMM's: 584, 656, 68 and 132 bytes a row; pages of FlashMLA's on sm100 padded to 576."""
    v4, index = LATENT_FORMATS["v4-fp8"], INDEX_FORMATS["mxfp4"]
    assert (v4.row_bytes, v4.data_bytes, v4.scale_base(64)) == (584, 576, 64 * 576)
    assert v4.page_stride(64, 576) == 37440 and v4.page_stride(64) == 64 * 584
    assert LATENT_FORMATS["v3.2-fp8"].row_stride == 656 and LATENT_FORMATS["v3.2-fp8"].tail_offset == 528
    assert (index.row_bytes, index.scale_base(64)) == (68, 4096)
    assert INDEX_FORMATS["fp8"].row_bytes == 132


def test_bytes_of_models():
    flash = MODELS["deepseek-v4-flash"]
    assert bytes_per_token("deepseek-v4-flash") == 21 * (584 + 68) / 4 + 20 * 584 / 128
    assert bytes_per_token("deepseek-v4-flash", latent="bf16") == 21 * (1024 + 68) / 4 + 20 * 1024 / 128
    assert bytes_per_token("deepseek-v4-pro") == 30 * (584 + 68) / 4 + 31 * 584 / 128
    assert flash.state_bytes("window") == 74752
    assert flash.state_bytes("csa") == 74752 + 65536 + 16384 and flash.state_bytes("hca") == 74752 + 6144
    assert flash.bytes_per_request() == 2 * 74752 + 21 * 156672 + 20 * 80896
    with pytest.raises(ValueError, match="model: must be one of"):
        bytes_per_token("deepseek-v5")
