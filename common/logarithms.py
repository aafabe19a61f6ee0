"""Bases of exponentials: GPUs compute exp2 and log2, so exp(x) is exp2(x * LOG2_E) and ln(x) is log2(x) * LN_2."""

from __future__ import annotations

import math

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
