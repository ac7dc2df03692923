"""The mutation run makes single changes, the same ones for the same seed."""

import ast

import pytest

from tests.mutation import FOLDERS, ROOT, mutations, related_tests, sample_mutants


def mutants_of(body: str) -> set[str]:
    """The lines of a function body that its mutations give, each changed by one mutation."""
    source = f"def f(a, b):\n    {body}\n"
    mutated = set()
    for index in range(len(mutations(ast.parse(source)))):
        tree = ast.parse(source)
        mutations(tree)[index].apply()
        mutated.add(ast.unparse(tree).splitlines()[1].strip())
    return mutated


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("a < b", {"a <= b"}),
        ("a = b + 3", {"a = b - 3", "a = b + 4"}),
        ("a //= b", {"a *= b"}),
        ("a = -b", {"a = --b"}),
        ("a = b[-1]", {"a = b[-2]"}),
        ("a = True", {"a = False"}),
        ("a and b", {"a or b"}),
        ("b(a, key=a, **b)", {"b(a, **b)"}),
        ("return a", {"return None"}),
        ("a = a if b else None", {"a = a if not b else None"}),
        ("a = b if a.is_cuda else -b", {"a = b if a.is_cuda else --b"}),
        ("a: int | None = b", set()),
        ("raise ValueError(f'{a + b}')", set()),
    ],
)
def test_each_mutation_changes_one_operation(body, expected):
    assert mutants_of(body) == expected


def test_code_outside_functions_is_not_mutated():
    assert not mutations(ast.parse("A = 1 + 2\nclass B:\n    c: int = 3\n"))


def test_a_seed_gives_the_same_mutants_from_each_folder():
    mutants = sample_mutants(12, seed=7, words=[])
    assert mutants == sample_mutants(12, seed=7, words=[])
    assert mutants != sample_mutants(12, seed=8, words=[])
    assert [mutant.path.parent.name for mutant in mutants] == [name for name in FOLDERS for _ in range(4)]


def test_the_mirrored_test_file_runs_first():
    first, *others = related_tests(ROOT / "src" / "qkv" / "nn" / "mask.py")
    assert first.endswith("tests/nn/test_mask.py")
    assert others
