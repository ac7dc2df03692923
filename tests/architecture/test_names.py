"""Names in the repository: no banned identifiers, module names that are nouns, docstrings that are statements."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path for folder in ("src", "tests", "benchmarks", "notebooks", "docs") for path in (ROOT / folder).rglob("*.py")
    if "node_modules" not in path.parts
)  # fmt: skip
PACKAGE = [path for path in FILES if path.is_relative_to(ROOT / "src")]

# Words that say nothing about what a value is. CONTRIBUTING.md states the rule.
BANNED = frozenset(
    [
        "road",
        "room",
        "said",
        "made",
        "known",
        "sent",
        "given",
        "taken",
        "laid",
        "kept",
        "held",
        "seen",
        "shown",
        "asked",
        "begun",
        "one",
        "own",
        "look",
        "looks",
        "place",
        "places",
        "piece",
        "pieces",
        "whole",
        "together",
        "apart",
        "shelf",
        "desk",
        "turn",
        "way",
        "heat",
        "chance",
    ]
)
BANNED_TYPES = BANNED | {"found"}
# Established nouns that happen to end in -ing.
NOUNS = frozenset({"embedding", "training", "serving", "sampling", "masking", "string"})
MAX_SHARED_NAMES = 80


def defined_names(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """Line, name and whether it is a type, for every name that the module defines (imported names are not its own)."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef():
                yield node.lineno, node.name, True
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.lineno, node.name, False
            case ast.arg():
                yield node.lineno, node.arg, False
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id, False
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr, False
            case ast.alias(asname=str(name)):
                yield node.lineno, name, False
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield node.lineno, name, False


def test_no_identifier_is_a_banned_word():
    banned = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in FILES
        for line, name, is_type in defined_names(ast.parse(path.read_text(encoding="utf-8")))
        if name.strip("_").lower() in (BANNED_TYPES if is_type else BANNED)
    ]
    assert not banned, "\n".join(banned)


def test_banned_words_are_recognized_wherever_a_name_is_defined():
    source = """
import numpy as road
class Found: held: int
def kept(place, *, whole): (seen := 1); self._made = 1
for chance in []: pass
match x:
    case [way, *own]: pass
"""
    names = {name.strip("_").lower() for _, name, _ in defined_names(ast.parse(source))}
    assert names == {"road", "found", "held", "kept", "place", "whole", "seen", "made", "chance", "way", "own"}


def test_modules_are_named_with_nouns():
    gerunds = [path for path in PACKAGE if path.stem.endswith("ing") and path.stem not in NOUNS]
    folders = {path.parent for path in PACKAGE if path.parent.name.endswith("ing") and path.parent.name not in NOUNS}
    assert not gerunds + sorted(folders)


def test_no_module_docstring_is_a_question():
    docstrings = {path: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "" for path in FILES}
    assert not [path for path, docstring in docstrings.items() if "?" in docstring.split("\n\n")[0]]


def test_few_top_level_names_are_defined_in_more_than_one_module():
    modules = defaultdict(set)
    for path in PACKAGE:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                modules[node.name].add(path)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    for name in ast.walk(target):
                        if isinstance(name, ast.Name) and not name.id.startswith("__"):
                            modules[name.id].add(path)
    shared = sorted(name for name, paths in modules.items() if len(paths) > 1)
    assert len(shared) <= MAX_SHARED_NAMES, f"{len(shared)}: {shared}"
