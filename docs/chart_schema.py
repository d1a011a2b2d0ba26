"""The settings in the schema of the Helm chart's values, from the settings themselves."""

import json
from pathlib import Path
from typing import Any

from server.config import Settings

SCHEMA = Path(__file__).parents[1] / "deploy" / "helm" / "samewise" / "values.schema.json"
OF_THE_CHART = frozenset(
    {
        *("port", "api_key", "api_keys_file", "redis_url", "data_dir"),
        *("kv_events", "kv_events_replay", "kv_events_topic"),
    }
)
"""What the chart sets, by values of its own: there its ports, mounts and Secrets follow from them, too."""


def render_chart_schema() -> str:
    """The schema as it is, with the settings that the server has now."""
    schema = json.loads(SCHEMA.read_text())
    fields = Settings.model_json_schema()["properties"]
    schema["properties"]["settings"]["properties"] = {
        name: _value(field) for name, field in fields.items() if name not in OF_THE_CHART
    }
    return json.dumps(schema, indent=2) + "\n"


def _value(field: dict[str, Any]) -> dict[str, Any]:
    """What the YAML file may say: without the default, which the server knows, and a list also as one text."""
    kept = {key: value for key, value in field.items() if key not in ("title", "default")}
    return kept | {"type": ["array", "string"]} if kept.get("type") == "array" else kept
