"""The documents: their Python blocks run as they stand, and their links lead somewhere."""

import re
import subprocess

import pytest
from helpers.documents import DOCUMENTS, ROOT, python_blocks, run_block


def anchors(text: str) -> set[str]:
    """What links within a document can name: its headings, as GitHub spells them."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("block", python_blocks())
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


def test_files_that_documents_name_exist():
    """Paths in backquotes end like a file of this repository, * standing for any part of a name."""
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    others = (
        "docs/notebook/",
        "docs/public_defects.md",
        "docs/run_other_kernels.md",
        "docs/run_tilelang.md",
        "docs/records/",
    )
    for name in (name for name in DOCUMENTS if not name.startswith(others)):
        text = re.sub(r"^```.*?^```$", "", (ROOT / name).read_text(), flags=re.MULTILINE | re.DOTALL)
        for path in set(re.findall(r"`(?:\.\./)*([\w./*-]+\.(?:py|sh|toml|md))`", text)):
            end = re.escape(path).replace(r"\*", "[^/]*")
            assert re.search(rf"(^|/){end}$", files, re.MULTILINE), f"{name}: there is no {path}"


def test_documents_that_code_names_exist():
    folders = [link.name for link in (ROOT / "src/warpspec").iterdir() if link.is_symlink()] + [
        "scripts",
        "tests",
    ]
    for module in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for name in re.findall(r"\bdocs/[\w./-]*\.md\b", module.read_text()):
            assert (ROOT / name).exists(), f"{module.relative_to(ROOT)}: there is no {name}"


def test_every_page_and_record_is_listed():
    """docs/notebook/README.md links every decision page and every record, whose name begins with its date."""
    listed = (ROOT / "docs/notebook/README.md").read_text()
    for path in (ROOT / "docs/records").iterdir():
        assert re.match(r"\d{4}-\d\d-\d\d-", path.name), path.name
        assert f"](../records/{path.name})" in listed, path.name
    for path in (ROOT / "docs/notebook").glob("[!R]*.md"):
        assert f"]({path.name})" in listed, path.name
