"""Writes the pages that are made from the code, so that they cannot drift from it.

They are docs/api.md, the metrics of docs/monitoring.md, the options of docs/migration.md, the settings and keys in the
schema of the Helm chart's values, and the chart's copy of the alerts.

With `--check` it writes nothing and fails if a page is not what would be written.
"""

import sys
from pathlib import Path

from api_reference import render_api
from chart_schema import CHART, SCHEMA, render_chart_schema
from migration_page import render_migration
from monitoring_page import render_monitoring

DOCS = Path(__file__).parent


def main() -> None:
    """Write or check the pages."""
    pages = (
        (DOCS / "api.md", render_api()),
        (DOCS / "migration.md", render_migration()),
        (DOCS / "monitoring.md", render_monitoring()),
        (SCHEMA, render_chart_schema()),
        (CHART / "files" / "alerts.yml", (CHART.parents[1] / "alerts.yml").read_text()),
    )
    for path, text in pages:
        if "--check" not in sys.argv[1:]:
            path.write_text(text)
        elif path.read_text() != text:
            raise SystemExit(f"{path.relative_to(DOCS.parent)} is out of date; run python docs/generate.py")


if __name__ == "__main__":
    main()
