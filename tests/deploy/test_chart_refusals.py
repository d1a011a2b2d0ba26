"""Values by which the chart and the server would be at odds are refused with a reason."""

from typing import Any

import pytest
from helm_python import HelmError

from server.config import OTHER_VARIABLES, Settings, load_settings
from server.setting_errors import PREFIX
from tests.deploy.chart import CHART, read_values, render, render_pod, variables_of
from tests.deploy.test_chart_settings import EVENTS, GIVEN, KEYS

INSTEAD = {
    "config": "settings",
    "cache": "cache",
    "port": "service.port",
    "api_keys_file": "apiKeys",
    "redis_url": "redis",
    "data_dir": "data",
    "kv_events": "kvEvents",
    "kv_events_replay": "kvEvents.replayPort",
    "kv_events_topic": "settings.served_model_name",
    **dict.fromkeys(("ssl_certfile", "ssl_keyfile", "ssl_keyfile_password"), "ingress.tlsSecret"),
    **{name: f"settings.{name}" for name in (*GIVEN, "models", "memory_gib", "load_timeout_s")},
}
"""The value to set instead of a variable, by setting."""
SEVERAL: dict[str, Any] = {"settings": {"models": [{"name": "a"}, {"name": "b"}], "memory_gib": 4}}
"""Two models that do not fit into the chart's own limit, with what the server needs itself."""
BY_VARIABLE = {"extraEnv": [{"name": "SAMEWISE_API_KEY", "value": "x"}]}
POOL = {"enabled": True, "endpointPicker": {"name": "picker"}}


def refusal(values: dict[str, Any]) -> str:
    with pytest.raises(HelmError) as refused:
        render(values)
    return str(refused.value)


def events(**values: Any) -> dict[str, Any]:
    """Events of the cache, with other values merged one level deep."""
    return {**EVENTS, **values, **{key: {**EVENTS[key], **values.get(key, {})} for key in EVENTS}}


def scaled(running: int | None, type_: str = "hpa", **values: Any) -> dict[str, Any]:
    return {"autoscaling": {"type": type_, "runningPerReplica": running}, **values}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"settings": {"isolate_keys": True}}, "settings.isolate_keys needs apiKeys"),
        ({"gpu": {"enabled": True}, "settings": {"device": "cpu"}}, "gpu.enabled sets settings.device to cuda"),
        ({"settings": {"host": "127.0.0.1"}}, "settings.host: pods are reached at their own addresses"),
        ({"settings": {"otlp_traces_endpoint": "collector:4318"}}, "is not a collector's URL"),
        ({"kvEvents": {"enabled": True}}, "set settings.served_model_name"),
        (events(settings={"prefix_caching": False}), "kvEvents needs settings.prefix_caching"),
        (events(settings={"isolate_keys": True}, apiKeys={"keys": KEYS}), "kvEvents is useless"),
        (events(networkPolicy={"enabled": True}), "networkPolicy.kvEventsFrom is needed with kvEvents"),
        (
            events(networkPolicy={"enabled": True, "from": [{"podSelector": {}}]}),
            "networkPolicy.kvEventsFrom is needed with kvEvents",
        ),
        (events(kvEvents={"port": 8000}), "8000, the API's port"),
        (events(kvEvents={"replayPort": 8000}), "8000, the API's port"),
        (events(kvEvents={"port": 5558}), "kvEvents.port and kvEvents.replayPort must differ"),
        (events(extraEnv=[{"name": "POD_IP", "value": "x"}]), "POD_IP is reserved for the pod's address"),
        ({"apiKeys": {"keys": KEYS}, "serviceMonitor": {"enabled": True}}, "serviceMonitor.existingSecret is needed"),
        ({**BY_VARIABLE, "serviceMonitor": {"enabled": True}}, "serviceMonitor.existingSecret is needed"),
        ({**BY_VARIABLE, "inferencePool": POOL}, "endpoint pickers have no key for /metrics"),
        ({**SEVERAL, "kvEvents": {"enabled": True}}, "kvEvents: the events of a server with settings.models are not"),
        ({**SEVERAL, "inferencePool": POOL}, "inferencePool: a pool serves one model"),
        (scaled(9, settings=SEVERAL["settings"]), "the load of all models is added up; use keda with autoscaling.keda"),
        ({**SEVERAL, "resources": {"limits": {"memory": "4500M"}}}, "do not fit into resources.limits.memory (4500M)"),
        ({"settings": {"models": [{"name": "a", "port": 1}]}}, "additional properties 'port' not allowed"),
        ({"serviceMonitor": {"labels": {"helm.sh/chart": "a"}}}, "serviceMonitor.labels: helm.sh/chart"),
        ({"prometheusRule": {"labels": {"helm.sh/chart": "a"}}}, "prometheusRule.labels: helm.sh/chart"),
    ],
)
def test_what_would_be_at_odds_is_refused_with_a_reason(values: dict[str, Any], message: str) -> None:
    assert message in refusal(values)


@pytest.mark.parametrize("limit", ["4608Mi", "5Gi", "4.9G", None])
def test_models_that_fit_are_allowed(limit: str | None) -> None:
    assert "do not fit into resources.limits.memory (4Gi)" in refusal(SEVERAL)
    render({**SEVERAL, "resources": {"limits": {"memory": limit}}})


@pytest.mark.parametrize("prefix", ["", "_x", "my_", "a" * 64, "1a", "a-b", "a.b"])
def test_a_prefix_of_metrics_that_is_no_label_is_refused(prefix: str) -> None:
    assert f'settings.metrics_prefix: "{prefix}" must also be valid as a pod label' in refusal(
        {"settings": {"metrics_prefix": prefix}}
    )


@pytest.mark.parametrize("prefix", ["a", "A_1", "a" * 63])
def test_a_prefix_of_metrics_that_is_a_label_is_one(prefix: str) -> None:
    labels = render_pod({"settings": {"metrics_prefix": prefix}})["metadata"]["labels"]
    assert labels["llm-d.ai/engine-type"] == Settings(metrics_prefix=prefix).metrics_prefix


@pytest.mark.parametrize("name", sorted({*Settings.model_fields, "config", "cache"} - {"api_key", "hub_token"}))
def test_a_setting_is_no_variable_and_the_refusal_says_where_it_stands(name: str) -> None:
    refused = refusal({"extraEnv": [{"name": f"{PREFIX}{name.upper()}", "value": "x"}]})
    assert refused.endswith(f"set {INSTEAD[name]} instead")
    value = INSTEAD[name].split(".")
    assert value[0] == "settings" or value[0] in read_values(CHART / "values.yaml")


def test_capitals_matter_to_a_variable_as_little_as_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("samewise_max_waiting", "3")
    assert load_settings({}).max_waiting == 3
    refused = refusal({"extraEnv": [{"name": "samewise_max_waiting", "value": "3"}]})
    assert refused.endswith("set settings.max_waiting instead")


def test_the_server_has_no_variables_but_these() -> None:
    assert {PREFIX + name.upper() for name in ("config", "cache", "kernels")} == OTHER_VARIABLES


@pytest.mark.parametrize("name", ["SAMEWISE_API_KEY", "SAMEWISE_HUB_TOKEN"])
def test_a_secret_may_be_a_variable_so_that_it_comes_from_a_secret(name: str) -> None:
    secret = {"name": name, "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}
    assert variables_of(render_pod({"extraEnv": [secret]}))[name] == secret["valueFrom"]


def test_labels_of_the_chart_are_not_given_again() -> None:
    for name in render_pod()["metadata"]["labels"]:
        assert f"podLabels: {name} is set by the chart" in refusal({"podLabels": {name: "x"}})


@pytest.mark.parametrize(
    ("values", "at_most"),
    [
        (scaled(64), 64),
        (scaled(64, "keda"), 64),
        (scaled(256, gpu={"enabled": True}), 256),
        (scaled(256, settings={"device": "cuda"}), 256),
        (scaled(48, settings={"max_num_seqs": 32}), 32),
        (scaled(32, settings={"max_num_seqs": 32}, gpu={"enabled": True}), 32),
    ],
)
def test_a_load_that_no_replica_reaches_is_refused(values: dict[str, Any], at_most: int) -> None:
    values["autoscaling"].setdefault("keda", {"prometheusAddress": "http://a"})
    assert f"a replica runs at most {at_most} choices" in refusal(values)
    values["autoscaling"]["runningPerReplica"] = at_most - 1
    render(values)
    values["autoscaling"]["runningPerReplica"] = None
    render(values)


def test_the_server_s_own_limits_are_those_of_the_chart() -> None:
    described = Settings.model_fields["max_num_seqs"].description
    assert described is not None
    assert "By default 64 on CPU and 256 on CUDA" in described
