"""The map between S and P: how a product q.k becomes a logit. Every kernel of attention and of its gradients uses it.

    logit = softcap(scale * q.k) + bias        softcap(x) = cap * tanh(x / cap), or x

``LogitMap`` describes the map at compile time; two numbers come at run time. Kernels apply the map with
``device.logits``. Masks come after it: a hidden logit is -inf, whatever the map gave.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from warpspec.common.logarithms import LOG2_E
from warpspec.common.operands import FLOAT32, Number
from warpspec.fmha.heads import class_of
from warpspec.fmha.problem import AttentionProblem

# A factor of 0 would turn a hidden score, -inf, into NaN. This one keeps it and weighs all visible keys alike.
SMALLEST_SCALE = 2.0**-100
BIAS_BYTES = {"bfloat16": 2, "float32": 4}  # of an element
# One of so many capped scores is computed without the reciprocal instruction, by V's head size: at small ones the
# exponential unit is the bottleneck (scripts/bench_attention.py --only heads; docs/notebook/attention.md).
NEWTON_EVERY = {64: 1, 128: 3, 256: 4}


@dataclass(frozen=True)
class LogitMap:
    """What the map consists of.

    negate: scores are negated first, for a negative scale. bias: dtype of the bias that is added, or None; bias_heads,
    bias_batches: each head, each batch row has its own bias. softcap: whether there is a cap. newton_every: one of so
    many capped scores has its reciprocal computed on the multiply-add units instead of the exponential unit; 0: none.
    """

    negate: bool = False
    bias: str | None = None
    softcap: bool = False
    newton_every: int = 0
    bias_heads: bool = False
    bias_batches: bool = False

    def __post_init__(self):
        assert self.bias in (None, *BIAS_BYTES)

    @property
    def in_powers(self) -> bool:
        """Whether mapped scores are logits in log2 units. Otherwise the map only negates, and the exponential's
        multiply-add applies the factor at no cost."""
        return self.softcap or self.bias is not None

    @classmethod
    def of(cls, problem: AttentionProblem, bias: str | None, signed: bool = False) -> LogitMap:
        """The map of a problem. bias: dtype of its bias. signed: whether the factor keeps the scale's sign, so that no
        score is negated."""
        own = {
            "bias": bias,
            "bias_heads": problem.has_bias and problem.bias_heads,
            "bias_batches": problem.has_bias and problem.bias_batches,
        }
        if problem.softcap is not None:
            return cls(softcap=True, newton_every=NEWTON_EVERY.get(class_of(problem.heads.v), 0), **own)
        return cls(negate=problem.scale < 0 and not signed, **own)


class LogitNumbers(NamedTuple):
    """The map's run-time numbers.

    factor: the factor of q.k: scale * log2(e), which gives the logit in log2 units; with a soft cap 2 * scale * log2(e)
    / cap, which gives the base-2 exponent of tanh's exponential. cap: the cap in log2 units, or None.
    """

    factor: Annotated[Any, Number(FLOAT32)]
    cap: Annotated[Any, Number(FLOAT32, when=lambda config: config.logits.softcap)] = None

    @classmethod
    def of(cls, problem: AttentionProblem, signed: bool = False) -> LogitNumbers:
        """The numbers of a problem. signed: as in ``LogitMap.of``."""
        if problem.softcap is not None:
            return cls(2 * LOG2_E * problem.scale / problem.softcap, problem.softcap * LOG2_E)
        scale = problem.scale if signed else max(abs(problem.scale), SMALLEST_SCALE)
        return cls(scale * LOG2_E)


PLAIN = LogitMap()  # nothing but the scale
