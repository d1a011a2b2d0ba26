"""Writes the pages that are made from the code, so that they cannot drift from it: docs/api.md, and the
metrics of docs/monitoring.md.

With `--check` it writes nothing and fails if a page is not what would be written.
"""

import sys
from pathlib import Path

from api_reference import render_api
from monitoring_page import render_monitoring

DOCS = Path(__file__).parent


def main() -> None:
    """Write or check the pages."""
    for path, text in ((DOCS / "api.md", render_api()), (DOCS / "monitoring.md", render_monitoring())):
        if "--check" not in sys.argv[1:]:
            path.write_text(text)
        elif path.read_text() != text:
            raise SystemExit(f"docs/{path.name} is out of date; run python docs/generate.py")


if __name__ == "__main__":
    main()
