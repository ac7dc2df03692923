"""The package never loads pickles, executes text as code, or starts a shell."""

import ast

import pytest

from tests.architecture.paths import MODULES, relative

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "joblib", "shelve", "marshal", "cloudpickle"}
FORBIDDEN_CALLS = {
    "eval", "exec", "compile", "__import__", "torch.load", "torch.save", "np.load", "numpy.load", "os.system",
    "os.popen", "yaml.load", "subprocess.run", "subprocess.Popen", "subprocess.call", "subprocess.check_output",
}  # fmt: skip


def iter_calls(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def find_violations(tree: ast.AST) -> list[str]:
    violations = []
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        violations += [f"imports {name}" for name in names if name.split(".")[0] in FORBIDDEN_MODULES]
    for name, call in iter_calls(tree):
        if name in FORBIDDEN_CALLS:
            violations.append(f"line {call.lineno}: {name}(…)")
        for keyword in call.keywords:
            is_true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
            if keyword.arg in ("allow_pickle", "shell", "trust_remote_code") and is_true:
                violations.append(f"line {call.lineno}: {keyword.arg}=True")
    return violations


@pytest.mark.parametrize("file", MODULES, ids=relative)
def test_no_module_loads_pickles_or_executes_text(file):
    assert find_violations(ast.parse(file.read_text(encoding="utf-8"))) == []


def test_violations_are_detected():
    bad = "import pickle\nimport torch\ntorch.load('a')\neval('1')\nopen('a', allow_pickle=True)\n"
    assert len(find_violations(ast.parse(bad))) == 4
