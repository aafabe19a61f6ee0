"""The Python blocks of the documents, for the tests that run them."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "sim/*.md")
    for path in ROOT.glob(pattern)
)


def python_blocks() -> list:
    """Every Python block, as parameters named by document and line. None needs a GPU."""
    found = []
    for name in DOCUMENTS:
        text = (ROOT / name).read_text()
        for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, match.start()) + 1
            found.append(pytest.param(match[1], id=f"{name}:{line}"))
    return found


def run_block(block: str, folder: Path) -> None:
    """Run a block in a file of its own in ``folder``: the DSL reads the source of what it compiles."""
    path = folder / "block.py"
    path.write_text(block)
    runpy.run_path(str(path))
