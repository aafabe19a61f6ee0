"""The documents: their Python blocks run as they stand, and their links lead somewhere."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in (".", "docs", "sim")
    for path in (ROOT / folder).glob("*.md")
)
NEEDS_GPU = "# needs a GPU"  # first line of a block that does


def python_blocks() -> list:
    """(document, block) of every Python block that needs no GPU, named by document and line."""
    found = []
    for name in DOCUMENTS:
        text = (ROOT / name).read_text()
        for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            if not match[1].startswith(NEEDS_GPU):
                line = text.count("\n", 0, match.start()) + 1
                found.append(pytest.param(match[1], id=f"{name}:{line}"))
    return found


def anchors(text: str) -> set[str]:
    """What links within a document can name: its headings, as GitHub spells them."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("block", python_blocks())
def test_python_blocks_run(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "block.py"  # a file: the DSL reads the source of what it compiles
    path.write_text(block)
    runpy.run_path(str(path))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name):
    document = ROOT / name
    for target in re.findall(r"\]\(([^()\s]+)\)", document.read_text()):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        other = (document.parent / file).resolve() if file else document
        assert other.exists(), f"{name}: {target} names no file"
        if anchor:
            assert anchor in anchors(other.read_text()), f"{name}: {target} names no heading of {other.name}"
