"""The Python examples of README.md and sim/README.md, for the tests that run them.

An example whose fence says ``python gpu`` needs one; the others run on a CPU.
"""

from __future__ import annotations

import re
import runpy
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("README.md", "sim/README.md")
FENCE = re.compile(r"^```python *(?P<words>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Example:
    """line: of the document, where the code begins."""

    document: str
    line: int
    code: str
    needs_gpu: bool

    @property
    def id(self) -> str:
        return f"{self.document}:{self.line}"

    def run(self, folder: Path) -> dict:
        """Run it as a file of its own in ``folder``: the DSL reads a kernel's source. Returns its global names."""
        path = folder / "example.py"
        path.write_text("\n" * (self.line - 1) + self.code)  # a traceback has the document's lines
        return runpy.run_path(str(path))


def examples() -> list[Example]:
    """All of the documents'. ValueError for a word that means nothing."""
    return [
        example for document in DOCUMENTS for example in examples_of(document, (ROOT / document).read_text())
    ]


def examples_of(document: str, text: str) -> list[Example]:
    """Those of one document's text."""
    found = []
    for block in FENCE.finditer(text):
        line = text.count("\n", 0, block.start("code")) + 1
        if block["words"] not in ("", "gpu"):
            raise ValueError(f"{document}:{line}: ```python {block['words']}, where only gpu may follow")
        found.append(Example(document, line, block["code"], block["words"] == "gpu"))
    return found
