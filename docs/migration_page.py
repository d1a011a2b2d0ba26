"""The table of options in docs/migration.md, from the table that the command line uses."""

from pathlib import Path

from monitoring_page import FROM_HERE, TO_HERE

from server.cli.foreign_flags import FOREIGN, MODEL, Foreign, Needless, Translated

PAGE = Path(__file__).parent / "migration.md"


def render_migration() -> str:
    """The page as it is, with the table of options between its marks."""
    before, _, rest = PAGE.read_text().partition(FROM_HERE)
    _, _, after = rest.partition(TO_HERE)
    return f"{before}{FROM_HERE}{_options()}{TO_HERE}{after}"


def _options() -> str:
    """A row for each option, or for several that are answered alike."""
    names: dict[Foreign, list[str]] = {}
    for name, foreign in FOREIGN.items():
        names.setdefault(foreign, []).append(f"`{name}`")
    rows = [f"| {', '.join(group)} | {_treatment(foreign)} |" for foreign, group in names.items()]
    return "\n".join(["| option | here |", "|---|---|", *rows, ""])


def _treatment(foreign: Foreign) -> str:
    if isinstance(foreign, Translated):
        return "the model: `samewise serve MODEL`" if foreign.ours == MODEL else f"is `{foreign.ours}`"
    if isinstance(foreign, Needless):
        values = f", with {', '.join(f'`{value}`' for value in sorted(foreign.only))}" if foreign.only else ""
        otherwise = f" Any other value is refused: {foreign.otherwise}" if foreign.only else ""
        return f"not needed{values}: {foreign.reason}{otherwise}"
    return f"refused: {foreign.advice}"
