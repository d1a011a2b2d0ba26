"""The settings and the keys in the schema of the Helm chart's values, from the server's own models of them."""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from server.config import Settings
from server.model_settings import OF_A_MODEL, ModelSettings
from server.tenants.keys import KeysEntry

CHART = Path(__file__).parents[1] / "deploy" / "helm" / "samewise"
SCHEMA = CHART / "values.schema.json"
OF_THE_CHART = frozenset(
    {
        *("port", "api_key", "api_keys_file", "redis_url", "data_dir"),
        *("hub_token", "ssl_certfile", "ssl_keyfile", "ssl_keyfile_password"),
        *("kv_events", "kv_events_replay", "kv_events_topic"),
    }
)
"""Settings that the chart sets from other values, secrets, and HTTPS, which ends at the Ingress or gateway."""


def render_chart_schema() -> str:
    """The schema as it is, with what the server takes now."""
    schema = json.loads(SCHEMA.read_text())
    values = schema["properties"]
    settings = _fields(Settings)
    of_a_model = {name: field for name, field in settings.items() if name in OF_A_MODEL}
    settings["models"] = {
        "type": "array",
        "description": settings["models"]["description"],
        "items": _object(_fields(ModelSettings) | of_a_model),
    }
    values["settings"]["properties"] = settings
    values["apiKeys"]["properties"]["keys"]["items"] = _object(_fields(KeysEntry))
    return json.dumps(schema, indent=2) + "\n"


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    """The schema of an entry of a list, which has a name."""
    return {"type": "object", "additionalProperties": False, "required": ["name"], "properties": properties}


def _fields(model: type[BaseModel]) -> dict[str, Any]:
    fields = model.model_json_schema()["properties"]
    return {name: _value(field) for name, field in fields.items() if name not in OF_THE_CHART}


def _value(field: dict[str, Any]) -> dict[str, Any]:
    """The schema of one setting in the YAML file: without a default, and a list may also be one text."""
    kept = {key: value for key, value in field.items() if key not in ("title", "default")}
    return kept | {"type": ["array", "string"]} if kept.get("type") == "array" else kept
