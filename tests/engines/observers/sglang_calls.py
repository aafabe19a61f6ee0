"""A plug-in of SGLang for tests: it writes down which attention computes each layer, in SGLang's own processes.

With this folder in the path, each call of an attention backend appends the name of its class to the file that the
environment variable FILE names.
"""

FILE = "WARPSPEC_TEST_SGLANG_CALLS"


def register() -> None:
    """Entry point of SGLang's plug-ins."""
    import os

    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    forward = AttentionBackend.forward

    def noted(self, *arguments, **named):
        kind = type(self)
        with open(os.environ[FILE], "a") as file:
            file.write(f"{kind.__module__}.{kind.__qualname__}\n")
        return forward(self, *arguments, **named)

    AttentionBackend.forward = noted
