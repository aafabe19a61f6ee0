"""docs/budgets.md holds what the script that makes its tables prints."""

from pathlib import Path

import print_budgets
import pytest
from shared import generated_tables

BUDGETS = Path(__file__).resolve().parents[2] / "docs/budgets.md"


def test_the_document_has_the_current_tables(capsys):
    status = generated_tables.main("", "print_budgets.py", print_budgets.sections, ["--check", str(BUDGETS)])
    assert status == 0, capsys.readouterr().out


def test_a_stale_document_is_named_and_written_anew(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("before\n<begin>\nold\n<end>\nafter\n")

    def main(*arguments) -> int:
        return generated_tables.main("", "a_script.py", lambda: [("<begin>", "<end>", "| new |")], arguments)

    assert main("--check", str(page)) == 1
    assert "run a_script.py --write" in capsys.readouterr().out
    assert main("--write", str(page)) == main("--check", str(page)) == 0
    assert page.read_text() == "before\n<begin>\n\n| new |\n\n<end>\nafter\n"
    page.write_text("no markers")
    with pytest.raises(SystemExit, match="<begin>"):
        main("--check", str(page))
