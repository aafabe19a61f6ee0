"""The simulator's modules form layers: no module imports, however indirectly, one that imports it."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import warpspec.sim

ROOT = Path(warpspec.sim.__file__).parent


def imported_by(path: Path, modules: set[str]) -> set[str]:
    """Modules of the simulator that a file imports: at its top, in functions or for type checking only."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & modules or {node.module}
    return found & modules


def test_imports_have_no_cycle():
    paths = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        paths[".".join(("warpspec", "sim", *parts)).removesuffix(".__init__")] = path
    assert len(paths) > 50
    imports = {name: imported_by(path, set(paths)) - {name} for name, path in paths.items()}
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the cycle
