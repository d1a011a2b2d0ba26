"""The Helm chart: every combination of values renders what clusters take, or is refused with a reason."""

import json
import re
import tomllib
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helm_python import HelmError, lint
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.deploy.chart import CHART, ROOT, VALUES_FILES, Manifest, check, read_values, render, render_files, render_one

META = yaml.safe_load((CHART / "Chart.yaml").read_text())
OLDEST = META["kubeVersion"].removeprefix(">=").removesuffix("-0")
NEWEST = kubernetes_validate.latest_version()
KEYS = [{"name": "research", "key": "sk-one"}]
OPTIONS: dict[str, dict[str, Any]] = {
    "replicas": {"replicas": 3},
    "gpu": {"gpu": {"enabled": True}, "runtimeClassName": "nvidia"},
    "own keys": {"apiKeys": {"keys": KEYS}},
    "shared limits": {"apiKeys": {"keys": KEYS}, "redis": {"existingSecret": "redis"}},
    "shared cache": {"cache": {"persistent": True, "accessModes": ["ReadWriteMany"], "storageClassName": "nfs"}},
    "data": {"data": {"enabled": True}},
    "budget": {"podDisruptionBudget": {"enabled": True, "maxUnavailable": "30%"}},
    "policy": {
        "networkPolicy": {
            "enabled": True,
            "from": [{"podSelector": {}}],
            "kvEventsFrom": [{"podSelector": {}}],
            "extraEgress": [{"ports": [{"port": 4317}]}],
        }
    },
    "monitor": {"serviceMonitor": {"enabled": True, "existingSecret": "scraper"}},
    "alerts": {"prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}}},
    "traces": {"settings": {"otlp_traces_endpoint": "http://collector:4318"}},
    "events": {"settings": {"served_model_name": "a,b"}, "kvEvents": {"enabled": True}},
    "pool": {
        "settings": {"open_metrics": True},
        "inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}},
    },
    "ingress": {"ingress": {"enabled": True, "host": "llm.example.com"}},
    "route": {"httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}]}},
    "pull secret": {"imagePullSecrets": [{"name": "registry"}], "image": {"digest": f"sha256:{'0' * 64}"}},
    "extras": {
        "extraEnv": [{"name": "HF_TOKEN", "value": "x"}],
        "extraVolumes": [{"name": "models", "hostPath": {"path": "/models"}}],
        "extraVolumeMounts": [{"name": "models", "mountPath": "/models"}],
        "podAnnotations": {"a": "b"},
        "nodeSelector": {"a": "b"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "minDomains": 2}
        ],
        "priorityClassName": "high",
        "serviceAccountName": "samewise",
    },
}
"""Any of these go together."""


def together(names: set[str]) -> dict[str, Any]:
    """The values of several options."""
    merged: dict[str, Any] = {}
    for name in names:
        for key, value in OPTIONS[name].items():
            merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) else value
    return merged


def mounts_of(pod: Manifest) -> set[str]:
    containers = [*pod["spec"]["containers"], *pod["spec"]["initContainers"]]
    return {mount["name"] for container in containers for mount in container["volumeMounts"]}


@pytest.mark.parametrize("file", VALUES_FILES, ids=lambda file: file.stem)
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_values_files_render_what_clusters_take(file: Any, version: str) -> None:
    for manifest in render(read_values(file)):
        check(manifest, version)


@pytest.mark.parametrize("file", VALUES_FILES, ids=lambda file: file.stem)
def test_helm_lint_finds_nothing(file: Any) -> None:
    report = lint(CHART, read_values(file), strict=True)
    assert [one for one in report["messages"] if one["error"] != "icon is recommended"] == []


@settings(max_examples=15)
@given(st.sets(st.sampled_from(sorted(OPTIONS))))
def test_combinations_render_what_clusters_take(names: set[str]) -> None:
    manifests = render(together(names))
    for manifest in manifests:
        check(manifest, NEWEST)
    assert len({(one["kind"], one["metadata"]["name"]) for one in manifests}) == len(manifests)
    workload = next(one for one in manifests if one["kind"] in ("Deployment", "StatefulSet"))
    claims = {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])}
    pod = workload["spec"]["template"]
    assert mounts_of(pod) == {volume["name"] for volume in pod["spec"]["volumes"]} | claims


def test_what_a_cluster_would_refuse_is_noticed() -> None:
    manifest = render_one("Deployment")
    manifest["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        check(manifest, NEWEST)
    scaled = render_one("ScaledObject", {"autoscaling": {"type": "keda", "keda": {"prometheusAddress": "http://a"}}})
    scaled["spec"]["triggers"][0]["metadata"]["threshold"] = 4
    with pytest.raises(Exception, match="4 is not of type 'string'"):
        check(scaled, NEWEST)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"setings": {}}, "additional properties 'setings' not allowed"),
        ({"settings": {"max_num_seq": 3}}, "additional properties 'max_num_seq' not allowed"),
        ({"settings": {"max_num_seqs": "many"}}, "'/settings/max_num_seqs': got string, want integer"),
        ({"settings": {"max_num_seqs": 0}}, "'/settings/max_num_seqs': minimum: got 0, want 1"),
        ({"settings": {"policy": "fairest"}}, "'/settings/policy': value must be one of 'fcfs'"),
        ({"settings": {"port": 80}}, "additional properties 'port' not allowed"),
        ({"settings": {"drain_grace_s": None}}, "missing property 'drain_grace_s'"),
        ({"replicas": "2"}, "'/replicas': got string, want null or integer"),
        ({"cache": {"persistant": True}}, "additional properties 'persistant' not allowed"),
        ({"autoscaling": {"type": "vpa"}}, "value must be one of 'none', 'hpa', 'keda'"),
        ({"replicas": 2, "cache": {"persistent": True}}, "cache.accessModes needs ReadWriteMany"),
        ({"autoscaling": {"type": "hpa"}, "cache": {"persistent": True}}, "cache.accessModes needs ReadWriteMany"),
        ({"replicas": 2, "cache": {"persistent": True, "existingClaim": "a"}}, "cache.accessModes needs ReadWriteMany"),
        ({"cache": {"existingClaim": "a"}}, "cache.existingClaim needs cache.persistent"),
        ({"data": {"existingClaim": "a"}}, "data.existingClaim needs data.enabled"),
        (
            {"replicas": 2, "data": {"enabled": True, "existingClaim": "a"}},
            "several replicas cannot share a data folder",
        ),
        ({"replicas": 2, "autoscaling": {"type": "hpa"}}, "replicas: leave it out"),
        ({"replicas": 0, "autoscaling": {"type": "hpa"}}, "replicas: leave it out"),
        ({"autoscaling": {"type": "hpa", "minReplicas": 9}}, "minReplicas must not exceed autoscaling.maxReplicas"),
        (
            {"autoscaling": {"waitingPerReplica": None, "runningPerReplica": None}},
            "waitingPerReplica, runningPerReplica",
        ),
        ({"autoscaling": {"type": "keda"}}, "autoscaling.keda.prometheusAddress is needed"),
        ({"apiKeys": {"keys": KEYS, "existingSecret": "a"}}, "existingSecret or keys, not both"),
        ({"apiKeys": {"keys": [{"key": "a"}]}}, "'/apiKeys/keys/0': missing property 'name'"),
        ({"apiKeys": {"keys": [{"name": "a", "tokens_per_hour": 1}]}}, "properties 'tokens_per_hour' not allowed"),
        (
            {"data": {"enabled": True}, "autoscaling": {"type": "hpa"}},
            "autoscaling would remove replicas and lose the files",
        ),
        ({"redis": {"existingSecret": "a"}}, "redis: shared limits need apiKeys"),
        ({"inferencePool": {"enabled": True}}, "inferencePool.endpointPicker.name is needed"),
        ({"ingress": {"enabled": True}}, "ingress.host is needed"),
        ({"httpRoute": {"enabled": True}}, "httpRoute.parentRefs is needed"),
    ],
)
def test_what_does_not_go_is_refused_with_a_reason(values: dict[str, Any], message: str) -> None:
    with pytest.raises(HelmError) as refusal:
        render(values)
    assert message in str(refusal.value)


def every_value(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of each value of the chart, objects included."""
    for name, value in values.items():
        yield (*path, name)
        if isinstance(value, dict) and name != "resources":
            yield from every_value(value, (*path, name))


@pytest.mark.parametrize("path", [*every_value(read_values(CHART / "values.yaml"))], ids=".".join)
def test_null_is_refused_by_name_or_means_none(path: tuple[str, ...]) -> None:
    values: Any = None
    for name in reversed(path):
        values = {name: values}
    try:
        manifests = render(values)
    except HelmError as refusal:
        assert f"missing property '{path[-1]}'" in str(refusal)  # noqa: PT017
    else:
        assert "<no value>" not in (text := yaml.safe_dump(manifests))
        assert "<nil>" not in text


@pytest.mark.parametrize("name", ["123", "1e3", "true", "null", "0x1f"])
def test_names_that_yaml_takes_for_something_else_stay_names(name: str) -> None:
    values = together(set(OPTIONS)) | {
        "fullnameOverride": name,
        "nameOverride": name,
        "apiKeys": {"existingSecret": name, "secretKey": name},
        "redis": {"existingSecret": name, "secretKey": name},
        "cache": {"persistent": True, "existingClaim": name},
        "inferencePool": {"enabled": True, "endpointPicker": {"name": name}},
        "ingress": {"enabled": True, "host": name, "className": name, "tlsSecret": name},
        **dict.fromkeys(("serviceAccountName", "priorityClassName", "runtimeClassName"), name),
    }
    for manifest in render(values, name, namespace=name):
        check(manifest, NEWEST)


@pytest.mark.parametrize("name", ["s", "r" * 53, f"{'r' * 49}-xyz"])
def test_names_are_short_enough(name: str) -> None:
    for manifest in render(together(set(OPTIONS)), name):
        found = manifest["metadata"]["name"]
        assert len(found) <= (52 if manifest["kind"] == "StatefulSet" else 63)
        assert not found.endswith("-")
        assert all(len(value) <= 63 for value in manifest["metadata"]["labels"].values())


def test_two_releases_in_a_namespace_do_not_meet() -> None:
    names = [{(one["kind"], one["metadata"]["name"]) for one in render(together(set(OPTIONS)), name)} for name in "ab"]
    assert names[0].isdisjoint(names[1])


def test_every_value_has_a_type_a_default_and_a_use() -> None:
    used = {name for file in (CHART / "templates").iterdir() for name in re.findall(r"\.(\w+)", file.read_text())}

    def compare(schema: dict[str, Any], defaults: dict[str, Any], path: str) -> None:
        assert schema["properties"].keys() - {"global"} == defaults.keys(), path
        assert schema["additionalProperties"] is False, path
        for name, default in defaults.items():
            assert name in used, f"{path}/{name}"
            if "properties" in schema["properties"][name] and name not in ("settings", "resources"):
                compare(schema["properties"][name], default, f"{path}/{name}")

    compare(json.loads((CHART / "values.schema.json").read_text()), read_values(CHART / "values.yaml"), "")


def test_the_page_lists_the_values_files() -> None:
    page = (ROOT / "docs" / "how-to" / "kubernetes.md").read_text()
    assert sorted(re.findall(r"^\| `(.*-values\.yaml)` \|", page, re.MULTILINE)) == [file.name for file in VALUES_FILES]


def test_the_version_is_the_package_s() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert META["version"] == META["appVersion"] == project["version"]
    assert META["description"] == project["description"]


def test_the_notes_say_what_is_open_and_what_is_lost() -> None:
    def notes(**values: Any) -> str:
        return render_files(values)["samewise/templates/NOTES.txt"]

    assert "everyone who can reach the server may use it" in notes()
    assert "Authorization: Bearer" in notes(apiKeys={"keys": KEYS})
    assert "everyone" not in notes(apiKeys={"keys": KEYS})
    variable = [{"name": "SAMEWISE_API_KEY", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}]
    assert "Authorization: Bearer" in notes(extraEnv=variable)
    assert "everyone" not in notes(extraEnv=variable)
    events = {"settings": {"served_model_name": "a"}, "kvEvents": {"enabled": True}}
    policy = {"enabled": True, "kvEventsFrom": [{"podSelector": {}}]}
    assert "everyone who can reach port 5557 or 5558 of the pods" in notes(**events)
    assert "Only networkPolicy.kvEventsFrom can reach it, if the cluster" in notes(**events, networkPolicy=policy)
    assert "keep each client on one replica" in notes(replicas=2, data={"enabled": True})
    assert "lost with the pod" in notes(settings={"learn": True})
