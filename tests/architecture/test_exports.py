"""What `qkv` promises at its front door is there."""

import ast
import inspect

import pytest

import qkv
from tests.architecture.paths import SOURCE


def type_checkers_view() -> dict[str, str]:
    """Name → module, as the `if TYPE_CHECKING:` block says it."""
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {name.name: node.module or "" for node in imports for name in node.names}


@pytest.mark.parametrize("name", qkv.__all__)
def test_every_export_resolves(name):
    assert getattr(qkv, name) is not None
    assert name in dir(qkv)


def test_the_three_lists_of_exports_agree():
    assert type_checkers_view() == qkv._HOME
    assert set(qkv.__all__) == {*qkv._HOME, "__version__"}


@pytest.mark.parametrize("name", sorted(qkv._HOME))
def test_every_export_says_what_it_is(name):
    assert inspect.getdoc(getattr(qkv, name))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'GPTT'"):
        qkv.GPTT  # noqa: B018
