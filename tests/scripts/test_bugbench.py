"""scripts/bugbench.py: what it makes of a run's output."""

import bugbench
import pytest

FAULT = """warpspec.sim.errors.TmemFault: tcgen05.ld touches columns 0 to 3 (freed by warp 12, /a/kernel.py:1341)
  at kernel K, CTA (0, 0, 0), warp 9, lanes 0-31, PTX line 7103
    from /a/kernel.py:2995 in epilogue"""
ORDER = """memory order: 2 findings
  accesses that nothing orders: shared memory, offset 0x400 to 0x40f of CTA (1, 0, 0)
    first   CTA (1, 0, 0) warp 8 writes: PTX line 490 `st` from /a/kernel.py:649 in kernel
    second  CTA (0, 0, 0) warp 4 reads: PTX line 743 `ld` from /a/kernel.py:855 in kernel
  by the ISA's text alone, no tcgen05.fence::before_thread_sync: /a/kernel.py:3 to /a/kernel.py:4"""
TEXT = "memory order: 1 finding\n  by the ISA's text alone, no fence: /a/kernel.py:3 to /a/kernel.py:4"
WARNED = """warning: no proxy fence at PTX line 9, which hardware tolerates
no proxy fence: shared memory
    first   CTA (1, 0, 0) warp 8 reads: PTX line 8 `ld` from /a/kernel.py:5 in kernel
    second  CTA (0, 0, 0) warp 4 writes: PTX line 9 `cp` from /a/kernel.py:7 in kernel
memory order: nothing found"""
CRASHED = """.Fatal Python error: Floating point exception

Current thread 0x00007f81 (most recent call first):
  File "/a/warpspec/sim/host.py", line 117 in _call
  File "/a/flash_attn/cute/interface.py", line 1540 in _flash_attn_fwd
  File "/a/flash_attn/cute/interface.py", line 3096 in forward"""
BY_TEXT = "order: fences by the ISA's text alone"


@pytest.mark.parametrize(
    ("output", "code", "wanted"),
    [
        (FAULT, 2, ["TmemFault at `kernel.py:1341` and `kernel.py:2995`"]),
        (ORDER, 1, ["order: accesses that nothing orders at `kernel.py:649` and `kernel.py:855`", BY_TEXT]),
        (TEXT, 1, [BY_TEXT]),
        ("memory order: nothing found", 0, []),
        (
            CRASHED,
            136,
            ["the process ends: Floating point exception at `interface.py:1540` and `interface.py:3096`"],
        ),
        (WARNED, 0, ["warning: no proxy fence at `kernel.py:5` and `kernel.py:7`"]),
        ("Traceback\nImportError: no module", 2, ["stops: ImportError: no module"]),
    ],
)
def test_verdicts(output, code, wanted):
    assert bugbench.verdict(output, code) == wanted


def test_every_case_has_a_script_a_fix_and_two_versions():
    assert len({case.name for case in bugbench.CASES}) == len(bugbench.CASES) >= 20
    for case in bugbench.CASES:
        assert case.fix and case.script, case.name
        name = case.script.partition("::")[0]
        ours = bugbench.HERE / "bugbench" / name
        assert ours.exists() or name.startswith(tuple(file.split("*")[0] for file in case.files)), case.name
        if case.fix == "ours":  # nothing to reverse
            assert case.mends, case.name
