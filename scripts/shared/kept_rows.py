"""Results of a benchmark kept in a file of JSON lines, so that a run takes up where another one stopped."""

from __future__ import annotations

import json
from pathlib import Path


class KeptRows:
    """rows: those of the file, then those added; each a dictionary. path: of the file, None to keep nothing."""

    def __init__(self, path: Path | None):
        self.path, self.rows = path, []
        if path is not None and path.exists():
            self.rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]

    def __contains__(self, key: dict) -> bool:
        """Whether a row has all of the key's items."""
        return any(all(row.get(name) == value for name, value in key.items()) for row in self.rows)

    def add(self, row: dict) -> None:
        """Keep a row; on disk before this returns."""
        self.rows.append(row)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")
