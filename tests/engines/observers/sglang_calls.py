"""A plug-in of SGLang for tests: it writes down which attention computes each layer, in SGLang's own processes.

With this folder in the path, each call of an attention backend appends the name of its class to the file that the
environment variable FILE names, and after it the simulated architecture if the call launched kernels in warpspec's
simulator. The variable ARCH names the architecture, or is empty.
"""

FILE = "WARPSPEC_TEST_SGLANG_CALLS"
ARCH = "WARPSPEC_TEST_SGLANG_ARCH"


def register() -> None:
    """Entry point of SGLang's plug-ins."""
    import os
    import sys
    from contextlib import nullcontext

    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    from warpspec.common.launch import simulating

    forward = AttentionBackend.forward

    def noted(self, *arguments, **named):
        kind, before = type(self), report()
        arch = os.environ[ARCH]
        with simulating(arch, sm_count=2) if arch else nullcontext():
            result = forward(self, *arguments, **named)
        launched = "" if report() is before else f":{arch}"
        with open(os.environ[FILE], "a") as file:
            file.write(f"{kind.__module__}.{kind.__qualname__}{launched}\n")
        return result

    def report():
        sim = sys.modules.get("warpspec.sim")
        return sim and sim.last_report()

    AttentionBackend.forward = noted
