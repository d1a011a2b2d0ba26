"""The budget gate: each package has at most as many lines as `[tool.budget]` in pyproject.toml allows.

Lines of Python, C++ and headers count, with docstrings and comments. A budget is for a folder and all below it that has
no budget of its own. A commit that raises one says why. In the folders of `unique`, no two public classes have
the same name.

python .ci/budget_gate.py    prints the lines of each package and its budget, and exits with 1 if one is exceeded
"""

import ast
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

SUFFIXES = {".py", ".h", ".cpp"}


def lines_by_package(budgets: dict[str, int], root: Path) -> dict[str, int]:
    """The lines of each package with a budget; each file counts for the innermost one."""
    found = dict.fromkeys(budgets, 0)
    for top in {name.partition("/")[0] for name in budgets}:
        for path in (root / top).rglob("*"):
            if path.suffix in SUFFIXES:
                folders = [str(folder) for folder in path.relative_to(root).parents]
                package = next(folder for folder in folders if folder in budgets)
                found[package] += len(path.read_bytes().splitlines())
    return found


def repeated_classes(folder: str, root: Path) -> dict[str, list[str]]:
    """The files of each public class below a folder whose name stands in several."""
    files: dict[str, list[str]] = defaultdict(list)
    for path in sorted((root / folder).rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(str(path.relative_to(root)))
    return {name: places for name, places in files.items() if len(places) > 1}


def main(root: Path) -> int:
    """Check the project in a folder; returns the exit code."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["budget"]
    budgets: dict[str, int] = settings["lines"]
    lines, complaints = lines_by_package(budgets, root), []
    for package, count in lines.items():
        sys.stdout.write(f"{package:<32}{count:>7} of {budgets[package]:>7} lines\n")
        if count > budgets[package]:
            complaints.append(f"{package}: {count} lines, its budget in pyproject.toml is {budgets[package]}")
    for folder in settings["unique"]:
        for name, places in repeated_classes(folder, root).items():
            complaints.append(f"{folder}: the class {name} stands in {' and '.join(places)}")
    sys.stdout.write("".join(f"{complaint}\n" for complaint in complaints))
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(Path.cwd()))
