"""The flags that docs/engines.md tells users to add to an engine's command."""

import re
import shlex
from itertools import takewhile
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"


def flags_of(engine: str) -> list[list[str]]:
    """The flags of each row of the page's first table, in the column whose heading begins with an engine's command."""
    lines = PAGE.read_text().split("## Switch a server", 1)[1].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in takewhile(lambda line: line.startswith("|"), lines[start:])
    ]
    column = next(i for i, heading in enumerate(rows[0]) if heading.startswith(f"`{engine}"))
    found: list[list[str]] = []
    for cell in (row[column] for row in rows[2:]):
        own = [word for flags in re.findall(r"`(--[^`]*)`", cell) for word in shlex.split(flags)]
        found.append([*found[-1], *own] if cell.startswith("the same") else own)
    return found
