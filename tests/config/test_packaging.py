"""No import needs what a user need not have; ``make dist``; every public name is in the API reference."""

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def python(code, *flags, cwd, **env):
    options = {"capture_output": True, "text": True, "timeout": 120, "env": {**os.environ, **env}}
    return subprocess.run([sys.executable, *flags, "-c", code], cwd=cwd, **options)


BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError("blocked: " + name)
sys.meta_path.insert(0, Block())
"""


def test_names_need_no_package_of_s3_and_no_torch(tmp_path):
    code = BLOCK.format(blocked={"boto3", "botocore", "s3fs", "fsspec", "hydra", "omegaconf", "torch", "lightning"})
    code += "from tiered_checkpoint_io import find_latest, list_checkpoints, new_checkpoints\n"
    code += f"assert find_latest({str(tmp_path / 'none')!r}) is None\n"
    done = python(code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_dcp_saves_and_loads_without_lightning_and_what_commands_need(tmp_path, memory_dir):
    blocked = {"lightning", "pytorch_lightning", "omegaconf", "s3fs", "fsspec", "boto3", "rich", "typer"}
    # The drain, a process of its own, gets it as well.
    (tmp_path / "sitecustomize.py").write_text(BLOCK.format(blocked=blocked))
    code = f"""
import torch
from tiered_checkpoint_io import dcp
options = {{"dirpath": {str(tmp_path / "run")!r}, "memory_dir": {memory_dir!r}, "on_save_error": "raise"}}
dcp.save({{"w": torch.arange(9)}}, checkpoint_id="step_1", **options)
dcp.load(state := {{"w": torch.zeros(9, dtype=torch.int64)}}, checkpoint_id="step_1", **options)
assert state["w"].tolist() == list(range(9))
"""
    done = python(code, cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 0, done.stderr


@pytest.mark.matrix
def test_without_nemo_its_names_say_what_to_install(tmp_path):
    # A folder of that name is not NeMo.
    (tmp_path / "nemo").mkdir()
    code = """
import tiered_checkpoint_io.nemo
try:
    from tiered_checkpoint_io.nemo import S3CheckpointIO
except ModuleNotFoundError as error:
    print(error.name, error)
"""
    done = python(code, "-W", "ignore", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("nemo tiered_checkpoint_io.nemo needs NVIDIA NeMo")
    assert "pip install 'nemo_toolkit[core]'" in done.stdout


PACKAGES = [f"tiered_checkpoint_io{each}" for each in ("", ".callbacks", ".strategies", ".dcp", ".nemo", ".errors")]
ENTRY = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)


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
    if "with all arguments of it" in text:
        # Those of a function that the first line names.
        return []
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
