"""Constants of the timing model, one table per chip: value, unit, source, confidence.

Clocks are those of the SM. HIGH: measured directly, by us or by several others. MEDIUM, LOW: by one source, or
inferred; predictions with these 20% lower and higher give the interval.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

VARIED = 0.2  # factor by which uncertain constants are varied


class Confidence(StrEnum):
    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


HIGH, MEDIUM, LOW = Confidence


@dataclass(frozen=True, slots=True)
class Constant:
    """value in the table's unit; about: what it is; source: who measured it, or how it follows."""

    value: float
    about: str
    source: str
    confidence: Confidence


@dataclass(frozen=True)
class Chip:
    """A GPU of the model. sms: SMs that kernels run on. ghz: SM clock under load. table: constants by name."""

    name: str
    target: str
    sms: int
    ghz: float
    table: dict[str, Constant]

    def clocks(self, name: str) -> float:
        """The value of a constant."""
        return self.table[name].value

    def has(self, name: str) -> bool:
        """Whether the table has a constant."""
        return name in self.table

    def varied(self, factor: float) -> Chip:
        """The chip with every uncertain constant slower (factor above 1) or faster by that factor."""
        table = {
            name: c if c.confidence is HIGH else replace(c, value=_slower(name, c.value, factor))
            for name, c in self.table.items()
        }
        return replace(self, table=table)

    def at(self, ghz: float) -> Chip:
        """The chip at another SM clock, which changes HBM's bytes per clock. ValueError unless positive."""
        if not ghz > 0:
            raise ValueError(f"ghz is {ghz!r}; a positive number is needed")
        return replace(self, ghz=ghz)

    def with_constants(self, **values: float) -> Chip:
        """The chip with other values of some constants, for what-if questions; KeyError for an unknown name."""
        table = {**self.table}
        for name, value in values.items():
            table[name] = replace(table[name], value=value, source="asked for")
        return replace(self, table=table)


# Constants that are rates: more is faster.
RATES = (
    *("shared_bytes", "tma_bytes", "store_bytes", "l2_bytes", "l2_shared_bytes", "l2_store_bytes", "hbm_gb"),
    *("hbm_read_gb", "store_buffer", "add_buffer"),
    *("add_bytes", "l2_add_bytes", "l2_dirty_mb", "tmem_load_bytes", "tmem_store_bytes", "mma_flops"),
)


def _slower(name: str, value: float, factor: float) -> float:
    return value / factor if name in RATES else value * factor
