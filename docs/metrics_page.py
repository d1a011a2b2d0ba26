"""The page docs/reference/metrics.md, from the metrics themselves."""

from types import SimpleNamespace
from typing import Any

from marked_pages import table
from prometheus_client.parser import text_string_to_metric_families

from scheduler.interface import EngineStats
from server.engine.client import EngineState
from server.models.hosted_model import HostedModel, Residency
from server.models.residence import Shared
from server.telemetry.metrics import Families, Metrics, ResidenceCollector, ServerMetrics, exposition

PREFIX = "samewise"
PAGE = """\
<!-- docs/generate.py writes this page -->

# Metrics

Every metric of `GET /metrics`, in Prometheus's text format. [Monitoring](../how-to/monitoring.md) shows how to collect
them, which alerts to set and what to do when one fires.

```bash
curl http://127.0.0.1:8000/metrics
```

The prefix `{prefix}` is the setting `--metrics-prefix`; with `vllm`, the dashboards and routers of vLLM find their
metrics under the names that they know. A counter's name ends with `_total`. A histogram has the suffixes `_bucket`,
`_sum` and `_count`. Metrics of a model have the label `model_name`.

{metrics}
The process adds metrics of its own, such as its memory, its CPU time and its open files.
"""


def render_metrics() -> str:
    """The page."""
    info = SimpleNamespace(block_size=32, num_blocks=1, kv_dtype="float32", has_kv_cache=True)
    idle: Any = SimpleNamespace(
        info=info, stats=EngineStats(), state=EngineState.READY, num_restarts=0, num_held=0, num_background_held=0
    )
    source: Any = SimpleNamespace(planned=None)
    one_of_several = HostedModel("model", source, Residency(), idle)
    metrics = [
        *Metrics(idle, "model", PREFIX).collect(),
        *ResidenceCollector(one_of_several, Families(PREFIX, "model")).collect(),
        *ServerMetrics(PREFIX, lambda: Shared(0, has_spare=False)).collect(),
    ]
    rows = []
    for family in text_string_to_metric_families(exposition(metrics, of_tenants=True).decode()):
        if family.name.startswith(f"{PREFIX}:") and not family.name.endswith("_created"):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            rows.append((f"`{name}`", family.type, family.documentation))
    listed = table(("metric", "type", "description"), rows)
    return PAGE.format(prefix=f"{PREFIX}:", metrics=listed)
