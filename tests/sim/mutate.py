"""`python -m tests.sim.mutate`: takes each rule of the core out, or turns it round, one at a time, and shows that the simulation sees it.

A rule of sidecar/core.py or sidecar/movement.py is a condition (inverted), an operand of `and` or `or` (left out), a comparison (with its
bound moved by one), a filter of a comprehension (left out), or a statement that has an effect (left out). A rule of cext/tables.c and
cext/tables_repair.c is the condition of an `if` (never, always) or an operand of && or || (left out); all of them are compiled into one
extension, and a number in it selects which one is broken. Each mutant is a process that runs seeds until one fails; one that crashes, or
hangs for HANG_S, is caught too.

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from .progress import Progress

ROOT = Path(__file__).resolve().parents[2]
PYTHON_FILES = ["movement.py", "core.py"]  # who is imported first
C_FILES = ["tables.c", "tables_repair.c"]
HANG_S = 10.0  # of a processor, for one seed, which takes a tenth of a second

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
COUNTERS = re.compile(
    r"self\._count\(|self\._(requests|errors|items|members_gone|sessions_silenced)\b|self\.counts\b|\.(name|pid) = |\bevents\.append"
)
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

NEVER, ALWAYS, WITHOUT = "never", "always", "without"
HINT = "a hint to the processor"
LONGER = "searches only get longer"
FEWER = "only more tombstones stay: tests/unit/test_tables.py"
CROWDED = "only with a thousand entries in one run or a table of blocks in use: tests/unit/test_tables.py"
CORE_ASKS = "sidecar/core.py never asks it so: tests/unit/test_tables.py"
READER_RACES = "only while an entry moves under a reader: tests/crash/test_stopped_anywhere.py"

_COLDEST = "extent->slot_bytes == 0 || extent->slot_bytes == class->slot_bytes || extent->busy > 0"
_CHAIN = "head < t->fixed.pin_capacity && t->pins[head].used && t->pins[head].session == session && t->pins[head].tag == tag"
_CLEAN = "i == HKV_NIL || t->blocks[i].generation != generation || !hkv_is_dirty(&t->blocks[i])"
_PLACE = "at == HKV_NIL || is_crowded(t, at)"
_CROWD = (
    "t->blocks[at].state == HKV_EMPTY && t->counts.blocks + t->counts.tombstones >= t->fixed.block_capacity - t->fixed.block_capacity / 16"
)

# (function, rule, how it is broken: "" for any way) -> why nobody can see it.
EXEMPT: dict[tuple[str, str, str], str] = {
    ("watch", "held and beat and (beat == member.beat)", "without held"): "a lock that is not seen held has no heartbeat",
    (
        "_register",
        "number is not None and member.namespaces.get(number, fingerprint) != fingerprint",
        "without number is not None",
    ): "no namespace has the number None",
    ("_has_read", "done.result == CORRUPT", ""): "which counter it is",
    (
        "work",
        "not room or self._in_flight()",
        "without not room",
    ): "only where a tier has no room and nothing under way: tests/unit/test_movement.py",
    ("read_key", "copy->state == HKV_EMPTY", NEVER): LONGER,
    ("read_key", "LOAD(&reader->header->moves) == moves", ""): READER_RACES,
    ("hkv_lookup", "n + AHEAD < count", ""): HINT,
    ("run_in_pool", "n + AHEAD < count", ""): HINT,
    ("lookup_on_disk", "n < count && !found[n]", ""): HINT,
    ("lookup_on_disk", "n >= AHEAD && n - AHEAD < count && !found[n - AHEAD]", ""): HINT,
    ("run_on_disk", "n < count", ""): HINT,
    ("run_on_disk", "n >= AHEAD && n - AHEAD < count", ""): HINT,
    (
        "hkv_lookup",
        "reader->index.table != NULL && memchr(found, 0, count) != NULL",
        "without memchr(found, 0, count) != NULL",
    ): "then nothing is looked for either",
    ("hkv_set_clean", _CLEAN, "without t->blocks[i].generation != generation"): CORE_ASKS,
    ("hkv_lookup_reverse", "n > AHEAD", ""): HINT,
    ("count_use", "block->flags / HKV_USE == HKV_MAX_USES", NEVER): "nobody uses a block so often: tests/unit/test_tables.py",
    ("recount", "list == before", NEVER): "it is counted out and in again",
    ("hkv_locate", "n + AHEAD < count", ""): HINT,
    ("hkv_verify", "n + AHEAD < count", ""): HINT,
    ("repair_blocks", "i + 8 <= t->mask", ""): HINT,
    ("hkv_find", "usable == HKV_NIL", ALWAYS): LONGER,
    ("fill", "is_idle(&t->aux[at])", NEVER): FEWER,
    ("fill", "!needed", NEVER): FEWER,
    ("sweep", "t->blocks[t->swept].state == HKV_TOMBSTONE", NEVER): FEWER,
    ("hkv_reserve", "t->counts.tombstones > t->fixed.block_capacity / 8", ""): FEWER,
    ("is_crowded", _CROWD, ""): CROWDED,
    ("hkv_reserve", _PLACE, NEVER): CROWDED,
    ("hkv_reserve", _PLACE, "without at == HKV_NIL"): CROWDED,
    ("hkv_reserve", _PLACE, "without is_crowded(t, at)"): CROWDED,
    (
        "coldest_extent",
        "t->fixed.extent_capacity - t->counts.free_extents == class->extents",
        NEVER,
    ): "then no extent of another size is found either",
    ("coldest_extent", _COLDEST, "without extent->slot_bytes == 0"): "asked only when no free extent has room for one such slot",
    ("hkv_class_join", "unused == HKV_NIL", ""): "there are as many classes as namespaces, and any of them will do",
    ("hkv_namespace_add", "unused == HKV_NIL && replaced == HKV_NIL", NEVER): CORE_ASKS,
    (
        "settle",
        "block->state == HKV_WRITING && aux->shards_done == 0",
        "without block->state == HKV_WRITING",
    ): "of a READY block all shards are done",
    (
        "hkv_reserve",
        "block->state == HKV_READY || (t->aux[i].shards_done >> shard & 1)",
        "without block->state == HKV_READY",
    ): "of a READY block all shards are done",
    ("hkv_chain_is", _CHAIN, ""): CORE_ASKS,
    (
        "is_sound",
        "block->state == HKV_WRITING && aux->shards_done == 0 && block->checksum != 0",
        "without block->state == HKV_WRITING",
    ): "of a READY block all shards are done",
    (
        "repair_ends",
        "(t->blocks[i].seq & 1) == 0 && t->blocks[i].state == HKV_EMPTY",
        "without (t->blocks[i].seq & 1) == 0",
    ): "only where the last EMPTY entry of all is in change",
    ("keep_in_use", "!t->verify", NEVER): "a READY block is doomed, which does not change its checksum",
    (
        "repair_blocks",
        "!unfinished && kept < t->fixed.max_blocks && is_sound(t, block, &t->aux[i])",
        "without kept < t->fixed.max_blocks",
    ): "only where a stranger made more blocks than there may be: tests/unit/reader_fuzz.c",
    ("repair_pins", "!same_session", ALWAYS): "only asks again",
    ("repair_pins", "!same_chain", "always #2"): "the longest is named last, and sidecar/core.py takes that",
    ("compare_items", "a->second != b->second", ALWAYS): "equal ones may stand in any order",
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

    def is_in(self, entry: tuple[str, str, str]) -> bool:
        return (self.function, self.rule) == entry[:2] and entry[2] in ("", self.how)

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}: {self.rule}  [{self.how}]"


# ---- sidecar/*.py --------------------------------------------------------------------------------------------------------------------

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


def python_mutants(name: str) -> Iterator[Mutant]:
    tree = ast.parse((ROOT / "sidecar" / name).read_text())
    for outer in tree.body:
        functions = outer.body if isinstance(outer, ast.ClassDef) else [outer]
        for function in functions:
            if isinstance(function, ast.FunctionDef) and function.name not in FOR_PEOPLE:
                yield from _of_function(name, tree, function)


def _of_function(name: str, tree: ast.Module, function: ast.FunctionDef) -> Iterator[Mutant]:
    def mutant(node: Any, rule: ast.AST, how: str, change: Callable[[], None]) -> Mutant:
        def break_it() -> None:
            change()
            module = importlib.import_module(f"hostkv.sidecar.{name[:-3]}")
            exec(compile(ast.fix_missing_locations(tree), name, "exec"), module.__dict__)
            core = importlib.import_module("hostkv.sidecar.core")
            core.Movement = sys.modules["hostkv.sidecar.movement"].Movement

        return Mutant(f"sidecar/{name}", node.lineno, function.name, ast.unparse(rule), how, break_it)

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


def numbered(mutants: list[Mutant]) -> list[Mutant]:
    """The second rule of the same words in one function is told from the first."""
    seen: dict[tuple[str, str, str], int] = {}
    for mutant in mutants:
        key = (mutant.function, mutant.rule, mutant.how)
        seen[key] = seen.get(key, 0) + 1
        if seen[key] > 1:
            mutant.how += f" #{seen[key]}"
    return mutants


# ---- running them --------------------------------------------------------------------------------------------------------------------


def child(mutant: Mutant, seeds: int, steps: int, pipe: int) -> None:
    """In a process of its own: tells each seed before it begins, and "." when none failed."""
    from .world import Violation, run

    mutant.break_it()
    for seed in range(seeds):
        os.write(pipe, b"s")
        signal.setitimer(signal.ITIMER_PROF, HANG_S)  # SIGPROF ends the process
        try:
            run(seed, steps)
        except Violation:
            return
    os.write(pipe, b".")


def run_all(mutants: list[Mutant], seeds: int, steps: int, jobs: int) -> Progress:
    waiting, running = list(reversed(mutants)), dict[int, tuple[Mutant, int]]()
    done, survived, progress = 0, 0, Progress()
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
            if mutant.function:
                progress.say(f"survived: {mutant}")
        progress(f"{done} of {len(mutants)} rules, {survived} survived, {progress.passed_s:.0f} s")
    return progress


def report(name: str, mutants: list[Mutant], exempt: int, progress: Progress) -> None:
    caught = [mutant.seeds for mutant in mutants if mutant.seeds > 0]
    if caught:
        progress.say(
            f"{name}: {len(mutants)} rules, {len(caught)} caught by {statistics.median(caught):.0f} seeds (median; at most {max(caught)}), "
            f"{len(mutants) - len(caught)} survived; {exempt} exempt; {progress.passed_s:.0f} s"
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.mutate", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="rules whose file or function contains one of these")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        of_c = build(Path(directory))
        from . import world  # noqa: F401  what each child needs, once

        of_python = {name: numbered(list(python_mutants(name))) for name in PYTHON_FILES}
        of_c = numbered(of_c)
        stale = [entry for entry in EXEMPT if not any(mutant.is_in(entry) for mutant in (*chain(*of_python.values()), *of_c))]
        failed = bool(stale)
        for entry in stale:
            print(f"exempt, but there is no such rule: {entry}")
        unbroken = Mutant("", 0, "", "nothing", "broken", lambda: None)
        run_all([unbroken], options.seeds, options.steps, 1)
        if unbroken.seeds > 0:
            raise SystemExit(f"the simulation fails on what is not broken, at seed {unbroken.seeds - 1}: run python -m tests.sim first")
        for name, mutants in (*((f"sidecar/{name}", mutants) for name, mutants in of_python.items()), ("cext/tables*.c", of_c)):
            wanted = [
                mutant
                for mutant in mutants
                if not any(map(mutant.is_in, EXEMPT))
                and mutant.function not in FOREIGN
                and any(word in f"{mutant.file} {mutant.function}" for word in options.only or [""])
            ]
            progress = run_all(wanted, options.seeds, options.steps, options.jobs)
            report(name, wanted, len(mutants) - len(wanted), progress)
            failed |= any(mutant.seeds < 0 for mutant in wanted)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
