"""Launches whose clusters run on two processes: errors, interruption, threads, output."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.ptx_launch import launch

from warpspec.sim.errors import MemoryFault

NUMBER = (
    "ld.param.u64 %rd1, [out]; mov.u32 %r1, %ctaid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd2, %rd1, %rd2;"
)
COUNT_FOR_LONG = """
  mov.b32 %r2, 0;
LOOP: add.u32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, 2000000000; @%p2 bra LOOP;
"""
SOON = 20.0  # seconds; COUNT_FOR_LONG takes minutes


def has_children() -> bool:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def test_an_error_does_not_wait_for_the_other_process():
    start = time.monotonic()
    with pytest.raises(MemoryFault, match="past the end of out"):
        launch(
            NUMBER
            + "and.b32 %r3, %r1, 1; setp.eq.u32 %p1, %r3, 1; @%p1 bra LONG;"
            + "st.global.b32 [%rd1+64], %r1; exit; LONG:"
            + COUNT_FOR_LONG,
            {"out": np.zeros(4, np.uint32)},
            grid=(8, 1, 1),
        )
    assert time.monotonic() - start < SOON
    assert not has_children()


def interrupted_launch() -> str:
    """What becomes of a long launch that is interrupted. In a process of its own: one started in the background, as a
    test run may be, ignores interrupts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    start = time.monotonic()
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        launch(NUMBER + COUNT_FOR_LONG, {"out": np.zeros(4, np.uint32)}, grid=(8, 1, 1))
    except KeyboardInterrupt:
        if time.monotonic() - start >= SOON:
            return "late"
        return "a child is left" if has_children() else "interrupted"
    return "ran to its end"


def test_an_interrupt_ends_both_processes():
    command = [sys.executable, "-c", "import test_processes; print(test_processes.interrupted_launch())"]
    places = [
        str(Path(__file__).parent),
        str(Path(__file__).parents[1]),
        os.environ.get("PYTHONPATH", ""),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SOON + 40)
    assert result.stdout.strip() == "interrupted", result.stderr


def test_launches_from_several_threads():
    outs = [np.zeros(16, np.uint32) for _ in range(3)]
    body = NUMBER + "st.global.b32 [%rd2], %r1;"
    threads = [
        threading.Thread(target=launch, args=(body, {"out": out}), kwargs={"grid": (16, 1, 1)})
        for out in outs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(out.tolist() == list(range(16)) for out in outs)


def test_every_cta_prints_to_our_standard_output(capsys):
    launch(
        """
      .local .align 8 .b8 arguments[8];
      mov.u32 %r1, %ctaid.x; mov.u64 %rd1, arguments;
      cvta.local.u64 %rd2, %rd1; st.local.u32 [arguments], %r1;
      mov.u64 %rd3, format; cvta.global.u64 %rd4, %rd3;
      { .param .b64 p0; st.param.b64 [p0], %rd4; .param .b64 p1; st.param.b64 [p1], %rd2; .param .b32 r0;
        call.uni (r0), vprintf, (p0, p1); ld.param.b32 %r2, [r0]; }
    """,
        variables=".extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);\n"
        ".global .align 1 .b8 format[8] = {67, 84, 65, 32, 37, 100, 10, 0};",
        grid=(8, 1, 1),
        block=(1, 1, 1),
    )
    assert sorted(capsys.readouterr().out.split("\n")) == ["", *(f"CTA {i}" for i in range(8))]
