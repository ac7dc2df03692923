"""Importing qkv does not change the state of the process. Only the command line and context managers may change it."""

import ast
import json
import re
import subprocess
import sys

import pytest

from tests.architecture.paths import MODULES, SOURCE

IMPORT_ALL = """
import importlib, json, os, sys, torch
def state():
    matmul = torch.backends.cuda.matmul
    return {
        "environment": dict(os.environ),
        "switch interval": sys.getswitchinterval(),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "TF32": [torch.get_float32_matmul_precision(), matmul.allow_tf32, torch.backends.cudnn.allow_tf32],
        "deterministic": [torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark],
        "dtype": str(torch.get_default_dtype()),
        "seed": torch.initial_seed(),
    }
before, missing = state(), []
for name in json.loads(sys.argv[1]):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing.append(error.name)
print(json.dumps({"before": before, "after": state(), "missing": missing}))
"""
SETTERS = {"mallopt", "setswitchinterval", "putenv", "set_num_threads", "set_num_interop_threads"} | {
    "set_float32_matmul_precision", "use_deterministic_algorithms", "set_default_dtype", "set_default_device"
}  # fmt: skip
"""Names of functions that change the state of the process."""
ENVIRONMENT_METHODS = {"setdefault", "update", "pop", "clear", "popitem"}


def modules() -> list[str]:
    paths = (path.relative_to(SOURCE).with_suffix("") for path in MODULES)
    names = [".".join(("qkv", *path.parts)).removesuffix(".__init__") for path in paths]
    return [name for name in names if not name.endswith("__main__")]


def test_importing_every_module_leaves_the_process_unchanged():
    answer = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, json.dumps(modules())], capture_output=True, text=True, check=True
    )
    result = json.loads(answer.stdout)
    assert result["after"] == result["before"]
    assert {name for name in result["missing"] if name.startswith("qkv")} == set()


def changes_process_state(node: ast.AST) -> bool:
    """Return whether a statement or expression changes the environment, the allocator or settings of torch."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="environ"), attr=attr)):
            return attr in ENVIRONMENT_METHODS
        case ast.Call(func=ast.Attribute(attr=attr)):
            return attr in SETTERS
        case ast.Call(func=ast.Name(id=name)):
            return name in SETTERS
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            return any(map(is_process_state, targets))
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            return is_process_state(target)
        case _:
            return False


def is_process_state(target: ast.expr) -> bool:
    """Return whether an assignment target is `os.environ[…]`, a flag in `torch.backends` or a module's `forward`."""
    text = ast.unparse(target)
    is_patched = text.endswith((".forward", "['forward']")) and text != "self.forward"
    return is_patched or "environ" in re.findall(r"\w+", text) or "torch.backends" in text


def is_context_manager(node: ast.AST) -> bool:
    match node:
        case ast.FunctionDef(decorator_list=decorators):
            return any(ast.unparse(decorator).endswith("contextmanager") for decorator in decorators)
        case ast.ClassDef(body=body):
            return {"__enter__", "__exit__"} <= {part.name for part in body if isinstance(part, ast.FunctionDef)}
        case _:
            return False


def process_state_changes(node: ast.AST) -> list[int]:
    """Return the line numbers of changes to the process that are not inside a context manager."""
    if is_context_manager(node):
        return []
    lines = [node.lineno] if changes_process_state(node) else []  # type: ignore[attr-defined]
    return lines + [line for child in ast.iter_child_nodes(node) for line in process_state_changes(child)]


def test_only_the_command_line_and_context_managers_change_the_process():
    found = [
        f"{path.relative_to(SOURCE)}:{line}"
        for path in MODULES
        if path.relative_to(SOURCE).parts[0] != "cli"
        for line in process_state_changes(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "os.environ['A'] = '1'", "os.environ.setdefault('A', '1')", "environ['A'] = '1'", "del os.environ['A']",
        "sys.setswitchinterval(0.1)", "library.mallopt(-1, 2)", "torch.backends.cudnn.allow_tf32 = True",
        "module.__dict__['forward'] = f", "layer.forward = f", "torch.set_num_threads(1)",
    ],
)  # fmt: skip
def test_a_change_is_detected_outside_a_context_manager(code):
    function = f"def change():\n    {code}\n"
    assert process_state_changes(ast.parse(function)) == [2]
    assert process_state_changes(ast.parse(f"@contextmanager\n{function}")) == []
