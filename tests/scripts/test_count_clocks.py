"""What stands behind the table of clocks: units and bytes of opcodes, one kernel counted in the simulator."""

import dataclasses
from fractions import Fraction

import count_clocks
import pytest
from shared import generated_tables

from warpspec.common.errors import UnsupportedProblem
from warpspec.fmha.sm100.config import AttentionConfig
from warpspec.fmha.sm100.shapes import SHAPES


@pytest.fixture(scope="module")
def d64():
    return count_clocks.measure(64, SHAPES[64][0])


@pytest.mark.parametrize(
    "opcode, unit, cost",
    [
        ("ex2.approx.ftz.f32", "special", 1),
        ("fma.rn.f32x2", "fma", 1),
        ("add.f32", "fma", 1),
        ("add.s32", "alu", 1),
        ("mul.wide.s32", "alu", 1),
        ("max.f32", "alu", Fraction(1, 2)),
        ("max.NaN.f32", "alu", 1),
        ("cvt.rn.bf16x2.f32", "alu", 1),
        ("setp.lt.s32", "alu", 1),
        ("mov.b64", "other", 0),
        ("bra.uni", "other", 1),
        ("st.shared.v4.b32", "other", 1),
        ("tcgen05.wait::ld.sync.aligned", "other", 1),
    ],
)
def test_every_opcode_has_its_unit(opcode, unit, cost):
    assert count_clocks.unit(opcode) == unit
    assert count_clocks.cost(opcode) == cost


def test_bytes_of_tensor_memory_and_stores():
    moved = {
        "tcgen05.ld.sync.aligned.32x32b.x128.b32": 4,
        "tcgen05.st.sync.aligned.16x64b.x2.b32": 1,
        "tcgen05.wait::ld.sync.aligned": 9,
    }
    assert count_clocks.tmem_bytes(moved) == 4 * 32 * 4 * 128 + 16 * 8 * 2
    stored = {"st.shared.v4.b32": 3, "st.volatile.shared.b16": 1, "st.global.v4.b32": 7, "ld.shared.b32": 7}
    assert count_clocks.stored_bytes(stored) == 3 * 32 * 16 + 32 * 2


def test_a_tile_costs_what_its_shape_says(d64):
    """S of 128 x 128 once through tensor memory in fp32, P in 16 bits, K and V in, both products; every score
    is exponentiated once, by one unit or the other."""
    rows = keys = 128
    assert d64.mma_flops == 2 * 2 * rows * keys * 64
    assert d64.tma_bytes == 2 * keys * 64 * 2
    clocks = d64.clocks
    assert clocks["MMA"] == 512
    assert clocks["TMEM"] == rows * keys * (4 + 2) / (4 * 128)
    assert clocks["SMEM"] == ((rows + keys) * 64 * 2 + keys * 64 * 2 + d64.tma_bytes) / 128
    share = 1 - 1 / Fraction(d64.config.shape.polynomial_every)
    per_row = 3  # at most so many besides: the factor of the rescale
    assert 0 <= clocks["exponentials"] - share * rows * keys / 16 <= per_row * rows / 16
    assert clocks["issue"] > clocks["FMA"] > 100


def test_scaled_to_128_by_128(d64):
    half = dataclasses.replace(
        d64.config, shape=dataclasses.replace(d64.config.shape, tile_n=d64.config.tile_n // 2)
    )
    narrow = count_clocks.TileCost(half, d64.opcodes, d64.mma_flops, d64.tma_bytes)
    assert narrow.clocks["exponentials"] == 2 * d64.clocks["exponentials"]


def test_what_the_kernel_does_not_do_is_reported(monkeypatch):
    def refuse(*_arguments, **_options):
        raise UnsupportedProblem("sm100 attention: not today")

    monkeypatch.setattr(AttentionConfig, "of", refuse)
    lines = list(count_clocks.rows([512]))
    assert lines and all("not today" in line[-1] for line in lines)
    monkeypatch.setattr(count_clocks, "SHAPES", {})
    monkeypatch.setattr(count_clocks, "SHARED_SHAPES", {})
    assert [line[-1] for line in count_clocks.rows([64])] == ["not supported"] * 2


def test_table_stands_between_its_markers(monkeypatch, tmp_path):
    monkeypatch.setattr(count_clocks, "markdown", lambda *_: "| a table |")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{count_clocks.BEGIN}\nold\n{count_clocks.END}\nafter\n")
    assert count_clocks.main(["--check", str(page)]) == 1
    assert count_clocks.main(["--write", str(page)]) == 0
    assert count_clocks.main(["--check", str(page)]) == 0
    text = page.read_text()
    assert "| a table |" in text and "old" not in text
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    with pytest.raises(SystemExit):
        generated_tables.replaced("no markers", [(count_clocks.BEGIN, count_clocks.END, "table")])
