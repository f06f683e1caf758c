"""Holds the rules about the source itself: who imports whom, what nobody calls, and that nothing lies about unused."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "schemas": {"schemas"},
    "cext": {"cext", "schemas"},
    "sidecar": {"sidecar", "schemas", "cext"},
    "connector": {"connector", "schemas", "cext"},
}
SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
BANNED_CALLS = {"eval", "exec", "breakpoint"}
BANNED_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
TOP_LEVEL = {
    "pyproject.toml", "setup.py", "README.md", "ARCHITECTURE.md", "CHANGELOG.md", "LICENSE", "Makefile", ".ci",
    ".gitignore", ".clang-format", "sidecar", "connector", "cext", "schemas", "docker", "tests", "examples",
}  # fmt: skip


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, at top level) of each import; relative ones as the folder they reach."""
    found = []
    tree = ast.parse(path.read_text())
    top = set(map(id, tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or node.names[0].name
            if node.level:
                reached = ("hostkv", *path.relative_to(ROOT).parts[: -node.level])
                module = ".".join((*reached, module))
            found.append((module, id(node) in top))
    return found


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_package_imports_only_what_it_may(path: Path) -> None:
    allowed = PACKAGES[package_of(path)]
    for module, top in imports(path):
        parts = module.split(".")
        if parts[0] == "hostkv":
            assert parts[1] in allowed, f"{path} imports {module}"
        assert parts[0] not in BANNED_MODULES, f"{path} imports {module}"
        assert parts[0] not in PACKAGES, f"{path} imports {module} by the folder's name; use a relative import"
        if parts[0] in ("torch", "vllm", "sglang"):
            assert package_of(path) == "connector", f"{path} imports {module}"
            assert path.parent.name in ("vllm", "sglang") or not top, f"{path} imports {module} at top level"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_banned_call_and_no_swallowed_exception(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in BANNED_CALLS, f"{path}:{node.lineno} calls {node.func.id}"
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{path}:{node.lineno} has a bare except"
            names = [n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)]
            assert not {"Exception", "BaseException"} & set(names), f"{path}:{node.lineno} catches {names}"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_module_opens_with_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


@pytest.mark.parametrize("path", [p for p in SOURCES if p.name != "vllm.py"], ids=name_of)
def test_environment_is_read_in_one_place_per_package(path: Path) -> None:
    reads = re.findall(r"os\.(?:environ|getenv)", path.read_text())
    assert not reads or path.name in ("cli.py", "client.py"), f"{path} reads the environment"


def test_every_module_is_used() -> None:
    entry_points = {"__init__.py", "cli.py", "bench.py", "vllm.py", "namespace.py", "layout.py"}
    text = "\n".join(path.read_text() for path in SOURCES)
    for path in SOURCES:
        if path.name not in entry_points:
            assert re.search(rf"\bfrom \.+(\w+)? ?import .*\b{path.stem}\b|\.{path.stem} import", text), f"nobody imports {path}"


def test_top_level_holds_only_what_it_should() -> None:
    made = {line.strip("/\n") for line in (ROOT / ".gitignore").read_text().splitlines()} | {".git"}
    found = {path.name for path in ROOT.iterdir() if not any(path.match(pattern) for pattern in made)}
    assert found <= TOP_LEVEL, "nothing else lies at the top without a reason"


def test_c_sources_are_formatted_to_be_read() -> None:
    for path in [*(ROOT / "cext").glob("*.[ch]"), *(ROOT / "schemas").glob("*.h")]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert len(line) <= 150, f"{path}:{number} has {len(line)} characters"
            assert "\t" not in line, f"{path}:{number} has a tab"
