"""The table of metrics in docs/monitoring.md, from the metrics themselves."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from scheduler.interface import EngineStats
from server.engine.client import EngineState
from server.telemetry.metrics import Metrics

PAGE = Path(__file__).parent / "monitoring.md"
FROM_HERE, TO_HERE = "<!-- docs/generate.py writes from here -->\n", "<!-- to here -->\n"


def render_monitoring() -> str:
    """The page as it is, with the table of metrics between its marks."""
    before, _, rest = PAGE.read_text().partition(FROM_HERE)
    _, _, after = rest.partition(TO_HERE)
    return f"{before}{FROM_HERE}{_metrics()}{TO_HERE}{after}"


def _metrics() -> str:
    """Those of the server's own, with the names under which they are read."""
    info = SimpleNamespace(block_size=32, num_blocks=1, kv_dtype="float32")
    idle: Any = SimpleNamespace(
        info=info, stats=EngineStats(), state=EngineState.READY, num_restarts=0, num_held=0, num_background_held=0
    )
    lines = ["| metric | | |", "|---|---|---|"]
    for family in text_string_to_metric_families(Metrics(idle, "model", "samewise").render(of_tenants=True).decode()):
        if family.name.startswith("samewise:") and not family.name.endswith("_created"):
            total = "_total" if family.type == "counter" else ""
            lines.append(f"| `{family.name}{total}` | {family.type} | {family.documentation} |")
    return "\n".join([*lines, ""])
