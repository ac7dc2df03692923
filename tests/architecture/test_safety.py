"""Nothing that is shipped opens a pickle, runs a text as code, or starts a shell; and no name leads out of a folder."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "qkv"
FILES = sorted(SOURCE.rglob("*.py"))
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "joblib", "shelve", "marshal", "cloudpickle"}
FORBIDDEN_CALLS = {
    "eval", "exec", "compile", "__import__", "torch.load", "torch.save", "np.load", "numpy.load", "os.system",
    "os.popen", "yaml.load", "subprocess.run", "subprocess.Popen", "subprocess.call", "subprocess.check_output",
}  # fmt: skip
OUTSIDE_NAMES = ("weights/models.py", "weights/sentence_transformers.py")
"""Where a name from inside a file becomes a path: each refuses a name that is not one in its folder."""


def called(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def faults_of(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [f"imports {name}" for name in names if name.split(".")[0] in FORBIDDEN_MODULES]
    for name, call in called(tree):
        if name in FORBIDDEN_CALLS:
            found.append(f"line {call.lineno}: {name}(…)")
        for keyword in call.keywords:
            is_true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
            if keyword.arg in ("allow_pickle", "shell", "trust_remote_code") and is_true:
                found.append(f"line {call.lineno}: {keyword.arg}=True")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_nothing_is_unpickled_or_run(file):
    assert faults_of(ast.parse(file.read_text(encoding="utf-8"))) == []


def test_what_is_forbidden_is_seen():
    bad = "import pickle\nimport torch\ntorch.load('a')\neval('1')\nopen('a', allow_pickle=True)\n"
    assert len(faults_of(ast.parse(bad))) == 4


@pytest.mark.parametrize("name", OUTSIDE_NAMES)
def test_a_name_from_a_file_is_one_in_its_folder(name):
    text = (SOURCE / name).read_text(encoding="utf-8")
    assert "points outside the folder" in text
    assert ".name !=" in text
