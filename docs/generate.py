"""Writes the pages that are made from the code, so that they cannot drift from it.

They are docs/reference except its prose, the flags of other servers in docs/how-to/migrate.md, the settings and keys in
the schema of the Helm chart's values, and the chart's copy of the alerts.

With `--check` it writes nothing and fails if a page is not what would be written.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

from api_reference import API, NOTE, ApiReference
from chart_schema import CHART, SCHEMA, render_chart_schema
from errors_page import render_errors
from marked_pages import DOCS
from metrics_page import render_metrics
from migration_page import PAGE, render_migration
from models_page import render_models
from settings_page import render_settings

REFERENCE = DOCS / "reference"


def render() -> Mapping[Path, str]:
    """The text of each generated file."""
    return {
        **ApiReference().render(),
        REFERENCE / "settings.md": render_settings(),
        REFERENCE / "errors.md": render_errors(),
        REFERENCE / "metrics.md": render_metrics(),
        REFERENCE / "models.md": render_models(),
        PAGE: render_migration(),
        SCHEMA: render_chart_schema(),
        CHART / "files" / "alerts.yml": (CHART.parents[1] / "alerts.yml").read_text(),
    }


def main() -> None:
    """Write or check the pages, and remove or report pages of endpoints that are gone."""
    is_check = "--check" in sys.argv[1:]
    files = render()
    gone = [page for page in API.glob("*.md") if page not in files and page.read_text().startswith(NOTE)]
    stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    if is_check and (gone or stale):
        names = ", ".join(str(path.relative_to(DOCS.parent)) for path in (*stale, *gone))
        raise SystemExit(f"out of date: {names}; run python docs/generate.py")
    if not is_check:
        for path in stale:
            path.write_text(files[path])
        for path in gone:
            path.unlink()


if __name__ == "__main__":
    main()
