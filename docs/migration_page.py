"""The table of options in docs/how-to/migrate.md, from the table that the command line uses."""

from marked_pages import DOCS, table, with_generated

from server.cli.foreign_flags import FOREIGN, MODEL, Foreign, Needless, Translated

PAGE = DOCS / "how-to" / "migrate.md"


def render_migration() -> str:
    """The page as it is, with the table of options between its marks."""
    return with_generated(PAGE, _options())


def _options() -> str:
    """A row for each option, or for several that are answered alike."""
    names: dict[Foreign, list[str]] = {}
    for name, foreign in FOREIGN.items():
        names.setdefault(foreign, []).append(f"`{name}`")
    rows = [(", ".join(group), _treatment(foreign)) for foreign, group in names.items()]
    return table(("option", "here"), rows)


def _treatment(foreign: Foreign) -> str:
    if isinstance(foreign, Translated):
        return "the model: `samewise serve MODEL`" if foreign.ours == MODEL else f"is `{foreign.ours}`"
    if isinstance(foreign, Needless):
        values = f", with {', '.join(f'`{value}`' for value in sorted(foreign.only))}" if foreign.only else ""
        otherwise = f" Any other value is refused: {foreign.otherwise}" if foreign.only else ""
        return f"not needed{values}: {foreign.reason}{otherwise}"
    return f"refused: {foreign.advice}"
