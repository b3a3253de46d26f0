"""The drawing in the house style, kept true: who may import whom, and what the pure packages must not touch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import wheelsched

ROOT = Path(wheelsched.__file__).parent

LINES = {
    "cli": 8,
    "api": 7, "web": 7,
    "node": 6,
    "cluster": 5, "backup": 5, "dispatch": 5, "executor": 5,
    "replica": 4,
    "store": 3, "cron": 3, "runtime": 3,
    "engine": 2, "raft": 2, "wheel": 2, "fairness": 2,
    "model": 1,
    "core": 0,
}  # fmt: skip
# Beside the stack. The commands use the SDK and the importers as anybody does; nothing else in the stack knows them.
BESIDE = {"client": {"core", "model"}, "worker": {"client", "core", "model"}, "imports": {"core", "cron"}, "_native": set()}
USERS_OF_SDK = {"cli"}
# Leaves that their own package chooses: the compiled twins.
USERS_OF_NATIVE = {"wheel", "fairness", "engine", "replica", "dispatch", "api"}
PURE = ("engine", "raft", "wheel", "fairness", "model")
# The marker of a module for tests; it may import anything, and nothing imports it.
FREE = {"testing"}

FORBIDDEN_MODULES = {"asyncio", "time", "random", "secrets", "uuid", "socket", "threading", "zoneinfo", "datetime", "pathlib"}
FORBIDDEN_CALLS = {"open", "hash", "id", "input", "print"}
FORBIDDEN_ATTRIBUTES = {("os", "urandom"), ("os", "open"), ("os", "getrandom"), ("time", "time")}


@dataclass(frozen=True)
class Import:
    file: Path
    line: int
    package: str
    imported: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT.parent)}:{self.line}: {self.package}/ imports {self.imported}/"


def files_of(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def packages() -> list[str]:
    return sorted(path.name for path in ROOT.iterdir() if path.is_dir() and any(path.glob("*.py")))


def modules_named(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=str(module), level=0, names=names):
            # `from wheelsched import api` names the package in the second half.
            yield from (f"{module}.{alias.name}" for alias in names) if module == "wheelsched" else (module,)


def imports_of(package: str) -> Iterator[Import]:
    for file in files_of(package):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for name in modules_named(node):
                parts = name.split(".")
                if parts[0] == "wheelsched" and len(parts) > 1 and parts[1] in {*LINES, *BESIDE, *FREE} - {package}:
                    yield Import(file, node.lineno, package, parts[1])  # type: ignore[attr-defined]


def is_allowed(package: str, imported: str) -> bool:
    if package in FREE:
        return True
    if imported in FREE:
        return False
    if package in BESIDE:
        return imported in BESIDE[package]
    if imported == "_native":
        return package in USERS_OF_NATIVE
    if imported in BESIDE:
        return package in USERS_OF_SDK
    return LINES[imported] < LINES[package]


def test_every_package_has_its_place_in_the_drawing() -> None:
    assert set(packages()) <= {*LINES, *BESIDE, *FREE}


@pytest.mark.parametrize("package", packages())
def test_a_package_imports_only_from_lines_below_its_own(package: str) -> None:
    wrong = [str(found) for found in imports_of(package) if not is_allowed(package, found.imported)]
    assert not wrong, "\n".join(wrong)


def test_imports_are_absolute() -> None:
    relative = [
        f"{file.relative_to(ROOT.parent)}:{node.lineno}"
        for file in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not relative


@pytest.mark.parametrize("package", [package for package in PURE if package in packages()])
def test_pure_packages_neither_wait_nor_read_nor_draw(package: str) -> None:
    wrong = []
    for file in files_of(package):
        for line, what in impurities(ast.parse(file.read_text(encoding="utf-8"))):
            wrong.append(f"{file.relative_to(ROOT.parent)}:{line}: {what}")
    assert not wrong, "\n".join(wrong)


def impurities(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        for name in modules_named(node):
            if name.split(".")[0] in FORBIDDEN_MODULES:
                yield node.lineno, f"imports {name}"  # type: ignore[attr-defined]
        match node:
            case ast.AsyncFunctionDef() | ast.Await() | ast.AsyncFor() | ast.AsyncWith():
                yield node.lineno, "waits"
            case ast.Call(func=ast.Name(id=name)) if name in FORBIDDEN_CALLS:
                yield node.lineno, f"calls {name}()"
            case ast.Attribute(value=ast.Name(id=module), attr=name) if (module, name) in FORBIDDEN_ATTRIBUTES:
                yield node.lineno, f"uses {module}.{name}"


@pytest.mark.parametrize(
    "code",
    [
        "import time",
        "from random import Random",
        "async def f(): pass",
        "open('x')",
        "import os\nos.urandom(8)",
        "hash('x')",
        "import asyncio.tasks",
    ],
)
def test_the_purity_check_sees_what_it_looks_for(code: str) -> None:
    assert list(impurities(ast.parse(code)))


def test_the_import_check_sees_what_it_looks_for() -> None:
    assert not is_allowed("engine", "wheel")
    assert not is_allowed("store", "runtime")
    assert not is_allowed("api", "client")
    assert not is_allowed("worker", "engine")
    assert not is_allowed("node", "testing")
    assert is_allowed("node", "dispatch") and is_allowed("cli", "worker") and is_allowed("testing", "node")
