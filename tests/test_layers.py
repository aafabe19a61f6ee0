"""The packages form layers: host code needs no device code, and configurations need no compiler."""

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {path.name for path in (ROOT / "src/warpspec").iterdir() if path.is_symlink()}


# Which packages a package may import, at the top of a file or in a function.
KERNELS = ("cache", "fmha", "moe", "softmax", "latent", "swap")
MAY_IMPORT = {
    "common": (),
    "sim": ("common",),
    "cache": ("common",),
    "fmha": ("common",),
    "moe": ("common",),
    "softmax": ("common",),
    "swap": ("common",),
    "latent": ("common", "fmha"),
    "engines": ("common", *KERNELS),
    "aot": ("common", *KERNELS),
    "cli": ("aot", "common", "sim", *KERNELS),
}


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def packages_imported(path: Path) -> set[str]:
    """Packages of warpspec that a file imports."""
    names = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("warpspec.")}


def test_packages_import_lower_layers_only():
    assert set(MAY_IMPORT) == PACKAGES
    for package, allowed in MAY_IMPORT.items():
        for path in (ROOT / package).rglob("*.py"):
            above = packages_imported(path) - {package, *allowed}
            assert not above, f"{path.relative_to(ROOT)} imports {above}"


def module_name(path: Path) -> str:
    """A file's module, from its place below the repository's root."""
    return ".".join(("warpspec", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def test_files_do_not_import_each_other():
    """Imports at the top of files have no circle. (A host file that loads its kernel inside a function may.)"""
    files = {module_name(path): path for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    imports = {}
    for module, path in files.items():
        found = imports[module] = set()
        for node in parsed(path).body:
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    found |= {name if name in files else node.module} & files.keys() - {module}
    assert sum(map(len, imports.values())) > 1000
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError with the circle


def test_configurations_load_no_compiler():
    """A configuration and its plan can be made, and its budgets added up, where CuTe DSL is not installed."""
    files = [path for name in PACKAGES for path in (ROOT / name).rglob("config.py")]
    names = sorted(f"warpspec.{'.'.join(path.relative_to(ROOT).with_suffix('').parts)}" for path in files)
    assert len(names) > 10
    code = f"import importlib, sys; [importlib.import_module(n) for n in {names}]; assert 'cutlass' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_dsl_is_imported_as_a_whole_first():
    """Python lets a thread import cutlass.cute while another one is still importing cutlass; both then find parts
    missing, and no kernel compiles in that process any more. A thread that asks for cutlass itself waits.

    So calls may come from several threads at once, the first ones of a process, too.
    """
    wrong = []
    for path in (path for name in PACKAGES for path in (ROOT / name).rglob("*.py")):
        tree = parsed(path)
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        first = first_of_dsl(tree.body)
        firsts = [first] if first else [first_of_dsl(ast.walk(function)) for function in functions]
        wrong += [(path, name) for name in firsts if name not in (None, "cutlass")]
    assert not wrong


def first_of_dsl(nodes: Iterable[ast.AST]) -> str | None:
    """The module of CuTe DSL that the first import of one among these statements names."""
    imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
    modules = [name for node in sorted(imports, key=lambda node: node.lineno) for name in modules_of(node)]
    return next((name for name in modules if name.split(".")[0] == "cutlass"), None)


def modules_of(node: ast.Import | ast.ImportFrom) -> list[str]:
    """The modules that a statement names, in order."""
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]


def test_host_code_of_common_imports_no_device_code():
    for path in (ROOT / "common").glob("*.py"):
        assert "warpspec.common.device" not in path.read_text(), path
