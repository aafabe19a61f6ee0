"""Tables in a Markdown file between markers: printing, writing and checking them. Shared by the scripts that count."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

# (begin marker, end marker, what stands between them)
Section = tuple[str, str, str]


def table(header: tuple[str, ...], rows) -> str:
    """A Markdown table."""
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def replaced(text: str, sections: list[Section]) -> str:
    """``text`` with what lies between the markers replaced. SystemExit where it lacks them."""
    for begin, end, generated in sections:
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise SystemExit(f"no lines {begin!r} and {end!r} in the file")
        text = f"{before}{begin}\n\n{generated}\n\n{end}{after}"
    return text


def main(description: str, script: str, sections: Callable[[], list[Section]], arguments=None) -> int:
    """The command line: print the sections, or --write or --check them in a file. Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_file_options(parser)
    return deliver(parser.parse_args(arguments), script, sections())


def add_file_options(parser: argparse.ArgumentParser) -> None:
    """--check FILE and --write FILE, for ``deliver``."""
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--check", type=Path, metavar="FILE")
    target.add_argument("--write", type=Path, metavar="FILE")


def deliver(options: argparse.Namespace, script: str, made: list[Section]) -> int:
    """Print the sections, or write or check them in a file, as the options say. Returns the exit status."""
    if options.write:
        options.write.write_text(replaced(options.write.read_text(), made))
    elif options.check:
        text = options.check.read_text()
        if replaced(text, made) != text:
            print(f"{options.check} is stale: run {script} --write {options.check}")
            return 1
    else:
        print("\n\n".join(generated for _, _, generated in made))
    return 0
