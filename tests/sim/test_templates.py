"""An instruction like one that was translated before has the form and the parameters that its own translation has."""

import numpy as np
from helpers.ptx_launch import launch

from warpspec.sim.codegen import templates

# In each line instructions that must share a form, or must not: patterns of registers, immediates, guards, widths,
# registers that were never written, the carry flag, the number of a load.
BODY = """
  ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd1, %rd1, %rd2;
  add.u32 %r2, %r1, %r1; add.u32 %r3, %r1, %r2; add.u32 %r4, %r2, %r3; add.u32 %r4, %r4, %r3; add.u32 %r4, %r3, %r4;
  add.u32 %r5, %r4, 7; add.u32 %r6, %r4, 9; add.u32 %r7, 7, %r4; add.u32 %r8, %r5, %r30; add.u32 %r8, %r8, %r31;
  add.cc.u32 %r9, %r5, %r6; addc.u32 %r10, %r7, %r8; add.cc.u32 %r11, %r9, %r10; addc.u32 %r12, %r11, %r9;
  setp.lt.u32 %p1, %r1, 9; @%p1 add.u32 %r12, %r12, %r2; @!%p1 add.u32 %r12, %r12, %r3; @%p1 add.u32 %r11, %r12, %r2;
  cvt.u64.u32 %rd3, %r12; cvt.u64.u32 %rd4, %r11; add.u64 %rd3, %rd3, %rd4; cvt.u32.u64 %r13, %rd3;
  st.global.u32 [%rd1], %r13; st.global.u32 [%rd1+128], %r12; ld.global.u32 %r14, [%rd1];
  ld.global.u32 %r15, [%rd1+128];
  mov.b64 %rd5, {%r14, %r15}; mov.b64 {%r16, %r17}, %rd5; add.u32 %r18, %r16, %r17; st.global.u32 [%rd1], %r18;
"""


def test_alike_instructions_are_translated_alike(monkeypatch):
    shared, translated = [], templates.translated

    def compared(ins, registers, place, logging, emitter):
        known = len(templates._templates)
        form, parameters = translated(ins, registers, place, logging, emitter)
        shared.append(len(templates._templates) == known)
        e = emitter()
        e.translate(ins)
        assert (form.text, form.needs, parameters) == (e.form().text, e.form().needs, e.parameters), ins.text
        return form, parameters

    monkeypatch.setattr(templates, "translated", compared)
    monkeypatch.setattr(templates, "_templates", {})
    launch(BODY, {"out": np.zeros(64, np.uint32)})
    assert sum(shared) >= 4 and not all(shared)
