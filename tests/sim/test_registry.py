"""The table of opcodes: one row an opcode, no defaults, and what depends on the rows' facts."""

from dataclasses import replace

import pytest

from warpspec.sim import registry
from warpspec.sim.cfg import sharing
from warpspec.sim.codegen.program import Program
from warpspec.sim.errors import UnsupportedInstruction
from warpspec.sim.ptx import parse
from warpspec.sim.registry import Collective, Family, declare, fallback, find, row_of
from warpspec.sim.report import family

HEAD = ".version 9.0\n.target sm_100a\n.address_size 64\n"


@pytest.fixture
def rows(monkeypatch):
    """A copy of the table that a test may change."""
    monkeypatch.setattr(registry, "_ROWS", dict(registry._ROWS))
    find.cache_clear()
    yield registry._ROWS
    monkeypatch.undo()
    find.cache_clear()


def module_of(body: str):
    return parse(
        f"{HEAD}.entry k()\n{{\n.reg .pred %p<9>; .reg .b32 %r<9>; .reg .b64 %rd<9>;\n{body}\nret;\n}}\n"
    )


def program_of(body: str) -> Program:
    module = module_of(body)
    return Program(module, module.kernels["k"])


def test_the_longest_name_wins():
    names = {
        "cp.async.bulk.global.shared::cta.bulk_group": "cp.async.bulk",
        "cp.async.bulk.wait_group.read": "cp.async.bulk.wait_group",
        "bar.sync": "bar",
        "bar.red.popc.u32": "bar.red",
        "bar.warp.sync": "bar.warp",
        "st.global.b32": "st",
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32": "st.async",
    }
    assert {opcode: row_of(opcode).name for opcode in names} == names


@pytest.mark.parametrize("opcode", ["tex.2d.v4.f32.f32", "shfl.idx.b32", "reduce", "cp", "brx"])
def test_an_opcode_without_a_row_raises_with_its_name(opcode):
    assert find(opcode) is None
    with pytest.raises(UnsupportedInstruction, match=rf"does not execute `{opcode}`"):
        row_of(opcode)


def test_every_row_has_one_way_to_be_executed_or_native_code_and_a_fallback():
    for row in registry._ROWS.values():
        executed = row.translator is not None or row.handler is not None
        assert executed != (row.control is not None), row


def test_a_second_row_and_a_fallback_without_a_row_are_refused(rows):
    with pytest.raises(ValueError, match="two rows for the opcode mov"):
        declare("mov", family=Family.MOVE, destinations=1)
    with pytest.raises(ValueError, match="frobnicate has no row"):
        fallback("frobnicate")(print)
    with pytest.raises(ValueError, match="add has a Python handler"):
        fallback("add")(print)
    with pytest.raises(TypeError, match="colective"):
        declare("frobnicate", family=Family.MOVE, destinations=1, colective=Collective.WARP)


@pytest.mark.parametrize(
    ("opcode", "name"),
    [
        ("brx.idx", "control"),
        ("bra.uni", "control"),
        ("setmaxnreg.inc.sync.aligned.u32", "miscellaneous"),
        ("griddepcontrol.wait", "barriers"),
        ("match.any.sync.b32", "warp"),
        ("createpolicy.fractional.L2::evict_first.b64", "memory"),
        ("add.s32", "integer"),
        ("add.f32x2", "float packed"),
        ("sqrt.rn.f64", "special function"),
        ("tcgen05.wait::ld.sync.aligned", "tcgen05: tcgen05.wait::ld"),
    ],
)
def test_the_family_that_an_opcode_is_counted_in(opcode, name):
    assert family(opcode) == name


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("redux.sync.add.u32 %r1, %r2, -1;", False),
        ("red.global.add.u32 [%rd1], %r1;", False),  # seen when the launch has ended
        ("red.release.gpu.global.add.u32 [%rd1], %r1;", True),
        ("atom.global.add.u32 %r1, [%rd1], 1;", False),  # nobody reads %r1
        ("atom.global.add.u32 %r1, [%rd1], 1; st.shared.b32 [%r2], %r1;", True),
        ("atom.global.exch.b32 %r1, [%rd1], 1;", True),
        ("atom.shared.add.u32 %r1, [%r2], 1;", False),
        ("ld.global.b32 %r1, [%rd1];", False),
        ("ld.acquire.gpu.global.b32 %r1, [%rd1];", True),
        ("st.release.cta.shared.b32 [%r1], %r2;", False),
        ("st.volatile.b32 [%rd1], %r2;", True),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd1], [%r1], %r2;", False),
    ],
)
def test_whether_clusters_can_see_each_other(body, expected):
    assert sharing(module_of(body).kernels["k"])[0] is expected


def test_registers_that_a_row_says_are_read_are_kept(rows):
    """Native code keeps the registers that are read after a block: a row that says otherwise is other code."""
    body = "mov.b32 %r1, 1; bar.sync %r1; mov.b32 %r2, %r1; st.shared.b32 [%r2], %r2;"
    before = program_of(body).live
    assert before.names(before.live_out[0]) == ["%r1"]
    rows["bar"] = replace(rows["bar"], destinations=1)
    find.cache_clear()
    assert program_of(body).live.names(program_of(body).live.live_out[0]) == []
