"""Mutation testing of `nn`, `generation` and `data`: small random changes of the source that tests must notice.

`python -m tests.mutation` samples mutations with a fixed seed, runs the tests of each mutated module in a process of
its own, prints the mutations that no test noticed, and exits with status 1 if too few were noticed. A mutation that
makes a test run longer than `TEST_TIMEOUT` counts as noticed.

Mutation tools from PyPI do not fit: mutmut and cosmic-ray mutate every line and first run the whole test suite, and
neither takes a sample with a seed.
"""

import argparse
import ast
import importlib.machinery
import importlib.util
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("nn", "generation", "data")
NEEDS_GPU = re.compile(r"cuda|gpu|triton|kernel|compil|fused_autograd")
"""Files and conditions that only matter on a GPU or under torch.compile, where these tests do not run."""
FURTHER_TESTS = {
    "nn": [
        "tests/agreement/test_attention_kernels.py",
        "tests/agreement/test_incremental_decoding.py",
        "tests/reference/test_torch_nn.py",
    ],
    "generation": ["tests/agreement/test_backends.py"],
    "data": [],
}
"""Run after the tests of the module's own folder, which are listed first."""
SAMPLE_SIZE = 90
MIN_KILL_RATE = 0.6
"""Measured: 71 % of a sample of 24. Most survivors do not change what the code computes, such as another random key."""
TEST_TIMEOUT = 120
"""Seconds after which a single test is ended and its mutation counts as noticed."""

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitAnd,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """A change of a syntax tree; `apply` makes it in place."""

    line: int
    description: str
    apply: Callable[[], None]


@dataclass(frozen=True, order=True)
class Mutant:
    """The mutation with this index in a file's list of mutations."""

    path: Path
    index: int


def mutations(tree: ast.Module) -> list[Mutation]:
    """All mutations of the code inside functions, in the order of the source."""
    statements = [statement for function in _outermost_functions(tree.body) for statement in function.body]
    found = [mutation for statement in statements for mutation in _mutations_of(statement)]
    return sorted(found, key=lambda mutation: mutation.line)


def _outermost_functions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef]:
    for statement in body:
        if isinstance(statement, ast.FunctionDef):
            yield statement
        elif isinstance(statement, ast.ClassDef):
            yield from _outermost_functions(statement.body)


def _mutations_of(node: ast.AST) -> Iterator[Mutation]:
    if isinstance(node, (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr)) or _is_docstring(node):
        return
    if isinstance(node, ast.BoolOp) and NEEDS_GPU.search(ast.unparse(node)):
        return
    if isinstance(node, (ast.If, ast.IfExp)) and NEEDS_GPU.search(ast.unparse(node.test)):
        for child in node.orelse if isinstance(node, ast.If) else [node.orelse]:
            yield from _mutations_of(child)
        return
    yield from _mutations_at(node)
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "args") and not isinstance(node, ast.Call):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _mutations_of(child)


def _mutations_at(node: ast.AST) -> Iterator[Mutation]:
    """Mutations of one node, without those of its children."""
    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                yield _replace_operator(node, ops, i, COMPARISONS[type(op)])
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in ARITHMETIC:
            new = ARITHMETIC[type(op)]
            description = f"{type(op).__name__} → {new.__name__}"
            yield Mutation(node.lineno, description, lambda: setattr(node, "op", new()))
        case ast.BoolOp(op=op):
            new = ast.Or if isinstance(op, ast.And) else ast.And
            yield Mutation(node.lineno, f"{type(op).__name__} → {new.__name__}", lambda: setattr(node, "op", new()))
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            negated = ast.UnaryOp(ast.Not(), test)
            yield Mutation(node.lineno, "condition negated", lambda: setattr(node, "test", negated))
        case ast.Constant(value=bool() as value):
            yield Mutation(node.lineno, f"{value} → {not value}", lambda: setattr(node, "value", not value))
        case ast.Constant(value=int() | float() as value):
            yield Mutation(node.lineno, f"{value} → {value + 1}", lambda: setattr(node, "value", value + 1))
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert() as op, operand=operand) if not _is_constant(operand):
            # An operator that is applied twice has no effect. The sign of a constant stays, because axis 1 of a matrix
            # is also axis -1. The constant itself is mutated anyway.
            twice = ast.UnaryOp(type(op)(), operand)
            description = f"{type(op).__name__} removed"
            yield Mutation(node.lineno, description, lambda: setattr(node, "operand", twice))
        case ast.Call(keywords=keywords):
            for keyword in keywords:
                if keyword.arg is not None:
                    drop = _drop(keywords, keyword)
                    yield Mutation(keyword.value.lineno, f"keyword {keyword.arg} dropped", drop)
        case ast.Return(value=ast.AST() as value) if not _is_none(value):
            nothing = ast.Constant(None)
            yield Mutation(node.lineno, "return None", lambda: setattr(node, "value", nothing))


def _replace_operator(node: ast.Compare, ops: list[ast.cmpop], i: int, new: type[ast.cmpop]) -> Mutation:
    description = f"{type(ops[i]).__name__} → {new.__name__}"
    return Mutation(node.lineno, description, lambda: ops.__setitem__(i, new()))


def _drop(keywords: list[ast.keyword], keyword: ast.keyword) -> Callable[[], None]:
    return lambda: keywords.remove(keyword)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_constant(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant)


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def sample_mutants(n: int, seed: int, words: list[str]) -> list[Mutant]:
    """The same number of mutants from each folder; `words`: only files whose path contains one of them."""
    candidates: dict[str, list[Mutant]] = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / "src" / "qkv" / folder).glob("*.py")):
            name = str(path.relative_to(ROOT))
            if not NEEDS_GPU.search(path.name) and (not words or any(word in name for word in words)):
                tree = ast.parse(path.read_text(encoding="utf-8"))
                mutants = [Mutant(path, index) for index in range(len(mutations(tree)))]
                candidates.setdefault(folder, []).extend(mutants)
    n_each = -(-n // max(1, len(candidates)))
    return [
        mutant
        for folder, mutants in candidates.items()
        for mutant in random.Random(f"{seed} {folder}").sample(mutants, min(len(mutants), n_each))
    ]


def related_tests(path: Path) -> list[str]:
    """The mirrored test file first, because it is most likely to notice a mutation, then related tests."""
    folder = path.parent.name
    mirrored = ROOT / "tests" / folder / f"test_{path.name}"
    others = [file for file in sorted(mirrored.parent.glob("test_*.py")) if file != mirrored]
    mirrored_first = [mirrored, *others] if mirrored.exists() else others
    return [str(file) for file in (*mirrored_first, *(ROOT / name for name in FURTHER_TESTS[folder]))]


def install_mutant(mutant: Mutant) -> None:
    """Compile the module from the mutated syntax tree when it is imported."""
    relative = mutant.path.relative_to(ROOT / "src").with_suffix("")
    module = ".".join(relative.parts).removesuffix(".__init__")

    class MutatedLoader(importlib.machinery.SourceFileLoader):
        def get_code(self, fullname: str):  # noqa: ARG002
            tree = ast.parse(mutant.path.read_text(encoding="utf-8"))
            mutations(tree)[mutant.index].apply()
            return compile(ast.fix_missing_locations(tree), str(mutant.path), "exec")

    class MutatedFinder:
        @staticmethod
        def find_spec(fullname: str, *_: object):
            if fullname != module:
                return None
            return importlib.util.spec_from_file_location(
                fullname, mutant.path, loader=MutatedLoader(fullname, str(mutant.path))
            )

    sys.meta_path.insert(0, MutatedFinder)


class EndSlowTests:
    """pytest plugin: the default action of SIGALRM ends the process, also inside a loop of C code."""

    def pytest_runtest_setup(self) -> None:
        signal.alarm(TEST_TIMEOUT)

    def pytest_sessionstart(self) -> None:
        from hypothesis import Phase, settings

        settings.register_profile("mutation", phases=[Phase.explicit, Phase.generate], report_multiple_bugs=False)
        settings.load_profile("mutation")

    def pytest_sessionfinish(self) -> None:
        signal.alarm(0)


def run_tests(mutant: Mutant | None, tests: list[str], output: Path) -> int:
    """Run the tests in this process and return the exit status of pytest."""
    import pytest
    import torch

    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(ROOT)
    torch.set_num_threads(1)
    sys.dont_write_bytecode = True
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if mutant is not None:
        install_mutant(mutant)
    # Without run-time type checks: the tests themselves must notice a mutation, and they run six times as fast.
    options = ["-o", "addopts=--import-mode=importlib", "-m", "not long and not compiled", "-q", "-x", "--tb=line"]
    options += ["-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    return int(pytest.main([*options, *tests], plugins=[EndSlowTests()]))


def run_all(mutants: list[Mutant | None], tests: list[list[str]], n_workers: int) -> Iterator[tuple[int, bool]]:
    """Yield (index, whether all tests passed) as the runs end; each run is a fork of this process."""
    import hypothesis.strategies  # noqa: F401 - the forks find these modules imported
    import numpy as np  # noqa: F401
    import pydantic  # noqa: F401
    import pytest  # noqa: F401
    import tokenizers  # noqa: F401
    import torch._dynamo  # noqa: F401

    waiting, running = list(range(len(mutants))), dict[int, int]()
    try:
        with tempfile.TemporaryDirectory() as folder:
            while waiting or running:
                while waiting and len(running) < n_workers:
                    index = waiting.pop(0)
                    pid = os.fork()
                    if pid == 0:
                        status = 2
                        try:
                            status = run_tests(mutants[index], tests[index], Path(folder) / f"{index}.txt")
                        finally:
                            os._exit(status)
                    running[pid] = index
                pid, status = os.wait()
                if pid in running:
                    index = running.pop(pid)
                    if mutants[index] is None and status != 0:
                        print((Path(folder) / f"{index}.txt").read_text()[-3000:])
                    yield index, status == 0
    finally:
        for pid in running:  # only if the caller stopped early
            os.kill(pid, signal.SIGKILL)


def describe(mutant: Mutant) -> str:
    """File, line, mutation and the original source line."""
    text = mutant.path.read_text(encoding="utf-8")
    mutation = mutations(ast.parse(text))[mutant.index]
    line = text.splitlines()[mutation.line - 1].strip()
    return f"{mutant.path.relative_to(ROOT)}:{mutation.line}: {mutation.description}: {line}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="mutate only files whose path contains a WORD")
    parser.add_argument("--n", type=int, default=SAMPLE_SIZE, help="number of mutants (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes at a time")
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    mutants = sample_mutants(options.n, options.seed, options.words)
    # First the same tests without a mutation: they must pass, or a failure would prove nothing.
    folders = sorted({mutant.path.parent.name for mutant in mutants})
    baselines = [related_tests(ROOT / "src" / "qkv" / folder / "__init__.py") for folder in folders]
    tests = [*baselines, *(related_tests(mutant.path) for mutant in mutants)]
    runs: list[Mutant | None] = [*[None] * len(folders), *mutants]
    survivors: list[Mutant] = []
    for index, passed in run_all(runs, tests, options.workers):
        mutant = runs[index]
        if mutant is None:
            if not passed:
                print(f"the tests of {folders[index]} fail without a mutation")
                return 2
        elif passed:
            survivors.append(mutant)
            print(f"survived {describe(mutant)}", flush=True)
    rate = 1 - len(survivors) / max(1, len(mutants))
    seconds = time.perf_counter() - started
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} mutants killed in {seconds:.0f} s, seed {options.seed}")
    print(f"kill rate {rate:.0%}, at least {MIN_KILL_RATE:.0%} is required")
    return int(rate < MIN_KILL_RATE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
