"""The gate that `make check` runs."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_gate(*folders: Path | str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / ".ci" / "size_gate.py"), *map(str, folders)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


REST = "x = 1\n" * 40


def function(lines: int, header: str = "def f():") -> str:
    return header + "\n" + "    pass\n" * (lines - 1) + REST


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("x = 1\n" * 600, ""),
        ("x = 1\n" * 601, "a.py: 601 lines, the limit is 600\n"),
        ("x = 1\n" * 40, ""),
        (
            "x = 1\n" * 39,
            "a.py: 39 lines: merge it with its users, or give the reason in a comment `# Short: ...`\n",
        ),
        ('"""A module."""\n\n# Short: it is imported alone.\nx = 1\n', ""),
        (function(60), ""),
        ("\n" + function(61), "a.py:2: f has 61 lines, the limit is 60\n"),
        (function(61, "async def f():"), "a.py:1: f has 61 lines, the limit is 60\n"),
        ("class A:\n    def f(self):\n" + "        pass\n" * 60 + REST, "a.py:2: f has 61 lines, the limit is 60\n"),
    ],
)
def test_what_breaks_a_limit(source: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a.py").write_text(source)
    result = run_gate(tmp_path)
    assert result.stdout == (f"{tmp_path / 'inner'}/{complaint}" if complaint else "")
    assert result.returncode == bool(complaint)


def test_the_face_of_a_package_may_be_short(tmp_path: Path) -> None:
    for name in ("__init__.py", "__main__.py"):
        (tmp_path / name).write_text('"""A package."""\n')
    assert run_gate(tmp_path).returncode == 0


def test_a_folder_that_is_not_there_is_no_success() -> None:
    assert run_gate("no-such-folder").returncode == 2
    assert run_gate().returncode == 2
