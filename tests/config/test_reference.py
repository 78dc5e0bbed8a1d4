"""The API reference: every public name is in it, and says what its arguments are, and what it returns and raises."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = [f"tiered_checkpoint_io{each}" for each in ("", ".callbacks", ".strategies", ".dcp", ".nemo", ".errors")]
ENTRY = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
#: Hooks of Lightning's, whose arguments are described there.
UPSTREAM = re.compile(r"on_\w+|setup|teardown|state_dict|load_state_dict")


def names_of(package):
    """Returns a package's public names; from its text, because NeMo is not installed here."""
    tree = ast.parse(Path(importlib.util.find_spec(package).origin).read_text())
    if package.endswith(".errors"):
        return [each.name for each in tree.body if isinstance(each, ast.ClassDef)]
    (public,) = [each.value for each in tree.body if isinstance(each, ast.Assign) and each.targets[0].id == "__all__"]
    return [name for name in ast.literal_eval(public) if not name.startswith("__")]


def definitions(path):
    return {
        each.name: each
        for each in ast.parse(path.read_text()).body
        if isinstance(each, (ast.FunctionDef, ast.ClassDef))
    }


def definition(package, name):
    """Returns the syntax tree of a public class or function of the package; None for a module or alias."""
    folder = Path(importlib.util.find_spec("tiered_checkpoint_io").origin).parent
    if package == "tiered_checkpoint_io.nemo":
        found = [definitions(path).get(name) for path in sorted((folder / "nemo").glob("*.py"))]
        return next(filter(None, found), None)
    found = inspect.unwrap(getattr(importlib.import_module(package), name))
    return definitions(Path(inspect.getsourcefile(found)))[name]


def undocumented(node, name):
    """Returns the gaps in the docstring of a class or function."""
    text = ast.get_docstring(node) or ""
    if not text:
        return [f"{name} has no docstring"]
    functions = [node] if isinstance(node, ast.FunctionDef) else []
    if isinstance(node, ast.ClassDef):
        methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
        functions = [each for each in methods if each.name == "__init__"]
        text += "".join(ast.get_docstring(each) or "" for each in functions)
    given = [
        argument.arg
        for each in functions
        for argument in (*each.args.posonlyargs, *each.args.args, *each.args.kwonlyargs, each.args.kwarg)
        if argument is not None and argument.arg not in ("self", "cls") and not argument.arg.startswith("_")
    ]
    missing = [each for each in given if not re.search(rf"^\s*{each}(, [\w, ]+)?:", text, re.MULTILINE)]
    return [f"{name} does not say what {each} is" for each in missing]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_in_the_reference_with_its_arguments(package):
    shown = {match for page in (ROOT / "docs/reference").glob("*.md") for match in ENTRY.findall(page.read_text())}
    wrong = []
    for name in names_of(package):
        homes = {f"{each}.{name}" for each in PACKAGES}
        if package not in shown and not homes & shown:
            wrong.append(f"{package}.{name} is on no page of docs/reference")
        if node := definition(package, name):
            wrong += undocumented(node, f"{package}.{name}")
    assert not wrong, "\n".join(wrong)
