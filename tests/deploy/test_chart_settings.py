"""The server reads the settings that the chart's values contain."""

import base64
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import HelmError

from server.config import OTHER_VARIABLES, Settings, load_settings
from server.setting_errors import PREFIX
from server.tenants.keys import KeyRing
from tests.cli.test_settings import EXAMPLES as EXAMPLES_OF_FLAGS
from tests.deploy.chart import (
    CHART,
    VALUES_FILES,
    container_of,
    read_values,
    render,
    render_one,
    render_pod,
    variables_of,
)
from tests.deploy.test_docker import image_environment

EXAMPLES = {**EXAMPLES_OF_FLAGS, "host": ("::", "::"), "lenient": ("false", False)}
"""Pods may only listen on all addresses, and strict and lenient exclude each other."""
OWN = {
    *("port", "api_key", "api_keys_file", "redis_url", "data_dir", "kv_events", "kv_events_replay", "kv_events_topic"),
    *("hub_token", "ssl_certfile", "ssl_keyfile", "ssl_keyfile_password"),
}
"""Settings that the chart sets from other values, secrets, and HTTPS, which ends at the Ingress."""
VARIABLES = {"host"}
"""Settings that reach the server as variables."""
GIVEN = sorted(EXAMPLES.keys() - OWN)
EVENTS = {"kvEvents": {"enabled": True}, "settings": {"served_model_name": "a"}}
KEYS = [
    {"name": "research", "key": ["sk-one", "sk-two"], "weight": 3, "tokens_per_day": 20_000_000},
    {"name": "nightly", "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08", "priority": 10},
]


def example(name: str) -> Any:
    value = EXAMPLES[name][1]
    return list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value


def settings_file(values: dict[str, Any]) -> dict[str, Any]:
    return yaml.safe_load(render_one("ConfigMap", values)["data"]["settings.yaml"])


def read_by_the_server(values: dict[str, Any], folder: Path) -> Settings:
    file = folder / "settings.yaml"
    file.write_text(render_one("ConfigMap", values)["data"]["settings.yaml"])
    return load_settings({}, file)


def put(folder: Path, secret: dict[str, Any], version: str) -> Path:
    """As a kubelet does: the content in a folder of its own, to which a link is turned at once."""
    (folder / version).mkdir()
    (folder / version / "keys").write_bytes(base64.b64decode(secret["data"]["keys"]))
    (folder / "next").symlink_to(version)
    (folder / "next").replace(folder / "..data")
    file = folder / "keys"
    if not file.is_symlink():
        file.symlink_to("..data/keys")
    return file


@pytest.mark.parametrize("left_out", ["prefix_caching", "state_snapshot_every"])
def test_every_setting_arrives_as_it_was_given(left_out: str, tmp_path: Path) -> None:
    """The two that are left out exclude each other."""
    given = sorted(set(GIVEN) - {left_out})
    values = {"settings": {name: example(name) for name in given}, "apiKeys": {"keys": KEYS}}
    settings = read_by_the_server(values, tmp_path)
    for name in sorted(set(given) - VARIABLES):
        assert getattr(settings, name) == EXAMPLES[name][1], name


@pytest.mark.parametrize(("values", "host"), [({}, "0.0.0.0"), ({"settings": {"host": "::"}}, "::")])
def test_pods_listen_on_all_addresses_whatever_the_image_says(values: dict[str, Any], host: str) -> None:
    assert variables_of(render_pod(values))["SAMEWISE_HOST"] == host
    assert "host" not in settings_file(values)


@pytest.mark.parametrize("number", [8_388_608, 50_000_000, 3_000_000_000])
def test_large_numbers_stay_integers(number: int, tmp_path: Path) -> None:
    assert read_by_the_server({"settings": {"max_batch_lines": number}}, tmp_path).max_batch_lines == number


def test_lists_may_be_one_text(tmp_path: Path) -> None:
    assert read_by_the_server({"settings": {"served_model_name": "a,b"}}, tmp_path).served_model_name == ("a", "b")


@pytest.mark.parametrize("name", GIVEN)
def test_a_wrong_type_is_refused_before_it_is_installed(name: str) -> None:
    with pytest.raises(HelmError, match=f"/settings/{name}"):
        render({"settings": {name: {}}, "apiKeys": {"keys": KEYS}})


@pytest.mark.parametrize("name", sorted(OWN & Settings.model_fields.keys()))
def test_what_the_chart_sets_is_not_set_beside_it(name: str) -> None:
    with pytest.raises(HelmError, match=f"additional properties '{name}' not allowed"):
        render({"settings": {name: EXAMPLES.get(name, ("x", "x"))[0]}})


@pytest.mark.parametrize(
    ("values", "hosts"),
    [
        ({}, []),
        ({"ingress": {"enabled": True, "host": "llm.example.com"}}, ["llm.example.com"]),
        ({"httpRoute": {"enabled": True, "parentRefs": [{"name": "a"}]}}, ["*"]),
        (
            {"httpRoute": {"enabled": True, "parentRefs": [{"name": "a"}], "hostnames": ["*.example.com"]}},
            ["*.example.com"],
        ),
    ],
)
def test_without_keys_the_server_may_be_asked_by_the_names_that_lead_to_it(
    values: dict[str, Any], hosts: list[str], tmp_path: Path
) -> None:
    service = render_one("Service", values)["metadata"]
    names = [f"{service['name']}.{service['namespace']}", f"*.{service['namespace']}.svc"]
    assert list(read_by_the_server(values, tmp_path).allowed_hosts) == [*names, *hosts]
    given = {**values, "settings": {"allowed_hosts": ["a.example.com"]}}
    assert read_by_the_server(given, tmp_path).allowed_hosts == ("a.example.com",)
    assert read_by_the_server({**values, "apiKeys": {"keys": KEYS}}, tmp_path).allowed_hosts == ()


def test_no_secret_goes_into_a_config_map() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["settings"]["properties"]
    secret = {name for name, field in Settings.model_fields.items() if "SecretStr" in str(field.annotation)}
    assert secret >= {"api_key", "redis_url"}
    assert secret.isdisjoint(schema)


def test_the_server_s_defaults_that_the_chart_relies_on() -> None:
    settings = Settings()
    assert settings_file({})["port"] == settings.port
    assert settings_file({})["drain_grace_s"] == settings.drain_grace_s


def test_a_gpu_is_used_or_the_server_ends(tmp_path: Path) -> None:
    assert read_by_the_server({"gpu": {"enabled": True}}, tmp_path).device == "cuda"


@pytest.mark.parametrize(
    "values", [read_values(file) for file in VALUES_FILES], ids=[file.stem for file in VALUES_FILES]
)
def test_the_server_takes_the_settings_of_each_values_file(values: dict[str, Any], tmp_path: Path) -> None:
    read_by_the_server(values, tmp_path)
    assert not set(_ours(variables_of(render_pod(values)))) & {PREFIX + name.upper() for name in settings_file(values)}


def test_variables_are_settings() -> None:
    values = {**EVENTS, "apiKeys": {"keys": KEYS}}
    variables = variables_of(render_pod({**values, "redis": {"existingSecret": "redis"}}))
    assert set(_ours(variables)) - OTHER_VARIABLES <= {PREFIX + name.upper() for name in Settings.model_fields}


def test_keys_are_the_server_s_and_change_with_the_secret(tmp_path: Path) -> None:
    file = put(tmp_path, render_one("Secret", {"apiKeys": {"keys": KEYS}}), "..1")
    now = [0.0]
    ring = KeyRing(Settings(api_keys_file=file), clock=lambda: now[0])
    tenant = ring.tenant_of("sk-two")
    assert tenant is not None
    assert (tenant.name, tenant.weight, tenant.limits.tokens_per_day) == ("research", 3, 20_000_000)
    assert ring.tenant_of("test") is not None  # by its hash

    put(tmp_path, render_one("Secret", {"apiKeys": {"keys": [{"name": "other", "key": "sk-three"}]}}), "..2")
    now[0] = 10.0
    assert ring.tenant_of("sk-two") is None
    assert ring.tenant_of("sk-three") is not None


def test_keys_are_mounted_where_the_server_looks_for_them() -> None:
    for values, name, key in (
        ({"keys": KEYS}, "samewise-api-keys", "keys"),
        ({"existingSecret": "mine", "secretKey": "file"}, "mine", "file"),
    ):
        pod = render_pod({"apiKeys": values})
        (mount,) = (one for one in container_of(pod)["volumeMounts"] if one["name"] == "keys")
        (volume,) = (one for one in pod["spec"]["volumes"] if one["name"] == "keys")
        assert volume["secret"]["secretName"] == name
        assert volume["secret"]["items"] == [{"key": key, "path": "keys"}]
        assert settings_file({"apiKeys": values})["api_keys_file"] == f"{mount['mountPath']}/keys"
        assert "subPath" not in mount
        assert volume["secret"]["defaultMode"] & 0o040, "the group of the pod reads it"


def test_a_change_of_settings_replaces_the_pods_and_one_of_keys_does_not() -> None:
    def pod(**values: Any) -> dict[str, Any]:
        return render_pod({"apiKeys": {"keys": KEYS}, **values})

    assert pod() != pod(settings={"max_waiting": 3})
    assert pod() == pod(apiKeys={"keys": KEYS[:1]})


def test_folders_in_the_settings_are_mounted() -> None:
    values = {"data": {"enabled": True}}
    mounts = {one["mountPath"] for one in container_of(render_pod(values))["volumeMounts"]}
    assert settings_file(values)["data_dir"] in mounts
    variables = {**image_environment(), **variables_of(render_pod(values))}
    folders = [variables[name] for name in ("SAMEWISE_CACHE", "HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")]
    assert [folder for folder in folders if not any(Path(folder).is_relative_to(mount) for mount in mounts)] == []
    assert os.path.dirname(variables["SAMEWISE_CONFIG"]) in mounts  # noqa: PTH120


def _ours(variables: Iterable[str]) -> list[str]:
    return [name for name in variables if name.startswith(PREFIX)]
