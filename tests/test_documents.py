"""The documents: their Python blocks run as they stand, and their links lead somewhere."""

import re

import pytest
from helpers.documents import DOCUMENTS, ROOT, python_blocks, run_block


def anchors(text: str) -> set[str]:
    """What links within a document can name: its headings, as GitHub spells them."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("block", python_blocks(needs_gpu=False))
def test_python_blocks_run(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_block(block, tmp_path)


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
