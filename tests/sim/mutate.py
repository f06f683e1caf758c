"""`python -m tests.sim.mutate`: takes each rule of the core out, or turns it round, one at a time, and shows that the simulation sees it.

A rule of sidecar/core.py is a condition (inverted), an operand of `and` or `or` (left out), a comparison (with its bound moved by one), a
filter of a comprehension (left out), or a statement that has an effect (left out). A rule of cext/tables.c and cext/tables_repair.c is the
condition of an `if` (never, always) or an operand of && or || (left out); all of them are compiled into one extension, and a number in it
selects which one is broken. Each mutant is a process that runs seeds until one fails; one that crashes, or hangs for HANG_S, is caught too.

What survives is a hole in the simulation, or changes nothing that anybody could see: the latter are listed below, each with its reason, and
an entry that fits no rule any more is an error.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import importlib.util
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "sidecar" / "core.py"
C_FILES = ["tables.c", "tables_repair.c"]
HANG_S = 10.0  # of one seed, which takes a twentieth of a second

# Functions that take no part in what is simulated: text and counters for people, and the check of files that are not ours.
FOR_PEOPLE = {
    "status": "for people",
    "_count": "counters for people",
    "_refuse": "text for people",
    "internal_error": "the last word of a sidecar that fails; tests/unit",
    "refuse_frames": "the loop's; tests/unit",
    "locks": "the loop's, which keeps their files; tests/unit",
    "clients": "the loop's; tests/unit",
}
COUNTERS = re.compile(r"self\._count\(|self\._(requests|errors|items|members_gone|sessions_silenced)\b|\.(name|pid) = |\bevents\.append")
FOREIGN = {
    "hkv_geometry_check": "bad arguments: tests/unit/test_layout.py",
    "bytes_differ": "files that are not ours: tests/unit/test_layout.py",
    "number_differs": "files that are not ours: tests/unit/test_layout.py",
    "hkv_header_check": "files that are not ours: tests/unit/test_layout.py",
    "hkv_tables_adopt": "no memory",
    "hkv_tables_create": "no memory",
    "hkv_tables_repair": "no memory",
    "read_entry": "a writer in the middle of an entry: tests/crash/test_stopped_anywhere.py",
}

# (function, rule, how it is broken) -> why nobody can see it.
EXEMPT: dict[tuple[str, str, str], str] = {
    ("watch", "held and beat and (beat == member.beat)", "without held"): "a lock that is not seen held has no heartbeat",
    (
        "_register",
        "number is not None and member.namespaces.get(number, fingerprint) != fingerprint",
        "without number is not None",
    ): "no namespace has the number None",
}


@dataclass
class Mutant:
    file: str
    line: int
    function: str
    rule: str
    how: str
    break_it: Callable[[], None]
    seeds: int = -1  # how many it took; -1: it survived

    @property
    def key(self) -> tuple[str, str, str]:
        return self.function, self.rule, self.how

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}: {self.rule}  [{self.how}]"


# ---- sidecar/core.py -----------------------------------------------------------------------------------------------------------------

INVERSE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
MOVED: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}


def python_mutants() -> Iterator[Mutant]:
    tree = ast.parse(CORE.read_text())
    for outer in tree.body:
        functions = outer.body if isinstance(outer, ast.ClassDef) else [outer]
        for function in functions:
            if isinstance(function, ast.FunctionDef) and function.name not in FOR_PEOPLE:
                yield from _of_function(tree, function)


def _of_function(tree: ast.Module, function: ast.FunctionDef) -> Iterator[Mutant]:
    def mutant(node: Any, rule: ast.AST, how: str, change: Callable[[], None]) -> Mutant:
        def break_it() -> None:
            import hostkv.sidecar.core as core

            change()
            exec(compile(ast.fix_missing_locations(tree), str(CORE), "exec"), core.__dict__)

        return Mutant("sidecar/core.py", node.lineno, function.name, ast.unparse(rule), how, break_it)

    def swap(owner: Any, name: str, value: Any) -> Callable[[], None]:
        return lambda: setattr(owner, name, value)

    for node in ast.walk(function):
        if isinstance(node, (ast.If, ast.While, ast.IfExp)):
            inverted = ast.UnaryOp(ast.Not(), node.test)
            yield mutant(node, node.test, "inverted", swap(node, "test", inverted))
        if isinstance(node, ast.BoolOp):
            for i, value in enumerate(node.values):
                rest = [other for other in node.values if other is not value]
                yield mutant(
                    node, node, f"without {ast.unparse(value)}", swap(node, "values", rest if len(rest) > 1 else [rest[0], rest[0]])
                )
                del i
        if isinstance(node, ast.Compare) and type(node.ops[0]) in MOVED:
            yield mutant(node, node, "bound moved", swap(node, "ops", [MOVED[type(node.ops[0])]()]))
        if isinstance(node, ast.Compare) and type(node.ops[0]) in INVERSE:
            yield mutant(node, node, "inverted", swap(node, "ops", [INVERSE[type(node.ops[0])]()]))
        if isinstance(node, ast.comprehension):
            for condition in node.ifs:
                yield mutant(condition, condition, "left out", swap(node, "ifs", []))
        for body in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            if isinstance(body, list):
                for i, statement in enumerate(body):
                    if _has_effect(statement) and not COUNTERS.search(ast.unparse(statement)):
                        yield mutant(statement, statement, "left out", lambda body=body, i=i: body.__setitem__(i, ast.Pass()))


def _has_effect(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call)
    if isinstance(statement, ast.Assign):
        return any(isinstance(target, (ast.Attribute, ast.Subscript, ast.Tuple)) for target in statement.targets)
    return isinstance(statement, (ast.AugAssign, ast.Delete, ast.Raise))


# ---- cext/tables*.c ------------------------------------------------------------------------------------------------------------------

NEVER, ALWAYS, WITHOUT = "never", "always", "without"
PRELUDE = """
extern int hkv_mutant;
#define HKV_RULE(n, ...) (hkv_mutant == (n) ? 0 : hkv_mutant == (n) + 1 ? 1 : (__VA_ARGS__))
#define HKV_PART(n, neutral, ...) (hkv_mutant == (n) ? (neutral) : (__VA_ARGS__))
"""


class CFile:
    """One source with every rule of it wrapped in a macro that can break it. It is taken as text, in which no string or comment has
    parentheses that do not match."""

    def __init__(self, path: Path, first: int) -> None:
        self.path, self.next = path, first
        self.mutants: list[Mutant] = []
        self.function = ""
        self.text = PRELUDE + "#line 1\n" + self._instrument(path.read_text())

    def _instrument(self, source: str) -> str:
        out, at = [], 0
        for match in re.finditer(r"^[a-z][^\n;={}]*?\b(\w+)\(|\bif \(|\breturn (?=[^;]*(?:&&|\|\|))", source, re.M):
            if match.start() < at:
                continue
            line = source.count("\n", 0, match.start()) + 1
            if match.group(1):
                self.function = match.group(1)
            elif match.group().startswith("if"):
                end = _closing(source, match.end() - 1)
                condition = source[match.end() : end]
                out += [source[at : match.end()], self._rule(condition, line)]
                at = end
            else:
                end = source.index(";", match.end())
                out += [source[at : match.end()], self._parts(source[match.end() : end], line)]
                at = end
        return "".join([*out, source[at:]])

    def _add(self, line: int, rule: str, how: str, number: int) -> None:
        def break_it() -> None:
            ctypes.c_int.in_dll(ctypes.CDLL(sys.modules["hostkv.cext._cext"].__file__), "hkv_mutant").value = number

        self.mutants.append(Mutant(f"cext/{self.path.name}", line, self.function, " ".join(rule.split()), how, break_it))

    def _rule(self, condition: str, line: int) -> str:
        number = self.next
        self.next += 2
        self._add(line, condition, NEVER, number)
        self._add(line, condition, ALWAYS, number + 1)
        return f"HKV_RULE({number}, {self._parts(condition, line)})"

    def _parts(self, expression: str, line: int) -> str:
        """Each operand of the outermost && or ||, and of those in parentheses below."""
        for operator, neutral in (("||", 0), ("&&", 1)):
            operands = _split(expression, operator)
            if len(operands) > 1:
                wrapped = []
                for operand in operands:
                    number = self.next
                    self.next += 1
                    self._add(line, expression, f"{WITHOUT} {' '.join(operand.split())}", number)
                    wrapped.append(f" HKV_PART({number}, {neutral}, {self._parts(operand, line)}) ")
                return operator.join(wrapped)
        inner = expression.strip()
        if inner.startswith("(") and _closing(inner, 0) == len(inner) - 1:
            return f"({self._parts(inner[1:-1], line)})"
        return expression


def _closing(text: str, opening: int) -> int:
    depth = 0
    for at in range(opening, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if depth == 0:
            return at
    raise ValueError("unbalanced")


def _split(text: str, operator: str) -> list[str]:
    parts, depth, start, at = [], 0, 0, 0
    while at < len(text):
        depth += (text[at] in "([{") - (text[at] in ")]}")
        if depth == 0 and text.startswith(operator, at):
            parts.append(text[start:at])
            at += 1
            start = at + 1
        at += 1
    return [*parts, text[start:]]


def build(directory: Path) -> list[Mutant]:
    """Compiles the extension with all its mutants and makes this process use it."""
    mutants: list[Mutant] = []
    objects, first = [], 1
    includes = [f"-I{ROOT / 'cext'}", f"-I{ROOT / 'cext/vendor'}", f"-I{ROOT / 'schemas'}", f"-I{sysconfig.get_paths()['include']}"]
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")
    running = []
    for source in sorted((ROOT / "cext").glob("*.c")):
        target = source
        if source.name in C_FILES:
            instrumented = CFile(source, first)
            first = instrumented.next
            mutants += instrumented.mutants
            target = directory / source.name
            target.write_text(instrumented.text)
        objects.append(str(directory / f"{source.stem}.o"))
        command = [*compiler, "-std=c11", "-O1", "-w", "-fPIC", "-pthread", *includes, "-c", str(target), "-o", objects[-1]]
        running.append(subprocess.Popen(command))
    (directory / "mutant.c").write_text('__attribute__((visibility("default"))) int hkv_mutant = 0;\n')
    if any(process.wait() for process in running):
        raise SystemExit("the mutants of cext do not compile")
    library = directory / "_cext.so"
    subprocess.run([*compiler, "-shared", "-fPIC", "-pthread", *objects, str(directory / "mutant.c"), "-o", str(library)], check=True)
    spec = importlib.util.spec_from_file_location("hostkv.cext._cext", library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["hostkv.cext._cext"] = module
    spec.loader.exec_module(module)
    return mutants


# ---- running them --------------------------------------------------------------------------------------------------------------------


def child(mutant: Mutant, seeds: int, steps: int, pipe: int) -> None:
    """In a process of its own: tells each seed before it begins, and "." when none failed."""
    from .world import Violation, run

    mutant.break_it()
    for seed in range(seeds):
        os.write(pipe, b"s")
        signal.setitimer(signal.ITIMER_REAL, HANG_S)  # SIGALRM ends the process
        try:
            run(seed, steps)
        except Violation:
            return
    os.write(pipe, b".")


def run_all(mutants: list[Mutant], seeds: int, steps: int, jobs: int) -> None:
    waiting, running = list(reversed(mutants)), dict[int, tuple[Mutant, int]]()
    done, survived, started_s = 0, 0, time.monotonic()
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop()
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(reader)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                try:
                    child(mutant, seeds, steps, writer)
                finally:
                    os._exit(0)
            os.close(writer)
            running[pid] = (mutant, reader)
        pid, _ = os.wait()
        mutant, reader = running.pop(pid)
        said = os.read(reader, 1 << 16)
        os.close(reader)
        mutant.seeds = -1 if said.endswith(b".") else max(len(said), 1)
        done += 1
        if mutant.seeds < 0:
            survived += 1
            print(f"\r\x1b[Ksurvived: {mutant}", flush=True)
        print(f"\r\x1b[K{done} of {len(mutants)} rules, {survived} survived, {time.monotonic() - started_s:.0f} s", end="", flush=True)
    print()


def report(name: str, mutants: list[Mutant], exempt: int) -> None:
    caught = [mutant.seeds for mutant in mutants if mutant.seeds > 0]
    if caught:
        print(
            f"{name}: {len(mutants)} rules, {len(caught)} caught by {statistics.median(caught):.0f} seeds (median; at most {max(caught)}), "
            f"{len(mutants) - len(caught)} survived; {exempt} exempt"
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.mutate", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="rules whose file or function contains this")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        of_c = build(Path(directory))
        from . import world  # noqa: F401  what each child needs, once

        of_python = list(python_mutants())
        known = {mutant.key for mutant in (*of_python, *of_c)}
        stale = [entry for entry in EXEMPT if entry not in known]
        failed = bool(stale)
        for entry in stale:
            print(f"exempt, but there is no such rule: {entry}")
        for name, mutants in (("sidecar/core.py", of_python), ("cext/tables*.c", of_c)):
            wanted = [
                mutant
                for mutant in mutants
                if mutant.key not in EXEMPT and mutant.function not in FOREIGN and options.only in f"{mutant.file} {mutant.function}"
            ]
            run_all(wanted, options.seeds, options.steps, options.jobs)
            report(name, wanted, len(mutants) - len(wanted))
            failed |= any(mutant.seeds < 0 for mutant in wanted)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
