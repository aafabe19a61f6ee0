"""How simulated results are judged against recorded ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Arrays = list[np.ndarray]
LISTED = 3  # differing elements shown of each output


def bitwise(simulated: Arrays, recorded: Arrays, inputs: Arrays) -> list[str]:
    """Every bit of every output is as recorded."""
    problems = []
    for number, (got, want) in enumerate(zip(simulated, recorded, strict=True)):
        unsigned = f"u{got.dtype.itemsize}"
        got_bits, want_bits = got.view(unsigned), want.view(unsigned)
        wrong = np.argwhere(got_bits != want_bits)
        for place in map(tuple, wrong[:LISTED]):
            at, bits = [int(i) for i in place], got_bits[place]
            problems.append(f"output {number} {at}: {bits:#x}, recorded {want_bits[place]:#x}")
        if len(wrong) > LISTED:
            problems.append(f"output {number}: {len(wrong)} of {got.size} elements differ")
    return problems


# ---- floating-point formats ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """A binary floating-point format: total bits, mantissa bits; IEEE encoding of infinity and NaN."""

    bits: int
    mantissa: int

    @property
    def bias(self) -> int:
        return (1 << (self.bits - self.mantissa - 2)) - 1

    def is_nan(self, values: np.ndarray) -> np.ndarray:
        sign = 1 << (self.bits - 1)
        infinity = (sign - 1) ^ ((1 << self.mantissa) - 1)
        return (values & np.uint64(sign - 1)) > np.uint64(infinity)

    def value(self, bits: int) -> float:
        """The number; infinities and NaN as such."""
        sign = -1.0 if bits >> (self.bits - 1) else 1.0
        exponent = bits >> self.mantissa & ((1 << (self.bits - self.mantissa - 1)) - 1)
        mantissa = bits & ((1 << self.mantissa) - 1)
        if exponent == (1 << (self.bits - self.mantissa - 1)) - 1:
            return float("nan") if mantissa else sign * float("inf")
        if exponent == 0:
            return sign * mantissa * 2.0 ** (1 - self.bias - self.mantissa)
        return sign * (mantissa + (1 << self.mantissa)) * 2.0 ** (exponent - self.bias - self.mantissa)

    def round(self, value: float) -> float:
        """Round to nearest, ties to even; from double, so of results of which no half-way case matters."""
        if not np.isfinite(value) or value == 0:
            return value
        step = self.ulp(value)
        rounded = float(np.round(value / step)) * step
        greatest = 2.0 ** (self.bias + 1) - 2.0 ** (self.bias - self.mantissa)
        return rounded if abs(rounded) <= greatest else float(np.copysign(np.inf, value))

    def ulp(self, value: float) -> float:
        """Distance of neighbouring numbers of this format around |value|."""
        exponent = int(np.floor(np.log2(abs(value)))) if value else 1 - self.bias
        return 2.0 ** (max(exponent, 1 - self.bias) - self.mantissa)


FORMATS = {
    "f16": Format(16, 10),
    "bf16": Format(16, 7),
    "f16x2": Format(16, 10),
    "bf16x2": Format(16, 7),
    "f32": Format(32, 23),
    "tf32": Format(32, 23),
    "f64": Format(64, 52),
}


# ---- documented errors of approximations ---------------------------------------------------------------


@dataclass(frozen=True)
class Approximation:
    """A documented bound: `function` in double precision; `error(truth, format, *operands)`: the greatest
    distance from the truth, None where the ISA guarantees nothing."""

    function: Callable[..., float]
    error: Callable[..., float | None]


def _ulps(count: int):
    def error(truth, form, *operands):
        rounded = form.round(truth)
        if np.isinf(rounded):  # the truth is finite: beyond the greatest number
            return count * form.ulp(2.0**form.bias)
        return count * form.ulp(rounded) + abs(rounded - truth)

    return error


def _relative(bound: float):
    """Relative; below the least normal number the spacing of subnormals is allowed as well."""

    def error(truth, form, *operands):
        least = 2.0 ** (1 - form.bias)
        return bound * abs(truth) + (form.ulp(truth) / 2 if abs(truth) < least else 0.0)

    return error


def _absolute(bound: float):
    return lambda truth, form, *operands: bound


def _trigonometric(truth, form, x):
    if abs(x) <= 2 * np.pi:
        return 2.0**-20.5
    return 2.0**-14.7 if abs(x) <= 100 * np.pi else None


def _logarithm(truth, form, x):
    return 2.0**-22 if 0.5 < x < 2 else 2.0**-22 * abs(truth)


def _quotient(a: float, b: float) -> float:
    return float(np.float64(a) / np.float64(b))


def _fast_quotient(a: float, b: float) -> float:
    """div.approx for 2**126 < |b| < 2**128: NaN for infinite a, else a zero of the quotient's sign."""
    if 2.0**126 < abs(b) < 2.0**128 and not np.isnan(a):
        return float("nan") if np.isinf(a) else float(np.copysign(0.0, a) * np.copysign(1.0, b))
    return _quotient(a, b)


def _fast_quotient_error(truth, form, a, b):
    return None if abs(b) < 2.0**-126 else _ulps(2)(truth, form)


# PTX ISA 9.7.3.8 (div), .13 (rcp), .15 (sqrt), .16 (rsqrt), .18 (sin), .19 (cos), .20 (lg2), .21 (ex2), .22
# (tanh); for halves 9.7.4.9 (tanh) and 9.7.4.10 (ex2).
APPROXIMATIONS = {
    "div.approx.f32": Approximation(_fast_quotient, _fast_quotient_error),
    "div.full.f32": Approximation(_quotient, _ulps(2)),
    "rcp.approx.f32": Approximation(lambda x: _quotient(1.0, x), _ulps(1)),
    "sqrt.approx.f32": Approximation(np.sqrt, _relative(2.0**-23)),
    "rsqrt.approx.f32": Approximation(
        lambda x: _quotient(1.0, np.sqrt(np.float64(x))), _relative(2.0**-22.9)
    ),
    "sin.approx.f32": Approximation(np.sin, _trigonometric),
    "cos.approx.f32": Approximation(np.cos, _trigonometric),
    "lg2.approx.f32": Approximation(np.log2, _logarithm),
    "ex2.approx.f32": Approximation(np.exp2, _ulps(2)),
    "tanh.approx.f32": Approximation(np.tanh, _relative(2.0**-11)),
    "tanh.approx.f16x2": Approximation(np.tanh, _absolute(2.0**-10.987)),
    "tanh.approx.bf16x2": Approximation(np.tanh, _absolute(2.0**-8)),
    "ex2.approx.f16x2": Approximation(np.exp2, _relative(2.0**-9.9)),
    "ex2.approx.bf16x2": Approximation(np.exp2, _relative(2.0**-7)),
}


def within_bound(rule: Approximation, form: Format, ftz: bool, result: int, operands: list[int]) -> bool:
    """Whether a result is as near the truth as the ISA says, special values and signs of zero exact."""
    values = [form.value(bits) for bits in operands]
    least = 2.0 ** (1 - form.bias)
    if ftz:
        values = [float(np.copysign(0.0, v)) if abs(v) < least else v for v in values]
    with np.errstate(all="ignore"):
        truth = float(rule.function(*values))
    got = form.value(result)
    if np.isnan(truth) or np.isnan(got):
        return np.isnan(truth) and np.isnan(got)
    with np.errstate(all="ignore"):
        allowed = 0.0 if np.isinf(truth) else rule.error(truth, form, *values)
    if allowed is None:
        return True
    if truth == 0 or (ftz and abs(truth) < least and got == 0):
        return got == 0 and bool(np.signbit(got) == np.signbit(truth))
    if ftz and got == 0:  # flushed after an error that took it below the least normal number
        return abs(truth) <= least + allowed
    if np.isinf(got):
        return np.signbit(got) == np.signbit(truth) and np.isinf(form.round(abs(truth) + allowed))
    if np.isinf(truth):
        return False
    return abs(got - truth) <= allowed


# ---- groups of instructions ----------------------------------------------------------------------------

_MODIFIERS_FIRST = ("cvt", "set", "slct")  # the type named first is the result's


def result_format(opcode: str) -> Format | None:
    """The format of a result, None where its bits are to be compared as they are."""
    parts = opcode.split(".")
    if parts[0] in ("setp", "testp"):
        return None
    types = [p for p in parts[1:] if p in FORMATS or (p[:1] in "sube" and p[1:2].isdigit())]
    if not types:
        return None
    return FORMATS.get(types[0] if parts[0] in _MODIFIERS_FIRST else types[-1])


def elements(rows: np.ndarray, form: Format | None, packed: bool) -> np.ndarray:
    """Result words [rows, count] as elements [n, count] uint64: halves apart, words of a double together."""
    rows = rows.view(np.uint32).astype(np.uint64)
    if packed:
        return np.concatenate([rows & np.uint64(0xFFFF), rows >> np.uint64(16)])
    if form is not None and form.bits == 64:
        return rows[0:1] | rows[1:2] << np.uint64(32)
    return rows


def instruction_problems(body: str, got: np.ndarray, want: np.ndarray, inputs: Arrays) -> list[str]:
    """One instruction's result words [rows, count] against the recorded ones; inputs: words a, b, c."""
    opcode = body.split(" ", 1)[0]
    form = result_format(opcode)
    packed = form is not None and "f16x2" in opcode  # f16x2 and bf16x2
    got, want = elements(got, form, packed), elements(want, form, packed)
    rule = APPROXIMATIONS.get(opcode.replace(".ftz", ""))
    if rule is None:
        equal = got == want
        if form is not None:
            equal |= form.is_nan(got) & form.is_nan(want)
        wrong = np.argwhere(~equal)
    else:
        ftz = ".ftz" in opcode
        operands = [elements(word[None], form, packed) for word in inputs[: body.count(",")]]
        wrong = []
        for place in np.ndindex(got.shape):
            sources = [int(o[place]) for o in operands]
            results = (int(got[place]), int(want[place]))
            if not all(within_bound(rule, form, ftz, result, sources) for result in results):
                wrong.append(place)
    problems = []
    for place in list(map(tuple, wrong))[:LISTED]:
        lane = place[-1]
        words = " ".join(f"{int(w.view(np.uint32)[lane]):#x}" for w in inputs)
        problems.append(
            f"`{body}` on {words}: {int(got[place]):#x}, recorded {int(want[place]):#x} (element {place[0]})"
        )
    if len(wrong) > LISTED:
        problems.append(f"`{body}`: {len(wrong)} of {got.size} results are wrong")
    return problems


def of_group(group: tuple[str, ...], results: Callable[[str], int]):
    """Judge of a kernel that runs a group of instructions; `results`: result words of one."""

    def judge(simulated: Arrays, recorded: Arrays, inputs: Arrays) -> list[str]:
        problems, row = [], 0
        for body in group:
            rows = slice(row, row + results(body))
            problems += instruction_problems(body, simulated[0][rows], recorded[0][rows], inputs)
            row = rows.stop
        return problems

    return judge


def of_formats(formats: tuple[str | None, ...]):
    """Judge of outputs whose rows (first axis) hold words of one format: NaN equals NaN, else bitwise."""

    def judge(simulated: Arrays, recorded: Arrays, inputs: Arrays) -> list[str]:
        problems = []
        for number, (got, want) in enumerate(zip(simulated, recorded, strict=True)):
            for row, name in enumerate(formats):
                form = FORMATS.get(name) if name else None
                kind = f"u{form.bits // 8}" if form else "u4"
                left, right = got[row].view(kind), want[row].view(kind)
                equal = left == right
                if form:
                    equal |= form.is_nan(left.astype(np.uint64)) & form.is_nan(right.astype(np.uint64))
                wrong = np.argwhere(~equal)
                for place in map(tuple, wrong[:LISTED]):
                    at = [int(i) for i in place]
                    text = f"{int(left[place]):#x}, recorded {int(right[place]):#x}"
                    problems.append(f"output {number} row {row} ({name}) {at}: {text}")
                if len(wrong) > LISTED:
                    problems.append(f"output {number} row {row} ({name}): {len(wrong)} of {left.size} differ")
        return problems

    return judge
