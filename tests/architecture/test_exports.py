"""The public names of the `qkv` package."""

import ast
import inspect

import pytest

import qkv
from tests.architecture.paths import SOURCE


def type_checking_imports() -> dict[str, str]:
    """Map each name imported in the `if TYPE_CHECKING:` block to its module."""
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {name.name: node.module or "" for node in imports for name in node.names}


@pytest.mark.parametrize("name", qkv.__all__)
def test_every_export_resolves(name):
    assert getattr(qkv, name) is not None
    assert name in dir(qkv)


def test_the_three_lists_of_exports_agree():
    assert type_checking_imports() == qkv._MODULES
    assert set(qkv.__all__) == {*qkv._MODULES, "__version__"}


@pytest.mark.parametrize("name", sorted(qkv._MODULES))
def test_every_export_has_a_docstring(name):
    assert inspect.getdoc(getattr(qkv, name))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="GPTT"):
        qkv.GPTT  # noqa: B018
