"""The gate of wording that `make check` runs."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONG = " ".join(["word"] * 31)


def run_gate(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / ".ci" / "prose_gate.py"), str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("a.py", '"""Recent requests, by id."""\n', ""),
        ("a.py", '"""What is told of a request."""\n', '1: opens with "What"'),
        ("a.py", 'x = 1\n"""Of each row, ..."""\n', '2: opens with "Of"'),
        ("a.py", 'x = 1\n"""The first, ..."""\n', "2: runs on"),
        ("a.py", '"""A module."""\n\nx = 1  # those of the row\n', '3: "those of"'),
        ("a.py", "# Rows, and\n# those\n# of the batch\n", '1: "those of"'),
        ("a.py", "x = 'See above'\n", ""),
        ("a.cpp", "int x;\n// Whoever calls\n", '2: opens with "Whoever"'),
        ("a.js", "/* See there */\n", '1: opens with "See"'),
        ("a.md", f"# Title\n\nShort.\n\n{LONG}.\n", "5: a sentence of 31 words"),
        ("a.md", f"```sh\n{LONG}\n```\n\n| {LONG} |\n\n- {LONG[5:]}.\n- next\n", ""),
        ("a.md", "One `beside` it.\n\nBeside it.\n", '3: "beside"'),
    ],
)
def test_what_is_found(name: str, text: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    result = run_gate(tmp_path)
    assert result.returncode == bool(complaint)
    assert result.stdout.startswith(f"{tmp_path / name}:{complaint}" if complaint else "")
    assert bool(result.stdout) == bool(complaint)


def test_nothing_to_read_is_no_success(tmp_path: Path) -> None:
    assert run_gate(tmp_path).returncode == 2
