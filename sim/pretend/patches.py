"""Temporary replacements of attributes of other modules and classes."""

from __future__ import annotations

from collections.abc import Mapping

MISSING = object()


class Patches:
    """Replaced attributes; `undo` puts back what was there, the last one first."""

    def __init__(self) -> None:
        self._before: list[tuple[object, str, object]] = []

    def set(self, owner: object, name: str, value: object) -> None:
        """Replace an attribute, or add it. A class keeps what it inherits when the patch is undone."""
        before = vars(owner).get(name, MISSING) if isinstance(owner, type) else getattr(owner, name, MISSING)
        self._before.append((owner, name, before))
        setattr(owner, name, value)

    def update(self, owner: object, values: Mapping[str, object]) -> None:
        """Replace several attributes."""
        for name, value in values.items():
            self.set(owner, name, value)

    def item(self, owner: dict, key: str, value: object) -> None:
        """Replace an item of a dict (of os.environ, sys.modules)."""
        self._before.append((owner, key, owner.get(key, MISSING)))
        owner[key] = value

    def undo(self) -> None:
        """Put everything back."""
        while self._before:
            owner, name, before = self._before.pop()
            mapping = hasattr(owner, "keys")
            if mapping and before is MISSING:
                owner.pop(name, None)
            elif mapping:
                owner[name] = before
            elif before is MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
