"""`warpspec.fmha` as the attention of nano-vllm (PyPI: nano-vllm-fork), which calls flash-attn's functions.

import warpspec.engines.nano_vllm as engine
engine.register()  # at the top of the script: nano-vllm's other ranks run the script's imports
from nanovllm import LLM
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from warpspec.fmha import flash_attn

FUNCTIONS = ("flash_attn_varlen_func", "flash_attn_with_kvcache")


def register(functions: ModuleType = flash_attn) -> None:
    """Make nano-vllm call the functions of `functions`, whether or not flash-attn is installed.

    The module `flash_attn` that other packages import does not change. This may be called repeatedly, and after
    nano-vllm was imported.

    Raises:
        ModuleNotFoundError: nano-vllm is not installed.
    """
    before = sys.modules.get("flash_attn")
    sys.modules["flash_attn"] = functions  # what nano-vllm's import finds
    try:
        layer = importlib.import_module("nanovllm.layers.attention")
    finally:
        if before is None:
            del sys.modules["flash_attn"]
        else:
            sys.modules["flash_attn"] = before
    for name in FUNCTIONS:
        setattr(layer, name, getattr(functions, name))
