"""The prose gate: finds wording in docstrings, comments and pages that is hard to understand out of context.

- A docstring or comment may not open with a word such as `What` or `Of` (RIDDLE below): it names the thing.
- A docstring may not begin or end with "...", because each must make sense alone.
- Some phrases have a plainer form (PLAINER below), which the message names.
- A sentence of a Markdown page has at most 30 words.

python .ci/prose_gate.py PATH...    prints what it finds in these files and folders; exits with 1 if it finds anything
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

MAX_SENTENCE_WORDS = 30
RIDDLE = re.compile(r"(What|Whoever|Of|See|Those|That which)\b(?! also)")
PLAINER = {
    "whoever": "name who it is",
    "beside": "with",
    "those of": "repeat the noun",
    "that of": "repeat the noun",
    "the former": "repeat the noun",
    "is told": "say who reports it",
    "are told": "say who reports it",
    "tells of": "describes, reports",
    "told apart": "distinguished",
    "but for": "except",
}
PHRASE = re.compile(rf"\b({'|'.join(PLAINER)})\b", re.IGNORECASE)
C_COMMENT = re.compile(r"^[ \t]*(?://+|/\*\*?)[ \t]*(.*)", re.MULTILINE)
SENTENCE_END = re.compile(r"[.!?](?:\s|$)")
NOT_PROSE = re.compile(r"^(```.*?^```|<!--.*?-->|---\n.*?^---|[ \t]*\|.*?|#.*?)$", re.MULTILINE | re.DOTALL)
NEW_BLOCK = re.compile(r"\n\s*\n|\n\s*(?:[-*]|\d+\.)\s+")
MARKER = re.compile(r"^\s*(?:[-*]|\d+\.)\s")
CODE = re.compile(r"(?:`[^`]*`|\]\([^)]*\))(?:, (?:and |or )?`[^`]*`)*")


def complaints_about(path: Path) -> Iterator[str]:
    """Yield a line for each finding in one file."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from (f"{path}:{line}: {complaint}" for line, complaint in _of_page(source))
        return
    for line, text, is_docstring in _python_prose(source) if path.suffix == ".py" else _c_prose(source):
        yield from (f"{path}:{line}: {complaint}" for complaint in _of_text(text.strip(), is_docstring=is_docstring))


def _of_text(text: str, *, is_docstring: bool) -> Iterator[str]:
    """Yield the problems of a docstring or comment."""
    if opening := RIDDLE.match(text):
        yield f'opens with "{opening[1]}"; name the thing: {text[:60]!r}'
    if is_docstring and (text.startswith("...") or text.endswith("...")):
        yield f"runs on into another docstring: {text[:60]!r}"
    for phrase in {match[0].lower() for match in PHRASE.finditer(CODE.sub("", text))}:
        yield f'"{phrase}": {PLAINER[phrase]}'


def _python_prose(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield line, text and whether it is a docstring, for each docstring and comment block of a module."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text, True
    comments = {
        token.start[0]: token.string.lstrip("#")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    yield from _blocks(comments)


def _c_prose(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield line, text and False for each comment block of C++ or JavaScript."""
    yield from _blocks({source.count("\n", 0, found.start()) + 1: found[1] for found in C_COMMENT.finditer(source)})


def _blocks(comments: dict[int, str]) -> Iterator[tuple[int, str, bool]]:
    """Join comments on consecutive lines into one text."""
    starts = [line for before, line in pairwise((-1, *sorted(comments))) if line != before + 1]
    for start in starts:
        lines: list[str] = []
        while start + len(lines) in comments:
            lines.append(comments[start + len(lines)].strip())
        yield start, " ".join(lines), False


def _of_page(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and complaint for a Markdown page's long sentences and phrases."""
    prose = NOT_PROSE.sub(lambda found: "\n" * found[0].count("\n"), source)
    position = 0
    for block in NEW_BLOCK.split(prose):
        position = prose.index(block, position)
        line = prose.count("\n", 0, position + len(block) - len(block.lstrip())) + 1
        for sentence in SENTENCE_END.split(CODE.sub(" code ", MARKER.sub("", block))):
            if len(words := sentence.split()) > MAX_SENTENCE_WORDS:
                yield line, f"a sentence of {len(words)} words: {' '.join(words[:8])} ..."
        for found in PHRASE.finditer(CODE.sub("", block)):
            yield line, f'"{found[0].lower()}": {PLAINER[found[0].lower()]}'


def main(paths: list[str]) -> int:
    """Check these files and all Python, C++, JavaScript and Markdown below these folders; returns the exit code."""
    suffixes = {".py", ".md", ".h", ".cpp", ".js"}
    files = sorted(
        file
        for path in map(Path, paths)
        for file in (path.rglob("*") if path.is_dir() else [path])
        if file.suffix in suffixes
    )
    if not files:
        sys.stderr.write(f"prose gate: nothing to read in {' '.join(paths) or '(no path given)'}\n")
        return 2
    complaints = [complaint for file in files for complaint in complaints_about(file)]
    for complaint in complaints:
        sys.stdout.write(f"{complaint}\n")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
