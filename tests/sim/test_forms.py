"""Native code is compiled once for each form of an instruction; and where registers lie on the way."""

import random

import numpy as np
import pytest
from helpers.ptx_launch import launch

from warpspec.common.disk_cache import CACHE_VARIABLE
from warpspec.sim import runtime
from warpspec.sim.codegen import forms
from warpspec.sim.codegen.emitter import Form
from warpspec.sim.codegen.layout import RegisterFile
from warpspec.sim.codegen.places import TemporaryPlaces
from warpspec.sim.instruction import Kernel

ADD = "ld.param.u64 %rd1, [x]; mul.wide.u32 %rd2, %tid.x, 4; add.s64 %rd1, %rd1, %rd2; ld.global.b32 %r1, [%rd1];"


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """The names of the forms that are compiled, by a process that has compiled nothing and an empty cache."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    names, compile_ = [], forms._compile

    def counting(wanted):
        names.extend(wanted)
        return compile_(wanted)

    monkeypatch.setattr(forms, "_compile", counting)
    fresh(monkeypatch)
    yield names
    runtime._program.cache_clear()
    forms.trampoline.cache_clear()


def fresh(monkeypatch):
    """Restore the state of a process that has loaded nothing."""
    runtime._program.cache_clear()
    forms.trampoline.cache_clear()
    for name in ("_addresses", "_files"):
        monkeypatch.setattr(forms, name, {})
    monkeypatch.setattr(forms, "_loaded", set())


def added(amount: int, register: str = "%r2") -> np.ndarray:
    """What a kernel that adds `amount` to 32 numbers leaves."""
    data = {"x": np.arange(32, dtype=np.uint32)}
    launch(
        f"{ADD} add.s32 {register}, %r1, {amount}; st.global.b32 [%rd1], {register};", data, block=(32, 1, 1)
    )
    return data["x"]


def test_kernels_share_forms_whatever_their_registers_and_immediates(compiled):
    assert (added(5) == np.arange(32) + 5).all()
    first = len(compiled)
    assert first > 5 and len(set(compiled)) == first
    assert (added(7, "%r9") == np.arange(32) + 7).all()
    assert len(compiled) == first


def test_forms_are_found_on_disk(compiled, monkeypatch):
    added(5)
    count = len(compiled)
    fresh(monkeypatch)
    assert (added(6) == np.arange(32) + 6).all()
    assert len(compiled) == count


@pytest.mark.parametrize("lost", ["forms-*.o", "index"])
def test_what_is_lost_on_disk_is_compiled_again(compiled, monkeypatch, tmp_path, lost):
    added(5)
    count = len(compiled)
    for path in (tmp_path / "sim").glob(lost):
        path.unlink()
    fresh(monkeypatch)
    assert (added(6) == np.arange(32) + 6).all()
    assert len(compiled) == 2 * count


def test_a_form_is_named_by_its_text_and_by_what_it_calls():
    names = {
        forms.name_of(Form(text, frozenset(needs)))
        for text, needs in (("a", ()), ("b", ()), ("a", ("x",)), ("a", ("y",)))
    }
    assert len(names) == 4


@pytest.mark.parametrize("seed", range(20))
def test_no_place_is_written_while_its_value_is_needed(seed):
    """Random instructions on registers of three widths: every source must lie where its value was written."""
    rng = random.Random(seed)
    bits = {f"%r{i}": rng.choice((1, 32, 64)) for i in range(12)}
    registers = RegisterFile(Kernel("k", [], bits, [], {}))
    homes = [name for name in bits if rng.random() < 0.6]
    registers.place(homes)
    names = list(bits)
    touched = [
        (tuple(rng.sample(names, rng.randint(0, 3))), tuple(rng.sample(names, rng.randint(0, 2))))
        for _ in range(40)
    ]
    live_out = frozenset(name for name in homes if rng.random() < 0.7)
    places = TemporaryPlaces(registers)
    found = places.block(touched, live_out)
    end = places.reserve(registers.size)
    memory = {offset: (name, "before") for name, offset in registers.offset.items()}
    value = {name: (name, "before") for name in homes}
    for at, ((reads, writes), (sources, targets)) in enumerate(zip(touched, found, strict=True)):
        place = places.resolve(sources, targets)
        for name in reads:
            assert (name in place.sources) == (name in value)
            if name in value:
                assert memory[place.sources[name]] == value[name]
        for name in writes:
            offset, masked = place.targets[name]
            assert offset < end and masked == (offset < registers.size)
            memory[offset] = value[name] = (name, at)
    assert {name: memory[registers.offset[name]] for name in live_out} == {n: value[n] for n in live_out}
    assert all(memory[registers.offset[n]] == (n, "before") for n in homes if n not in live_out)
