"""The kernel of docs/debug_a_kernel.md: each way to look finds its defect, in the document's words."""

import re
import sys
from pathlib import Path

import pytest

from warpspec.sim.__main__ import main

DOCS = Path(__file__).resolve().parents[2] / "docs"
DOCUMENT = (DOCS / "debug_a_kernel.md").read_text()
COMMANDS = re.findall(r"^python -m warpspec\.sim (.*)$", DOCUMENT, re.MULTILINE)
MESSAGES = re.findall(r"^```\n(\w+: .*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)


def words(text: str) -> str:
    """A message without its line breaks and without the folder that the kernel is in."""
    return " ".join(text.replace(f"{DOCS}/", "").split())


@pytest.fixture(autouse=True)
def in_docs(monkeypatch):
    monkeypatch.chdir(DOCS)
    monkeypatch.setattr(sys, "path", list(sys.path))


def run(command: str) -> int:
    return main(command.replace("'", "").split())


@pytest.mark.parametrize("number", range(3))
def test_the_message_is_the_documents(number, capsys):
    assert run(COMMANDS[number]) == 1
    printed = words(capsys.readouterr().out)
    expected = words(MESSAGES[number].replace("\n  ...\n", "\n"))
    assert printed.startswith(expected), printed[:2000]


def test_the_second_defect_is_silent_under_one_schedule_and_the_third_under_eight():
    assert run(COMMANDS[1].replace("--seeds 8", "")) == 0
    assert run(COMMANDS[2].replace("--check order", "--seeds 8")) == 0


def test_the_mended_kernel_is_clean(capsys):
    assert len(COMMANDS) == 4 and run(COMMANDS[3]) == 0
    assert "warning" not in capsys.readouterr().out
