"""The Python examples of README.md, for the tests that run them.

A word after ``python`` on an example's fence says how it runs: ``gpu`` needs one, ``raises=NAME`` ends with that
exception. Without a word it runs on a CPU to its end. A checkpoint called ``...`` is a tiny gpt-oss.
"""

from __future__ import annotations

import re
import runpy
from dataclasses import dataclass
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"
FENCE = re.compile(r"^```python *(?P<words>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Example:
    """line: of README.md, where the code begins. raises: name of the exception that ends it, or ""."""

    line: int
    code: str
    needs_gpu: bool
    raises: str

    @property
    def id(self) -> str:
        return f"line-{self.line}"

    def run(self, folder: Path) -> dict:
        """Run it as a file in an empty folder, which the DSL needs to find its source. Its global names."""
        path = folder / "example.py"
        path.write_text("\n" * (self.line - 1) + self.code)  # lines in a traceback are README.md's
        try:
            names = runpy.run_path(str(path))
        except Exception as error:
            if type(error).__name__ != self.raises:
                raise
            return {}
        assert not self.raises, f"README.md:{self.line} ends without {self.raises}"
        return names


def examples() -> list[Example]:
    """All of README.md. ValueError for a word that means nothing."""
    text = README.read_text()
    found = []
    for block in FENCE.finditer(text):
        words = block["words"].split()
        raises = "".join(word.removeprefix("raises=") for word in words if word.startswith("raises="))
        if unknown := set(words) - {"gpu", f"raises={raises}"}:
            raise ValueError(
                f"README.md: {sorted(unknown)} after ```python, where gpu or raises=NAME may stand"
            )
        line = text.count("\n", 0, block.start("code")) + 1
        found.append(Example(line, block["code"], "gpu" in words, raises))
    return found
