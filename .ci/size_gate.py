"""The size gate: no file over 600 lines, no function over 60, docstrings and comments included.

python .ci/size_gate.py FOLDER...    prints what is too long and exits with 1 if anything is
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60


def too_long(path: Path) -> Iterator[str]:
    """A line for the file if it is too long, and one for each function in it that is."""
    source = path.read_text(encoding="utf-8")
    num_lines = len(source.splitlines())
    if num_lines > MAX_FILE_LINES:
        yield f"{path}: {num_lines} lines, the limit is {MAX_FILE_LINES}"
    for node in ast.walk(ast.parse(source, str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines, the limit is {MAX_FUNCTION_LINES}"


def main(folders: list[str]) -> int:
    """Check all Python files below the folders; returns the exit code."""
    missing = [folder for folder in folders if not Path(folder).is_dir()]
    if missing or not folders:
        sys.stderr.write(f"size gate: no such folder: {', '.join(missing) or '(none given)'}\n")
        return 2
    files = sorted(path for folder in folders for path in Path(folder).rglob("*.py"))
    complaints = [complaint for path in files for complaint in too_long(path)]
    for complaint in complaints:
        sys.stdout.write(f"{complaint}\n")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
