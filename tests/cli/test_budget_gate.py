"""The gate of budgets that `make check` runs."""

import subprocess
import sys
from pathlib import Path

GATE = Path(__file__).parents[2] / ".ci" / "budget_gate.py"


def run_gate(root: Path, lines: str, unique: str = "[]") -> subprocess.CompletedProcess[str]:
    (root / "pyproject.toml").write_text(f"[tool.budget]\nunique = {unique}\n[tool.budget.lines]\n{lines}\n")
    return subprocess.run([sys.executable, str(GATE)], cwd=root, capture_output=True, text=True, check=False)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_file_counts_for_the_innermost_package(tmp_path: Path) -> None:
    write(tmp_path / "a" / "one.py", "x = 1\n" * 3)
    write(tmp_path / "a" / "b" / "c" / "two.h", "int x;\n" * 4)
    write(tmp_path / "a" / "b" / "notes.md", "text\n" * 9)
    result = run_gate(tmp_path, 'a = 3\n"a/b" = 4')
    assert [line.split()[:4] for line in result.stdout.splitlines()] == [["a", "3", "of", "3"], ["a/b", "4", "of", "4"]]
    assert result.returncode == 0
    result = run_gate(tmp_path, 'a = 3\n"a/b" = 3')
    assert result.stdout.endswith("a/b: 4 lines, its budget in pyproject.toml is 3\n")
    assert result.returncode == 1


def test_a_class_that_stands_twice(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / "a" / f"{name}.py", "class Same: ...\nclass _Own: ...\n")
    assert run_gate(tmp_path, "a = 9").returncode == 0
    result = run_gate(tmp_path, "a = 9", '["a"]')
    assert result.stdout.splitlines()[-1] == "a: the class Same stands in a/one.py and a/two.py"
    assert result.returncode == 1
