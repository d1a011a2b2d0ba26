"""The size gate: files have 40 to 600 lines and functions at most 60, including docstrings and comments.

A shorter file needs a comment `# Short: reason`, except `__init__.py` and `__main__.py`.

python .ci/size_gate.py FOLDER...    prints violations and exits with 1 if there are any
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MIN_FILE_LINES = 40
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
FACES = ("__init__", "__main__")


def complaints_about(path: Path) -> Iterator[str]:
    """Yield a line if the file is too long or too short, and one for each function that is too long."""
    source = path.read_text(encoding="utf-8")
    num_lines = len(source.splitlines())
    if num_lines > MAX_FILE_LINES:
        yield f"{path}: {num_lines} lines, the limit is {MAX_FILE_LINES}"
    if num_lines < MIN_FILE_LINES and path.stem not in FACES and "\n# Short: " not in source:
        yield f"{path}: {num_lines} lines: merge it with its users, or give the reason in a comment `# Short: ...`"
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
    complaints = [complaint for path in files for complaint in complaints_about(path)]
    for complaint in complaints:
        sys.stdout.write(f"{complaint}\n")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
