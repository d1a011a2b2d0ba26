"""The chart passes the server's real properties to autoscalers, Prometheus and routers."""

import re
from typing import Any, get_args

import pytest
import yaml
from starlette.datastructures import Headers

from server.api.batches.objects import CreateBatch
from server.config import Settings
from server.http.auth import key_in
from tests.deploy.chart import CHART, ROOT, container_of, read_values, render, render_one, render_pod, variables_of

PAGE = (ROOT / "docs" / "how-to" / "kubernetes.md").read_text()
KEDA = {"type": "keda", "keda": {"prometheusAddress": "http://prometheus:9090"}}


@pytest.fixture(scope="module")
def metrics() -> set[str]:
    """The names in what the server answers, of which docs/generate.py makes the table."""
    pages = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    names = re.findall(r"^\| `(samewise:\w+)` \|", pages, re.MULTILINE)
    assert len(names) > 30
    return set(names)


def snippets() -> list[dict[str, Any]]:
    """The YAML in the page."""
    return [yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)]


def snippet(key: str) -> Any:
    (found,) = (one[key] for one in snippets() if key in one)
    return found


def test_keda_asks_for_metrics_that_there_are(metrics: set[str]) -> None:
    spec = render_one("ScaledObject", {"autoscaling": KEDA})["spec"]
    assert spec["scaleTargetRef"]["kind"] == "Deployment"
    queries = [trigger["metadata"]["query"] for trigger in spec["triggers"]]
    assert sorted(queries) == [
        'sum(samewise:num_requests_running{namespace="llm",service="samewise"})',
        'sum(samewise:num_requests_waiting{namespace="llm",service="samewise"})',
    ]
    assert {name for query in queries for name in re.findall(r"\w+:\w+", query)} <= metrics


def test_other_labels_of_prometheus_are_taken_as_they_are() -> None:
    scaling = {**KEDA, "keda": {**KEDA["keda"], "matchers": 'job="a"'}, "runningPerReplica": None}  # type: ignore[dict-item]
    (trigger,) = render_one("ScaledObject", {"autoscaling": scaling})["spec"]["triggers"]
    assert trigger["metadata"]["query"] == 'sum(samewise:num_requests_waiting{job="a"})'


def test_the_autoscaler_s_metrics_are_those_that_the_page_s_adapter_makes(metrics: set[str]) -> None:
    spec = render_one("HorizontalPodAutoscaler", {"autoscaling": {"type": "hpa", "maxReplicas": 9}})["spec"]
    asked = {one["pods"]["metric"]["name"] for one in spec["metrics"]}
    (rule,) = snippet("rules")
    made = re.compile(rule["name"]["matches"])
    series = re.search(r"\^(.*)\$", rule["seriesQuery"])
    assert series is not None
    offered = {
        made.sub(rule["name"]["as"].replace("$", "\\"), name) for name in metrics if re.fullmatch(series[1], name)
    }
    assert asked == offered == {"samewise_num_requests_running", "samewise_num_requests_waiting"}
    assert (spec["minReplicas"], spec["maxReplicas"]) == (1, 9)


def test_the_autoscaler_alone_decides_on_replicas() -> None:
    assert "replicas" not in render_one("Deployment", {"autoscaling": {"type": "hpa"}})["spec"]
    assert render_one("Deployment", {"replicas": 0})["spec"]["replicas"] == 0
    assert render_one("Deployment")["spec"]["replicas"] == 1


def test_replicas_are_read_once_each() -> None:
    values = {"serviceMonitor": {"enabled": True}, "data": {"enabled": True}}
    spec = render_one("ServiceMonitor", values)["spec"]
    wanted = spec["selector"]["matchLabels"].items()
    services = [one for one in render(values) if one["kind"] == "Service"]
    (read,) = (one for one in services if wanted <= one["metadata"]["labels"].items())
    assert len(services) == 2
    assert spec["endpoints"][0]["port"] in {port["name"] for port in read["spec"]["ports"]}


def test_prometheus_sends_a_key_where_one_is_needed() -> None:
    monitor = {"serviceMonitor": {"enabled": True, "existingSecret": "scraper", "secretKey": "bearer"}}
    (endpoint,) = render_one("ServiceMonitor", {**monitor, "apiKeys": {"existingSecret": "keys"}})["spec"]["endpoints"]
    assert endpoint["authorization"] == {"credentials": {"name": "scraper", "key": "bearer"}}
    opened = {"apiKeys": {"existingSecret": "keys"}, "settings": {"open_metrics": True}}
    (endpoint,) = render_one("ServiceMonitor", {**opened, "serviceMonitor": {"enabled": True}})["spec"]["endpoints"]
    assert "authorization" not in endpoint


def test_all_that_select_pods_select_these() -> None:
    values = {
        "inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}},
        "podDisruptionBudget": {"enabled": True},
        "networkPolicy": {"enabled": True},
    }
    found = {one["kind"]: one.get("spec", {}) for one in render(values)}
    labels = found["Deployment"]["template"]["metadata"]["labels"].items()
    selectors = [
        found["Deployment"]["selector"]["matchLabels"],
        found["InferencePool"]["selector"]["matchLabels"],
        found["PodDisruptionBudget"]["selector"]["matchLabels"],
        found["NetworkPolicy"]["podSelector"]["matchLabels"],
        found["Service"]["selector"],
    ]
    assert all(selector == selectors[0] and selector.items() <= labels for selector in selectors)


def test_endpoint_pickers_find_the_metrics(metrics: set[str]) -> None:
    """By the pod's label, and what the page has them configured with."""
    parameters = next(one for one in snippet("plugins") if one["type"] == "core-metrics-extractor")["parameters"]
    (engine,) = parameters["engineConfigs"]
    labels = render_pod()["metadata"]["labels"]
    assert labels["llm-d.ai/engine-type"] == labels["inference.networking.k8s.io/engine-type"] == engine["name"]
    assert {value for key, value in engine.items() if key.endswith("Spec")} <= metrics


def test_the_pool_is_what_the_route_leads_to() -> None:
    route = {"enabled": True, "parentRefs": [{"name": "gateway"}]}
    pool = {"enabled": True, "endpointPicker": {"name": "picker"}}
    values = {"httpRoute": route, "inferencePool": pool}
    (rule,) = render_one("HTTPRoute", values)["spec"]["rules"]
    assert rule["backendRefs"][0]["name"] == render_one("InferencePool", values)["metadata"]["name"]
    (rule,) = render_one("HTTPRoute", {"httpRoute": route, "service": {"port": 80}})["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": "samewise", "port": 80}]


def test_cache_events_are_published_where_the_ports_are() -> None:
    values = {"kvEvents": {"enabled": True}, "settings": {"served_model_name": ["org/model", "b"]}}
    pod = render_pod(values)
    variables, names = variables_of(pod), [one["name"] for one in container_of(pod)["env"]]
    ports = {one["name"]: one["containerPort"] for one in container_of(pod)["ports"]}
    assert variables["SAMEWISE_KV_EVENTS"] == f"tcp://*:{ports['kv-events']}"
    assert variables["SAMEWISE_KV_EVENTS_REPLAY"] == f"tcp://*:{ports['kv-replay']}"
    assert variables["SAMEWISE_KV_EVENTS_TOPIC"] == f"kv@$(POD_IP):{ports['http']}@org/model"
    assert variables["POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert names.index("POD_IP") < names.index("SAMEWISE_KV_EVENTS_TOPIC"), "only what stands before is put in"

    without = render_pod({**values, "kvEvents": {"enabled": True, "replayPort": None}})
    assert "SAMEWISE_KV_EVENTS_REPLAY" not in variables_of(without)
    assert "SAMEWISE_KV_EVENTS" not in variables_of(render_pod())


def test_the_policy_lets_in_what_is_listened_for() -> None:
    values = {
        "networkPolicy": {
            "enabled": True,
            "from": [{"podSelector": {}}],
            "kvEventsFrom": [{"podSelector": {"matchLabels": {"a": "router"}}}],
        },
        "kvEvents": {"enabled": True},
        "settings": {"served_model_name": "a"},
        "apiKeys": {"existingSecret": "keys"},
        "redis": {"existingSecret": "redis", "port": 6380},
    }
    spec = render_one("NetworkPolicy", values)["spec"]
    let_in = [port["port"] for rule in spec["ingress"] for port in rule["ports"]]
    assert let_in == [one["name"] for one in container_of(render_pod(values))["ports"]]
    api, events = spec["ingress"]
    assert api["from"] == [{"podSelector": {}}]
    assert events["from"] == [{"podSelector": {"matchLabels": {"a": "router"}}}]
    assert [port["port"] for egress in spec["egress"] for port in egress["ports"]] == [53, 53, 443, 6380]
    closed = render_one("NetworkPolicy", {"networkPolicy": {"enabled": True, "downloads": False}})["spec"]
    assert [port["port"] for egress in closed["egress"] for port in egress["ports"]] == [53, 53]
    assert "from" not in closed["ingress"][0]


@pytest.mark.parametrize(
    ("url", "port"),
    [
        ("http://collector.monitoring:4318", 4318),
        ("HTTPS://collector:8443/v1/traces?a=b:1", 8443),
        ("http://[fd00::1]:4318/", 4318),
        ("http://[fd00::1]", 80),
        ("http://collector", 80),
        ("https://collector/otlp", 443),
    ],
)
def test_the_policy_lets_traces_out(url: str, port: int) -> None:
    assert Settings(otlp_traces_endpoint=url).otlp_traces_endpoint
    values = {"networkPolicy": {"enabled": True, "downloads": False}, "settings": {"otlp_traces_endpoint": url}}
    spec = render_one("NetworkPolicy", values)["spec"]
    assert [one["port"] for egress in spec["egress"] for one in egress["ports"]] == [53, 53, port]


@pytest.mark.parametrize("prefix", ["samewise", "vllm"])
def test_the_alerts_are_those_of_the_folder_and_find_what_the_monitor_reads(prefix: str) -> None:
    values = {
        "settings": {"metrics_prefix": prefix},
        **{key: {"enabled": True, "labels": {"release": "a"}} for key in ("prometheusRule", "serviceMonitor")},
    }
    rule = render_one("PrometheusRule", values)
    ours = (ROOT / "deploy" / "alerts.yml").read_text()
    assert rule["spec"] == yaml.safe_load(ours.replace("samewise:", f"{prefix}:"))
    assert rule["metadata"]["labels"]["release"] == "a"
    (endpoint,) = render_one("ServiceMonitor", {**values, "nameOverride": "b"})["spec"]["endpoints"]
    (label,) = endpoint["relabelings"]
    assert label["targetLabel"] == "job"
    assert all(re.fullmatch(job, label["replacement"]) for job in re.findall(r'job=~?"(.*?)"', ours))


def batch_hours() -> int:
    (window,) = get_args(CreateBatch.model_fields["completion_window"].annotation)
    return int(window.removesuffix("h"))


def test_clients_stay_with_the_replica_that_has_their_files() -> None:
    values = read_values(CHART / "ci" / "tenants-values.yaml")
    service = next(one for one in render(values) if one["kind"] == "Service")["spec"]
    assert service["sessionAffinity"] == "ClientIP"
    assert service["sessionAffinityConfig"]["clientIP"]["timeoutSeconds"] == batch_hours() * 3600
    hashed = render_one("Ingress", values)["metadata"]["annotations"]["nginx.ingress.kubernetes.io/upstream-hash-by"]
    assert hashed == "$http_authorization$http_x_api_key"
    for header in ("authorization", "x-api-key"):
        assert key_in(Headers({header: "Bearer a" if header == "authorization" else "a"})) == "a"
    assert "sessionAffinityConfig" not in render_one("Service")["spec"]


def test_another_prefix_of_metrics_is_everybody_s() -> None:
    settings = {"metrics_prefix": "vllm"}
    assert render_pod({"settings": settings})["metadata"]["labels"]["llm-d.ai/engine-type"] == "vllm"
    queries = render_one("ScaledObject", {"settings": settings, "autoscaling": KEDA})["spec"]["triggers"]
    assert all(one["metadata"]["query"].startswith("sum(vllm:num_requests_") for one in queries)
    asked = render_one("HorizontalPodAutoscaler", {"settings": settings, "autoscaling": {"type": "hpa"}})["spec"][
        "metrics"
    ]
    assert all(one["pods"]["metric"]["name"].startswith("vllm_num_requests_") for one in asked)
