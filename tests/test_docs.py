"""The written reference is the code's."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_api_reference_is_up_to_date() -> None:
    check = [sys.executable, "docs/generate.py", "--check"]
    result = subprocess.run(check, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
