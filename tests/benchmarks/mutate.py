"""Mutates the oracles one place at a time and runs their tests against each mutant.

    python tests/benchmarks/mutate.py --reach reach.json --trace
    nice -n 15 python tests/benchmarks/mutate.py --reach reach.json --minutes 25 --out mutants.jsonl

Mutations: a comparison and its neighbour, ``and`` and ``or``, arithmetic, ``not`` and ``~`` left out, an integer plus
one, a float doubled, a boolean exchanged, a returned value replaced by None, a slice one longer, a bare condition
negated. Text of messages, annotations, docstrings and decorators are left alone. The package is copied to a temporary
folder; each mutant is written there and tested in a forked child that has torch and pytest loaded and no oracle, with
the tests that reach its line.
``docs/mutation.md`` explains what survives.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ORDER = (
    "window",
    "placement",
    "outputs",
    "fills",
    "routing",
    "shadow",
    "maps",
    "step",
    "fingerprints",
    "whereabouts",
    "reproducer",
    "findings",
)
LIMIT_S = 60
SELECTED_S = 6.0
"""Of the tests that reach a line, the fastest that take so long together are run."""
_ARGUMENTS = (
    # The oracles' tests use no fixture of ours: neither the plugin nor a conftest has to be loaded.
    *("-x", "-q", "--tb=no", "--noconftest", "-p", "no:cacheprovider"),
    # Hypothesis is loaded before pytest could rewrite it: its own assertions are not what is read here.
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),
)

_COMPARE: dict[type, type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type, type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
    ast.RShift: ast.LShift,
    ast.LShift: ast.RShift,
}


def _replacements(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What one node is replaced by, and in which words."""
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            other = copy.deepcopy(node)
            other.ops[index] = _COMPARE[type(operator)]()
            yield "comparison", other
    elif isinstance(node, ast.BoolOp):
        other_op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "and/or", ast.BoolOp(op=other_op, values=node.values)
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        yield "arithmetic", ast.BinOp(left=node.left, op=_ARITHMETIC[type(node.op)](), right=node.right)
    elif isinstance(node, ast.AugAssign) and type(node.op) in _ARITHMETIC:
        yield (
            "arithmetic",
            ast.AugAssign(target=node.target, op=_ARITHMETIC[type(node.op)](), value=node.value),
        )
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.Invert | ast.USub):
        yield "operator left out", node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "constant", ast.Constant(value=not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield "constant", ast.Constant(value=node.value + 1)
    elif isinstance(node, ast.Constant) and isinstance(node.value, float):
        yield "constant", ast.Constant(value=node.value * 2 + 1)
    elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield "return None", ast.Return(value=ast.Constant(value=None))
    elif isinstance(node, ast.Slice) and node.upper is not None and not isinstance(node.upper, ast.Constant):
        upper = ast.BinOp(left=node.upper, op=ast.Add(), right=ast.Constant(value=1))
        yield "slice", ast.Slice(lower=node.lower, upper=upper, step=node.step)
    elif isinstance(node, ast.If | ast.IfExp) and isinstance(node.test, ast.Name | ast.Attribute | ast.Call):
        other_if = copy.copy(node)
        other_if.test = ast.UnaryOp(op=ast.Not(), operand=node.test)
        yield "condition", other_if


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


class _Mutator(ast.NodeTransformer):
    """Applies the mutation of one number and remembers what it was."""

    def __init__(self, wanted: int) -> None:
        self.wanted, self.seen = wanted, 0
        self.what, self.line, self.text = "", 0, ""

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.JoinedStr):
            return node
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            node.body = [self.visit(part) for part in node.body]  # type: ignore[misc]  # statements stay statements
            if isinstance(node, ast.FunctionDef):
                node.args.defaults = [self.visit(part) for part in node.args.defaults]  # type: ignore[misc]
                node.args.kw_defaults = [part and self.visit(part) for part in node.args.kw_defaults]  # type: ignore[misc]
            return node
        if isinstance(node, ast.AnnAssign):
            if node.value is not None:
                node.value = self.visit(node.value)  # type: ignore[assignment]  # an expression stays one
            return node
        for what, other in _replacements(node):
            self.seen += 1
            if self.seen == self.wanted:
                self.what, self.line = what, node.lineno if hasattr(node, "lineno") else 0
                shown = node.test if isinstance(node, ast.If | ast.IfExp) else node
                self.text = ast.unparse(shown)
                return ast.copy_location(other, node)
        return self.generic_visit(node)


def mutants(source: str) -> Iterator[tuple[str, int, str, str]]:
    """Every mutant of a module: what was done, the line, the text that was changed, and the mutated source."""
    number = 0
    while True:
        number += 1
        mutator = _Mutator(number)
        tree = ast.fix_missing_locations(mutator.visit(ast.parse(source)))
        if mutator.seen < number:
            return
        yield mutator.what, mutator.line, mutator.text, ast.unparse(tree)


def _outcome(tests: list[str]) -> str:
    """``killed``, ``survived`` or ``timeout``, of the tests in a forked child."""
    child = os.fork()
    if not child:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        status = 3
        with contextlib.suppress(BaseException):
            import pytest

            status = int(pytest.main([*_ARGUMENTS, *tests]))
        os._exit(0 if status == 0 else 1)
    limit = time.monotonic() + LIMIT_S
    while time.monotonic() < limit:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return "survived" if status == 0 else "killed"
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timeout"


class _Reach:
    """A pytest plugin: which test reaches which line of the oracles, and how long each takes."""

    def __init__(self) -> None:
        self.lines: dict[str, set[str]] = {}
        self.seconds: dict[str, float] = {}
        self._now: set[str] = set()

    @staticmethod
    def _module(frame: types.FrameType) -> str | None:
        path = Path(frame.f_code.co_filename)
        return path.stem if path.parent.name == "oracles" and path.stem in ORDER else None

    def _trace(self, frame: types.FrameType, event: str, argument: object) -> Any:
        module = self._module(frame)
        if module is None:
            return None
        self._now.add(f"{module}:{frame.f_lineno}")
        return self._trace

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call":
            self.seconds[report.nodeid] = report.duration

    def pytest_runtest_setup(self, item: Any) -> None:
        self._now = set()
        sys.settrace(self._trace)

    def pytest_runtest_teardown(self, item: Any) -> None:
        sys.settrace(None)
        for line in self._now:
            self.lines.setdefault(line, set()).add(item.nodeid)


def reach() -> dict[str, list[tuple[float, str]]]:
    """The tests of the oracles that reach each ``module:line``, with their seconds, fastest first."""
    import pytest

    plugin = _Reach()
    status = pytest.main([*_ARGUMENTS, "tests/unit/oracles"], plugins=[plugin])
    if status:
        sys.exit("the tests fail without a mutation; there is nothing to be learnt from one")
    return {line: sorted((plugin.seconds[test], test) for test in tests) for line, tests in plugin.lines.items()}


def _selected(found: list[tuple[float, str]]) -> list[str]:
    tests: list[str] = []
    total = 0.0
    for seconds, test in found:
        total += seconds
        if tests and total > SELECTED_S:
            break
        tests.append(test)
    return tests


def main() -> None:
    """Runs the mutants of the named modules, in order, until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", default=",".join(ORDER))
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--every", type=int, default=1, help="run one mutant in so many of each module")
    parser.add_argument("--offset", type=int, default=0, help="begin with the mutant of this number")
    parser.add_argument("--reach", type=Path, required=True, help="what --trace wrote")
    parser.add_argument("--trace", action="store_true", help="write which test reaches which line, and stop")
    parser.add_argument("--lines", default="", help="of one module: only mutants of these lines, separated by commas")
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"))
    options = parser.parse_args()
    lines = {int(line) for line in options.lines.split(",") if line}
    end = time.monotonic() + 60 * options.minutes
    os.chdir(ROOT)
    os.environ["PYTEST_PLUGINS"] = "_hypothesis_pytestplugin"
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    if options.trace:
        options.reach.write_text(json.dumps(reach()))
        return
    reached = json.loads(options.reach.read_text())
    with tempfile.TemporaryDirectory() as folder, options.out.open("a") as out:
        copied = Path(folder) / "src"
        shutil.copytree(ROOT / "src", copied, ignore=shutil.ignore_patterns("__pycache__"))
        sys.path.insert(0, str(copied))
        sys.path.insert(1, str(ROOT / "tests" / "support"))
        sys.dont_write_bytecode = True
        import hypothesis  # loaded once, for every child
        import numpy  # noqa: F401
        import pytest  # noqa: F401
        import torch

        import pytest_kvqual.kv.formats  # noqa: F401

        torch.set_num_threads(1)
        # The first failure decides: it need be neither small nor explained.
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile("mutants", phases=phases, database=None, deadline=None)
        hypothesis.settings.load_profile("mutants")
        counts = dict.fromkeys(("killed", "survived", "timeout", "not run"), 0)
        for module in options.modules.split(","):
            path = copied / "pytest_kvqual" / "oracles" / f"{module}.py"
            source = path.read_text()
            everything = [f"tests/unit/oracles/test_{module}.py"]
            if _outcome(everything) != "survived":
                sys.exit(f"{everything[0]}: fails without a mutation; there is nothing to be learnt from one")
            for number, (what, line, text, mutated) in enumerate(mutants(source)):
                if (number - options.offset) % options.every or (lines and line not in lines):
                    continue
                if time.monotonic() > end:
                    counts["not run"] += 1
                    continue
                path.write_text(mutated)
                begun = time.monotonic()
                # A default or a constant is reached while the module is loaded, before any test.
                outcome = _outcome(_selected(reached.get(f"{module}:{line}", [])) or everything)
                counts[outcome] += 1
                entry = {"module": module, "line": line, "what": what, "text": text, "outcome": outcome}
                out.write(json.dumps({**entry, "seconds": round(time.monotonic() - begun, 1)}) + "\n")
                out.flush()
            path.write_text(source)
            print(module, counts, flush=True)


if __name__ == "__main__":
    main()
