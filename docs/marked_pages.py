"""Pages that people write and of which a part, between two marks, is generated."""

from pathlib import Path

DOCS = Path(__file__).parent
FROM_HERE, TO_HERE = "<!-- docs/generate.py writes from here -->\n", "<!-- to here -->\n"


def with_generated(page: Path, text: str) -> str:
    """The page as it is, with this text between its marks, or at its end if it has none."""
    before, mark, rest = page.read_text().partition(FROM_HERE)
    _, _, after = rest.partition(TO_HERE)
    return f"{before if mark else before.rstrip() + chr(10) * 2}{FROM_HERE}{text}{TO_HERE}{after}"


def row(*cells: str) -> str:
    """A row of a Markdown table."""
    text = " | ".join(cell.replace("|", r"\|") for cell in cells)
    return f"| {text} |"


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table, which ends with an empty line."""
    return "\n".join([row(*header), row(*("---" for _ in header)), *(row(*cells) for cells in rows), ""])


def code(names: "list[str] | tuple[str, ...]", last: str = ", ") -> str:
    """Names in a sentence, each in backticks."""
    *most, final = [f"`{name}`" for name in names]
    return f"{', '.join(most)}{last}{final}" if most else final
