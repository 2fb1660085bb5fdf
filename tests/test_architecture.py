"""The layout: packages in one order, imports in one direction, torch only where it may be."""

import ast
import importlib
import re
import sys
from pathlib import Path

import pytest

import narrowcast
from breakages import BREAKAGES
from child_processes import output_of

SOURCE = Path(narrowcast.__file__).parent
# A package imports only packages above it.
ORDER = [
    "errors",
    "_files",
    "formats",
    "machine",
    "policy",
    "scaling",
    "capture",
    "casting",
    "gradients",
    "weights",
    "replay",
    "training",
    "integrations",
    "observe",
    "scripts",
    "attach",
    "report",
    "verify",
    "apex",
    "migrate",
    "cli",
    "__init__",
    "__main__",
]
MOST_PUBLIC_NAMES = 95
PUBLIC = ["errors", "formats", "scaling", "weights", "observe", "training", "integrations", "apex"]
TORCH_FREE = {"errors", "scaling", "capture", "report", "cli", "migrate"}
ENTRIES = {"__init__", "__main__"}


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def is_module(name: str) -> bool:
    """Whether ``narrowcast.x.y`` is a file or a package, not a name inside one."""
    package, *parts = name.split(".")
    path = SOURCE.joinpath(*parts)
    return package == "narrowcast" and (path.with_suffix(".py").is_file() or (path / "__init__.py").is_file())


def imports_of(path: Path) -> list[tuple[str, int]]:
    """Every module that a file imports, those inside functions too, with the line.

    ``from narrowcast.policy import _rule`` imports ``narrowcast.policy._rule``.
    """
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, (
                f"{path}:{node.lineno}: a relative import hides which package it comes from"
            )
            module = node.module or ""
            for alias in node.names:
                named = f"{module}.{alias.name}"
                # The top package's names are those of its packages, or public ones that no file may import.
                names_module = module == "narrowcast" or is_module(named)
                found.append((named if names_module else module, node.lineno))
    return found


FILES = sorted(SOURCE.rglob("*.py"))
# Modules that have apex's names.
APEX_MODULES = [path for path in FILES if package_of(path) == "apex" and not path.stem.startswith("__")]
APEX_MODULES = [path for path in APEX_MODULES if not path.stem.startswith("_") or path.stem == "_amp_state"]
PRIVATE_FILES = [path for path in FILES if path.stem not in ENTRIES | {"errors"} and path not in APEX_MODULES]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_packages_import_only_packages_above_them(path):
    package = package_of(path)
    if package in ENTRIES:
        return
    for module, line in imports_of(path):
        parts = module.split(".")
        if parts[0] != "narrowcast" or len(parts) < 2 or parts[1].startswith("__"):
            continue
        assert parts[1] in ORDER, f"{path}:{line} imports {module}, which is not in the table"
        assert ORDER.index(parts[1]) <= ORDER.index(package), (
            f"{path}:{line}: {package}/ imports {parts[1]}/ below it"
        )
        if parts[1] not in (package, "errors"):
            private = [part for part in parts[2:] if part.startswith("_")]
            assert not private, (
                f"{path}:{line}: import from {parts[1]}/ what its __init__ offers, not {module}"
            )


def module_of(path: Path) -> str:
    """``narrowcast.policy._rule``, or ``narrowcast.policy`` for the ``__init__.py`` of a package."""
    parts = ["narrowcast", *path.relative_to(SOURCE).with_suffix("").parts]
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def test_modules_do_not_import_in_a_cycle():
    """Imports inside functions count, and so do those in the ``__init__.py`` of a package."""
    edges = {}
    for path in FILES:
        if path not in (SOURCE / "__init__.py", SOURCE / "__main__.py"):
            imported = {module for module, _ in imports_of(path)}
            edges[module_of(path)] = {module for module in imported if module.startswith("narrowcast.")}
    done: set[str] = set()

    def visit(module, trail):
        assert module not in trail, " -> ".join([*trail[trail.index(module) :], module])
        if module in done or module not in edges:
            return
        for imported in sorted(edges[module]):
            visit(imported, [*trail, module])
        done.add(module)

    for module in sorted(edges):
        visit(module, [])


@pytest.mark.parametrize("path", PRIVATE_FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_files_inside_a_package_are_private(path):
    public = path.parent.name in ("cli", "integrations")
    assert path.stem.startswith("_") or public, f"{path.name} should be _{path.name}"


@pytest.mark.parametrize("package", [package for package in ORDER if (SOURCE / package).is_dir()])
def test_names_in_all_exist(package):
    module = importlib.import_module(f"narrowcast.{package}")
    assert module.__doc__, f"{package}/ has no docstring"
    for name in module.__all__:
        assert hasattr(module, name), f"narrowcast.{package}.__all__ names {name}, which does not exist"


def test_public_names_exist_and_others_raise():
    for name in narrowcast.__all__:
        assert hasattr(narrowcast, name)
    assert dir(narrowcast) == sorted(narrowcast.__all__)
    with pytest.raises(AttributeError, match="no attribute 'autocats'"):
        _ = narrowcast.autocats


def modules_after(code: str) -> set[str]:
    program = f"{code}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"
    printed = output_of([sys.executable, "-c", program])
    return set(importlib.import_module("json").loads(printed.splitlines()[-1]))


@pytest.mark.parametrize("package", sorted(TORCH_FREE | {"formats"}))
def test_torch_free_packages_do_not_import_torch(package):
    assert "torch" not in modules_after(f"import narrowcast.{package}")


def test_the_library_imports_neither_compiler_nor_command():
    loaded = modules_after("import narrowcast as nc; nc.autocast; nc.apply; nc.Policy; nc.certify")
    assert not {"typer", "rich", "jinja2", "torch._dynamo"} & loaded


def test_public_names_are_few():
    names = [name for name in narrowcast.__all__ if name not in PUBLIC]
    for package in PUBLIC:
        names += importlib.import_module(f"narrowcast.{package}").__all__
    assert len(names) <= MOST_PUBLIC_NAMES, f"{len(names)} public names"


def test_architecture_md_names_files_and_functions_that_exist():
    text = (SOURCE.parents[1] / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:\w+/)+\w+\.py)(?:::(\w+))?`", text)
    assert len(named) > 30
    for file, name in named:
        path = next((one / file for one in (SOURCE, SOURCE.parents[1]) if (one / file).is_file()), None)
        assert path, f"{file} is not there"
        found = [getattr(node, "name", "") for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
        assert not name or name in found, f"{file} has no {name}"


def test_breakages_can_be_placed():
    for breakage in BREAKAGES.values():
        text = (SOURCE / breakage["file"]).read_text(encoding="utf-8")
        assert text.count(breakage["old"]) == 1, f"{breakage['id']}: move it to where the behaviour is now"


def test_the_version_is_written_once():
    declared = (SOURCE.parents[1] / "pyproject.toml").read_text()
    assert f'version = "{narrowcast.__version__}"' in declared


def test_files_that_docstrings_name_exist():
    for path in FILES:
        for named in re.findall(r"`([a-z_]+/[\w/]+\.py)", path.read_text(encoding="utf-8")):
            if named.split("/")[0] in ORDER:
                assert (SOURCE / named).is_file(), f"{path} names {named}, which does not exist"
