"""The map between S and P: how a product q.k becomes a logit. Every kernel of attention and of its gradients uses it.

    logit = softcap(scale * q.k) + bias        softcap(x) = cap * tanh(x / cap), or x

``LogitOptions`` is what a caller says about the map, and its definition in torch. ``LogitMap`` describes the map at
compile time, ``LogitNumbers`` holds its numbers at run time. Kernels apply the map with ``device.logits``. Masks come
after it: a hidden logit is -inf, whatever the map gave. Arguments, records and kernels pass the options on without
looking into them, so that another option is written here and in ``device.logits`` alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch

from warpspec.common.checks import kind_of
from warpspec.common.logarithms import LOG2_E
from warpspec.common.operands import FLOAT32, Number
from warpspec.fmha.heads import class_of

if TYPE_CHECKING:
    from warpspec.fmha.problem import AttentionProblem

# Kernels compute a capped logit with an error relative to its cap: under a larger cap the error would show.
SMALLEST_CAP, LARGEST_CAP = 1e-3, 1e4
LARGEST_SCALE = 2.0**100  # its product with log2(e), and that over a cap, are numbers in fp32
# A factor of 0 would turn a hidden score, -inf, into NaN. This one keeps it and weighs all visible keys alike; times
# ln(2) it is still a normal number in fp32. Where only the device knows the keys' scale, it bounds their product.
SMALLEST_SCALE = 2.0**-125
# A scale up to this is folded into the exponential's multiply-add, which is right for logits below 2**29
# (``device.softmax``). No model has a larger one, which takes a multiplication for each score.
LARGEST_FOLDED_SCALE = 16.0
BIAS_BYTES = {"bfloat16": 2, "float32": 4}  # of an element
# One in this many capped scores is computed without the reciprocal instruction, by V's head size: at small ones the
# exponential unit is the bottleneck (scripts/bench_attention.py --only heads; docs/notebook/attention.md).
NEWTON_EVERY = {64: 1, 128: 3, 256: 4}


class LogitOptions(NamedTuple):
    """Arguments of ``attention`` that say how products q.k become logits; its docstring defines them. A
    checked problem has what ``checked`` returned."""

    scale: float | None = None
    softcap: float | None = None

    def check_kinds(self) -> None:
        """Raise TypeError for an argument that is no number."""
        for name, value in self._asdict().items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise TypeError(f"{name}: must be a float, got {kind_of(value)}")

    def checked(self, head_dim: int) -> LogitOptions:
        """The options with defaults filled in: scale is a number; softcap is None if there is no cap. ValueError for
        values that are not allowed."""
        scale, softcap = self
        if scale is None:
            scale = head_dim**-0.5
        elif not abs(scale) <= LARGEST_SCALE:
            raise ValueError(f"scale: must be at most {LARGEST_SCALE:g} in magnitude and finite, got {scale}")
        if softcap == 0:
            softcap = None
        elif softcap is not None and not SMALLEST_CAP <= softcap <= LARGEST_CAP:
            raise ValueError(
                f"softcap: must be None or 0, or within {SMALLEST_CAP:g}..{LARGEST_CAP:g}, got {softcap}"
            )
        return LogitOptions(float(scale), None if softcap is None else float(softcap))

    def logits(self, products: torch.Tensor) -> torch.Tensor:
        """Logits without their bias of products q.k, by definition; of checked options."""
        logits = self.scale * products
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def slopes(self, logits: torch.Tensor) -> torch.Tensor | float:
        """Derivatives of ``logits`` with respect to scale * q.k, from its results."""
        return 1.0 if self.softcap is None else 1 - (logits / self.softcap) ** 2


@dataclass(frozen=True)
class BiasLayout:
    """The bias of a call. dtype: its name. heads, batches: each head, each batch row has its own."""

    dtype: str
    heads: bool = False
    batches: bool = False

    def __post_init__(self):
        assert self.dtype in BIAS_BYTES

    @classmethod
    def of(cls, bias: torch.Tensor) -> BiasLayout:
        """The layout of a checked bias [B or 1, Hq or 1, Sq, Sk]."""
        own = (bias.shape[dim] > 1 and bias.stride(dim) != 0 for dim in (1, 0))
        return cls(str(bias.dtype).removeprefix("torch."), *own)

    @property
    def bytes(self) -> int:
        """Bytes of an element."""
        return BIAS_BYTES[self.dtype]


@dataclass(frozen=True)
class LogitMap:
    """The parts of the map from scores to logits.

    negate: scores are negated first, for a negative scale. scales_first: scores are multiplied by the factor before
    anything is subtracted from them, for a large scale. bias: what is added, or None. softcap: whether there is a cap.
    newton_every: for one of this many capped scores, the multiply-add units compute the reciprocal instead of the
    exponential unit; 0: for none.
    """

    negate: bool = False
    scales_first: bool = False
    bias: BiasLayout | None = None
    softcap: bool = False
    newton_every: int = 0

    @property
    def curved(self) -> bool:
        """Whether the map of scores is more than a factor, so that gradients have its derivative as another one."""
        return self.softcap

    @property
    def in_powers(self) -> bool:
        """Whether mapped scores are logits in log2 units. Otherwise the map only negates, and the exponential's
        multiply-add applies the factor at no cost."""
        return self.curved or self.bias is not None or self.scales_first

    @classmethod
    def of(cls, problem: AttentionProblem, signed: bool = False) -> LogitMap:
        """The map of a problem. signed: whether the factor keeps the scale's sign, so that no score is negated."""
        if problem.logits.softcap is not None:
            newton_every = NEWTON_EVERY.get(class_of(problem.heads.v), 0)
            return cls(bias=problem.bias, softcap=True, newton_every=newton_every)
        scale = problem.logits.scale
        large = not signed and abs(scale) > LARGEST_FOLDED_SCALE
        return cls(negate=scale < 0 and not signed, scales_first=large, bias=problem.bias)


class LogitNumbers(NamedTuple):
    """The map's run-time numbers.

    factor: the factor of q.k: scale * log2(e), which gives the logit in log2 units; with a soft cap 2 * scale * log2(e)
    / cap, which gives the base-2 exponent of tanh's exponential. cap: the cap in log2 units, or None.
    """

    factor: Annotated[Any, Number(FLOAT32)]
    cap: Annotated[Any, Number(FLOAT32, when=lambda config: config.logits.softcap)] = None

    @classmethod
    def of(cls, options: LogitOptions, signed: bool = False, scaled: bool = False) -> LogitNumbers:
        """The numbers of a problem's options. signed: as in ``LogitMap.of``. scaled: whether the device multiplies the
        factor by a scale of keys (``device.logits.with_factor``)."""
        scale, softcap = options
        if softcap is not None:
            return cls(2 * LOG2_E * scale / softcap, softcap * LOG2_E)
        if not signed:
            scale = abs(scale) if scaled else max(abs(scale), SMALLEST_SCALE)
        return cls(scale * LOG2_E)


PLAIN = LogitMap()  # nothing but the scale
