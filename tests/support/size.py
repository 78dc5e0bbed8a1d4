"""Compares the project's size with its budgets; ``make size`` prints the table, ``make lint`` fails above a budget.

The budgets are in budgets.json. They only go down: ``--lower`` writes today's figures if these are smaller, and removes
the exceptions that are no longer needed.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUDGETS = ROOT / "budgets.json"
PACKAGE = "tiered_checkpoint_io"
#: Folders of the package that save, keep and restore; all else in the package is periphery.
CORE = ("engine", "memory", "stores", "formats", "model")
#: No module, function or list of parameters is longer, except those that the budgets name.
CAPS = {"module": 700, "function": 60, "parameters": 5}
#: No docstring, nor an attribute's comment, begins so: a function's begins with a verb, the others with a noun.
_UNCLEAR = re.compile(r'^ *(?:r?"""|#: )(What|Whether|Where|Which|Who|Whose|How|Of|By|That|As)\b', re.MULTILINE)
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}


def tracked(*patterns: str) -> list[Path]:
    """Returns the files that git tracks or would add, without links and files that are gone."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *patterns]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    paths = [ROOT / name for name in sorted(set(names)) if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def docstring_lines(tree: ast.Module) -> set[int]:
    """Returns the numbers of the lines that docstrings take."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str:
                found.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return found


def code_lines(path: Path, tree: ast.Module) -> int:
    """Counts the lines that are neither blank, nor a comment, nor part of a docstring."""
    lines: set[int] = set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in _NO_CODE:
                lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(tree))


def functions(tree: ast.AST, prefix: str = "") -> list[tuple[str, int, int]]:
    """Returns name, lines and parameters of each function; a constructor's parameters do not count."""
    found = []
    for node in ast.iter_child_nodes(tree):
        name = f"{prefix}{getattr(node, 'name', '')}"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            spec = node.args
            names = [each.arg for each in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)]
            count = 0 if node.name == "__init__" else len([each for each in names if each not in {"self", "cls"}])
            found.append((name, (node.end_lineno or node.lineno) - node.lineno + 1, count))
        is_scope = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        found += functions(node, f"{name}." if is_scope else prefix)
    return found


class Measures:
    """Figures of the checkout.

    Attributes:
        folders: Lines, code lines and modules of each folder of the package.
        figures: Each figure that has a budget, by its name.
        exceptions: Modules, functions and parameters above a cap, by the cap and the name.
    """

    def __init__(self) -> None:
        self.folders: dict[str, Counter[str]] = {}
        self.exceptions: dict[str, dict[str, int]] = {cap: {} for cap in CAPS}
        self._longest = dict.fromkeys(CAPS, 0)
        public = {"__version__"}
        for path in tracked(f"{PACKAGE}/*.py"):
            parts = path.relative_to(ROOT / PACKAGE).parts
            tree = ast.parse(path.read_bytes())
            self._add_module(path, parts, tree)
            if len(parts) == 1 or parts[1:] == ("__init__.py",):
                public |= exported(tree)
        errors = error_classes()
        core = [self.folders[name]["lines"] for name in CORE]
        total = sum(self.folders.values(), Counter())
        self.figures = {
            "package lines": total["lines"],
            "package code lines": total["code lines"],
            "core lines": sum(core),
            "engine lines": self.folders["engine"]["lines"],
            "periphery lines": total["lines"] - sum(core),
            "modules": total["modules"],
            "test lines": sum(line_count(path) for path in tracked("tests/*.py", "tests/*.sh")),
            "document words": sum(
                len(path.read_text("utf-8").split()) for path in tracked("README.md", "ARCHITECTURE.md", "docs/*.md")
            ),
            "commands": commands(),
            "configuration keys": keys(),
            "public names": len(public | errors),
            "error classes": len(errors),
            "make targets": len(re.findall(r"^[a-z][a-z%-]*:.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)),
        }

    def _add_module(self, path: Path, parts: tuple[str, ...], tree: ast.Module) -> None:
        folder = self.folders.setdefault(parts[0] if len(parts) > 1 else "(top)", Counter())
        name = "/".join(parts)
        lines = line_count(path)
        folder += Counter({"lines": lines, "code lines": code_lines(path, tree), "modules": 1})
        self._note("module", name, lines)
        for function, length, parameters in functions(tree):
            self._note("function", f"{name}:{function}", length)
            self._note("parameters", f"{name}:{function}", parameters)

    def _note(self, cap: str, name: str, value: int) -> None:
        self._longest[cap] = max(self._longest[cap], value)
        if value > CAPS[cap]:
            self.exceptions[cap][name] = max(value, self.exceptions[cap].get(name, 0))

    def print_beside(self, budgets: dict[str, int]) -> None:
        """Prints the tables."""
        print(f"{'folder':24}{'lines':>10}{'code lines':>12}{'modules':>10}")
        for name, each in sorted(self.folders.items(), key=lambda item: -item[1]["lines"]):
            print(f"{name:24}{each['lines']:10}{each['code lines']:12}{each['modules']:10}")
        print(f"\n{'figure':24}{'today':>10}{'budget':>12}")
        for name, value in self.figures.items():
            print(f"{name:24}{value:10}{budgets.get(name, value):12}")
        print(f"\n{'longest':24}{'today':>10}{'cap':>12}{'exceptions':>12}")
        for cap, limit in CAPS.items():
            print(f"{cap:24}{self._longest[cap]:10}{limit:12}{len(self.exceptions[cap]):12}")

    def excesses(self, budgets: dict[str, int], allowed: dict[str, dict[str, int]]) -> list[str]:
        """Returns a line for each figure above its budget, and for each exception that is new, longer, or gone."""
        found = [
            f"{name}: {value}, the budget is {budgets[name]}"
            for name, value in self.figures.items()
            if value > budgets[name]
        ]
        for cap, here in self.exceptions.items():
            before = allowed[cap]
            found += [
                f"{cap} {name}: {value}, allowed are {before.get(name, CAPS[cap])}"
                for name, value in here.items()
                if value > before.get(name, CAPS[cap])
            ]
            found += [
                f"{cap} {name}: no exception any more, run make size ARGS=--lower" for name in before.keys() - here
            ]
        return found


def line_count(path: Path) -> int:
    """Counts the lines of a file."""
    return path.read_bytes().count(b"\n")


def exported(tree: ast.Module) -> set[str]:
    """Returns what a module lists in ``__all__``."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(getattr(each, "id", "") == "__all__" for each in node.targets):
            return set(ast.literal_eval(node.value))
    return set()


def error_classes() -> set[str]:
    """Returns the names of the classes of errors."""
    tree = ast.parse((ROOT / PACKAGE / "errors.py").read_bytes())
    return {node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")}


def commands() -> int:
    """Counts the commands of tiered-ckpt."""
    from tiered_checkpoint_io.cli import app

    return len(app.registered_commands)


def keys() -> int:
    """Counts the keys of the configuration."""
    from tiered_checkpoint_io.model.config import keys

    return len(keys())


def main() -> int:
    """Prints the tables, then each excess; the status is 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="print excesses only")
    parser.add_argument("--lower", action="store_true", help="lower the budgets to today's figures")
    options = parser.parse_args()
    measures = Measures()
    stored = json.loads(BUDGETS.read_text())
    budgets, exceptions = stored["budgets"], stored["exceptions"]
    if options.lower:
        for name, value in measures.figures.items():
            budgets[name] = min(value, budgets[name])
        for cap, before in exceptions.items():
            here = measures.exceptions[cap]
            exceptions[cap] = {name: min(value, before[name]) for name, value in sorted(here.items()) if name in before}
        BUDGETS.write_text(json.dumps(stored, indent=2) + "\n")
    if not options.check:
        measures.print_beside(budgets)
    excesses = measures.excesses(budgets, exceptions)
    for path in tracked("*.py"):
        excesses += [f"{path}: a docstring begins with {word}" for word in _UNCLEAR.findall(path.read_text("utf-8"))]
    for excess in excesses:
        print(excess, file=sys.stderr)
    return bool(excesses)


if __name__ == "__main__":
    sys.exit(main())
