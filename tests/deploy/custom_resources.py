"""Schemas of the custom resources' fields that the chart writes, from their API references; others are refused.

These schemas are our own and contain only these fields. The references are the documentation of KEDA
(keda.sh/docs), the Prometheus Operator (prometheus-operator.dev), Gateway API (gateway-api.sigs.k8s.io) and its
inference extension.
"""

from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string", "minLength": 1}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
_LABELS: Schema = {
    "type": "object",
    "minProperties": 1,
    "additionalProperties": {
        "type": "string",
        "maxLength": 63,
        "pattern": "^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$",
    },
}


def _object(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    properties = {**required, **(optional or {})}
    return {"type": "object", "additionalProperties": False, "required": [*required], "properties": properties}


def _list(items: Schema) -> Schema:
    return {"type": "array", "minItems": 1, "items": items}


_PROMETHEUS_TRIGGER = _object(
    {
        "type": {"const": "prometheus"},
        "metadata": _object(
            {
                "serverAddress": {"type": "string", "pattern": "^https?://"},
                "query": _TEXT,
                "threshold": {"type": "string", "pattern": "^[0-9.]+$"},
            },
            {"ignoreNullValues": {"enum": ["true", "false"]}},
        ),
    },
    {"name": _TEXT, "metricType": {"enum": ["AverageValue", "Value"]}},
)
_SCALING_RULES = _object({}, {"stabilizationWindowSeconds": {"type": "integer", "minimum": 0, "maximum": 3600}})
_SCALED_OBJECT = _object(
    {
        "scaleTargetRef": _object({"name": _TEXT}, {"apiVersion": _TEXT, "kind": _TEXT}),
        "triggers": _list(_PROMETHEUS_TRIGGER),
    },
    {
        "minReplicaCount": _COUNT,
        "maxReplicaCount": _COUNT,
        "pollingInterval": _COUNT,
        "advanced": _object(
            {"horizontalPodAutoscalerConfig": _object({"behavior": _object({}, {"scaleDown": _SCALING_RULES})})}
        ),
    },
)
_DURATION: Schema = {"type": "string", "pattern": "^([0-9]+(ms|[smhdwy]))+$"}
_SERVICE_MONITOR = _object(
    {
        "selector": _object({"matchLabels": _LABELS}),
        "endpoints": _list(
            _object(
                {"port": _TEXT},
                {
                    "path": _TEXT,
                    "interval": _DURATION,
                    "authorization": _object({"credentials": _object({"name": _TEXT, "key": _TEXT})}),
                    "relabelings": _list(_object({"targetLabel": _TEXT, "replacement": _TEXT})),
                },
            )
        ),
    }
)
_TEXTS: Schema = {"type": "object", "minProperties": 1, "additionalProperties": _TEXT}
_RULE = _object({"alert": _TEXT, "expr": _TEXT}, {"for": _DURATION, "labels": _LABELS, "annotations": _TEXTS})
_PROMETHEUS_RULE = _object({"groups": _list(_object({"name": _TEXT, "rules": _list(_RULE)}))})
_INFERENCE_POOL = _object(
    {
        "selector": _object({"matchLabels": _LABELS}),
        "targetPorts": {**_list(_object({"number": _PORT})), "maxItems": 8},
        # The port is required of a Service, which is the kind where none is given.
        "endpointPickerRef": _object(
            {"name": _TEXT, "port": _object({"number": _PORT})}, {"failureMode": {"enum": ["FailOpen", "FailClose"]}}
        ),
    }
)
_BACKEND: Schema = {
    "oneOf": [
        _object({"name": _TEXT, "port": _PORT}),
        _object({"group": {"const": "inference.networking.k8s.io"}, "kind": {"const": "InferencePool"}, "name": _TEXT}),
    ]
}
_HTTP_ROUTE = _object(
    {
        "parentRefs": _list(_object({"name": _TEXT}, {"namespace": _TEXT, "sectionName": _TEXT})),
        "rules": _list(
            _object(
                {"backendRefs": _list(_BACKEND)},
                {"timeouts": _object({"request": {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}})},
            )
        ),
    },
    {"hostnames": _list(_TEXT)},
)
CUSTOM_RESOURCES = {
    ("keda.sh/v1alpha1", "ScaledObject"): _SCALED_OBJECT,
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _SERVICE_MONITOR,
    ("monitoring.coreos.com/v1", "PrometheusRule"): _PROMETHEUS_RULE,
    ("inference.networking.k8s.io/v1", "InferencePool"): _INFERENCE_POOL,
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): _HTTP_ROUTE,
}
"""Schemas of their `spec`, by version and kind."""
