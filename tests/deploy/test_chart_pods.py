"""How the chart's pods start, run and end."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.setting_errors import PREFIX
from tests.deploy.chart import ROOT, container_of, render, render_one, render_pod, variables_of
from tests.deploy.test_docker import RUNTIME, image_environment

PAGE = (ROOT / "docs" / "how-to" / "kubernetes.md").read_text()


def drain(seconds: float, **values: Any) -> dict[str, Any]:
    return {"settings": {"drain_grace_s": seconds}, **values}


def all_containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod["spec"]["containers"], *pod["spec"]["initContainers"]]


@pytest.mark.parametrize("probe", ["startup", "readiness", "liveness"])
def test_probes_are_those_of_the_page(probe: str) -> None:
    path, period = re.search(rf"^\| {probe} \| `(/\w+)` \| (\d+) s \|", PAGE, re.MULTILINE).groups()  # type: ignore[union-attr]
    found = container_of(render_pod())[f"{probe}Probe"]
    assert found["httpGet"] == {"path": path, "port": "http"}
    assert found["periodSeconds"] == int(period)


@pytest.mark.parametrize("seconds", [1, 5, 599, 600, 1801])
def test_a_start_has_the_time_that_it_was_given(seconds: int) -> None:
    probe = container_of(render_pod({"startupTimeoutSeconds": seconds}))["startupProbe"]
    assert 0 <= probe["failureThreshold"] * probe["periodSeconds"] - seconds < probe["periodSeconds"]


@settings(max_examples=25)
@given(st.floats(0, 7200, allow_nan=False), st.integers(0, 300))
def test_the_grace_period_outlasts_the_drain(drain_grace_s: float, pre_stop_s: int) -> None:
    pod = render_pod(drain(drain_grace_s, preStopSeconds=pre_stop_s))
    spare = pod["spec"]["terminationGracePeriodSeconds"] - pre_stop_s - drain_grace_s
    assert 10 <= spare <= 11
    hook = container_of(pod).get("lifecycle", {"preStop": {"exec": {"command": ["sleep", "0"]}}})
    assert hook["preStop"]["exec"]["command"] == ["sleep", str(pre_stop_s)]


def test_the_page_s_example_of_the_grace_period() -> None:
    period = render_pod()["spec"]["terminationGracePeriodSeconds"]
    assert f"({period} s by default)" in PAGE


def test_pods_have_no_rights_that_they_do_not_need() -> None:
    pod = render_pod()
    (user,) = re.findall(r"^USER (\d+)$", RUNTIME, re.MULTILINE)
    assert pod["spec"]["securityContext"] == {
        "runAsNonRoot": True,
        **dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), int(user)),
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert pod["spec"]["automountServiceAccountToken"] is False
    for container in all_containers(pod):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_a_service_of_this_name_sets_no_port() -> None:
    assert render_pod()["spec"]["enableServiceLinks"] is False


def test_requests_reach_the_port_that_the_image_exposes() -> None:
    (port,) = re.findall(r"^EXPOSE (\d+)$", RUNTIME, re.MULTILINE)
    ports = {one["name"]: one["containerPort"] for one in container_of(render_pod())["ports"]}
    assert ports == {"http": int(port)}
    assert render_one("Service")["spec"]["ports"][0]["targetPort"] == "http"


def test_a_gpu_is_asked_for_beside_the_other_limits() -> None:
    limits = container_of(render_pod({"gpu": {"enabled": True}}))["resources"]["limits"]
    assert limits == {"cpu": "4", "memory": "4Gi", "nvidia.com/gpu": 1}
    other = container_of(render_pod({"gpu": {"enabled": True, "resource": "nvidia.com/mig-1g.10gb"}}))
    assert other["resources"]["limits"]["nvidia.com/mig-1g.10gb"] == 1


def test_each_replica_has_its_own_data_folder() -> None:
    values = {"replicas": 2, "data": {"enabled": True, "size": "7Gi"}, "cache": {"persistent": True}}
    workload = render_one("StatefulSet", values)["spec"]
    claims = {one["metadata"]["name"]: one["spec"] for one in workload["volumeClaimTemplates"]}
    assert claims.keys() == {"data", "cache"}
    assert claims["data"]["resources"]["requests"]["storage"] == "7Gi"
    services = {one["metadata"]["name"]: one["spec"] for one in render(values) if one["kind"] == "Service"}
    assert services[workload["serviceName"]]["clusterIP"] == "None"
    assert services["samewise"]["sessionAffinity"] == "ClientIP"
    assert not [one for one in render(values) if one["kind"] == "PersistentVolumeClaim"]


def test_one_replica_with_a_claim_of_its_own_is_stopped_before_the_next_starts() -> None:
    assert render_one("Deployment", {"cache": {"persistent": True}})["spec"]["strategy"] == {"type": "Recreate"}
    shared = {"persistent": True, "accessModes": ["ReadWriteMany"]}
    assert "strategy" not in render_one("Deployment", {"cache": shared})["spec"]
    assert "strategy" not in render_one("Deployment")["spec"]


def test_pods_are_spread_among_their_like() -> None:
    constraint = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
    other = {**constraint, "labelSelector": {"matchLabels": {"a": "b"}}}
    workload = render_one("Deployment", {"topologySpreadConstraints": [constraint, other]})["spec"]
    spread = workload["template"]["spec"]["topologySpreadConstraints"]
    assert spread[0] == {**constraint, "labelSelector": workload["selector"]}
    assert spread[1] == other


def test_the_cache_has_what_the_image_brings_and_keeps_what_is_there(tmp_path: Path) -> None:
    image, volume = tmp_path / "image", tmp_path / "volume"
    (image / "model-1").mkdir(parents=True)
    (image / "hashes").mkdir()
    for name in ("model-1/config.json", "kernels-1.so", "hashes/a"):
        (image / name).write_text("the image's")
    link_cache(image, volume)
    assert {file.name: file.is_symlink() for file in volume.iterdir()} == {
        "model-1": True,
        "kernels-1.so": True,
        "hashes": False,
    }
    assert (volume / "model-1" / "config.json").read_text() == (volume / "hashes" / "a").read_text() == "the image's"

    (volume / "converted-2").mkdir()
    (volume / "hashes" / "b").write_text("the volume's")
    (image / "kernels-2.so").write_text("the next image's")
    (image / "hashes" / "b").write_text("the next image's")
    link_cache(image, volume)
    assert (volume / "kernels-2.so").read_text() == "the next image's"
    assert (volume / "hashes" / "b").read_text() == "the volume's"
    assert sorted(path.name for path in (volume / "hashes").iterdir()) == ["a", "b"]


def test_the_cache_is_made_where_the_image_remembers_nothing(tmp_path: Path) -> None:
    (tmp_path / "image").mkdir()
    link_cache(tmp_path / "image", tmp_path / "volume")
    assert [path.name for path in (tmp_path / "volume").rglob("*")] == ["hashes"]


def link_cache(image: Path, volume: Path) -> None:
    """Runs what the chart's init container runs, on other folders."""
    pod = render_pod()
    (container,) = pod["spec"]["initContainers"]
    assert "env" not in container, "SAMEWISE_CACHE is the image's own there"
    assert image_environment()[f"{PREFIX}CACHE"] != variables_of(pod)[f"{PREFIX}CACHE"]
    *shell, script = container["command"]
    script = script.replace(variables_of(pod)[f"{PREFIX}CACHE"], str(volume))
    subprocess.run([*shell, script], check=True, env={**os.environ, f"{PREFIX}CACHE": str(image)})
