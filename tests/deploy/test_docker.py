"""The files for Docker: they fit each other and the code."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import samewise
from server.config import OTHER_VARIABLES, Settings, load_settings
from server.setting_errors import PREFIX

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
COMPOSE = {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / "deploy").glob("compose*.yaml")}
SERVICES = COMPOSE["compose.yaml"]["services"]
COMMENTED_OUT = dict(
    re.findall(r"^ +# (SAMEWISE_\w+): (.+)$", (ROOT / "deploy" / "compose.yaml").read_text(), re.MULTILINE)
)
"""Variables that somebody may want."""
RUNTIME = DOCKERFILE[DOCKERFILE.rindex("\nFROM ") :]
VOLUME = "/var/lib/samewise"


def image_environment() -> dict[str, str]:
    """The variables that the image sets."""
    assignments = [word for line in re.findall(r"^ENV (.*)$", RUNTIME, re.MULTILINE) for word in line.split()]
    return dict(word.split("=", 1) for word in assignments)


def service(file: str) -> dict[str, Any]:
    found: dict[str, Any] = COMPOSE[file]["services"]["samewise"]
    return found


@pytest.mark.parametrize("file", COMPOSE)
def test_variables_are_settings_with_values_that_are_allowed(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {**image_environment(), **service(file)["environment"], **COMMENTED_OUT}
    ours = {name: value for name, value in variables.items() if name.startswith(PREFIX)}
    assert ours.keys() - OTHER_VARIABLES <= {PREFIX + field.upper() for field in Settings.model_fields}
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    load_settings({})


@pytest.mark.parametrize("file", COMPOSE)
def test_build_arguments_are_the_dockerfiles(file: str) -> None:
    build = service(file).get("build", "")
    arguments = {} if isinstance(build, str) else build["args"]
    assert arguments.keys() <= set(re.findall(r"^ARG (\w+)=", DOCKERFILE, re.MULTILINE))


def test_a_volume_holds_what_is_downloaded_and_never_what_the_image_brings() -> None:
    mounts = dict(reversed(volume.split(":")) for volume in service("compose.yaml")["volumes"])
    assert mounts == {VOLUME: "data"}
    used = [name for service in SERVICES.values() for name in service.get("volumes", ())]
    assert {name.partition(":")[0] for name in used if name[0] != "."} == COMPOSE["compose.yaml"]["volumes"].keys()
    folders = {
        name: value for name, value in image_environment().items() if value.startswith("/") and "PATH" not in name
    }
    cache = folders.pop("SAMEWISE_CACHE")
    assert not cache.startswith(VOLUME)
    assert re.search(rf"^COPY --from=build --chown=(\d+):\1 {cache} {cache}$", RUNTIME, re.MULTILINE)
    assert folders.keys() >= {"HF_HOME", "TRITON_CACHE_DIR"}
    assert all(folder.startswith(f"{VOLUME}/") for folder in folders.values())


def test_the_packages_are_where_pip_installs_them() -> None:
    """In both images: Ray's processes import `server` without the script's help."""
    version = re.search(r"^FROM python:(\d+\.\d+)-", DOCKERFILE, re.MULTILINE)[1]  # type: ignore[index]
    found = re.findall(r"PYTHONPATH=(\S+)", DOCKERFILE)
    packages = samewise.PACKAGES.relative_to(samewise.PACKAGES.parents[1])
    assert found == [f"/opt/samewise/venv/lib/python{version}/site-packages/{packages}"] * 2
    copied = {
        source for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE) for source in line.split()
    }
    assert copied >= {"pyproject.toml", "setup.py", "samewise", "server", "scheduler", "model_runner"}
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"!{source}" for source in copied - {"./"} if (ROOT / source).exists()} <= set(ignored)


def test_several_models_fit_into_the_limit_of_their_container() -> None:
    overlay = service("compose.models.yaml")
    (mount,) = overlay["volumes"]
    outside, inside, _ = mount.split(":")
    assert inside == overlay["environment"]["SAMEWISE_CONFIG"]
    settings = load_settings({}, ROOT / "deploy" / outside)
    assert [settings.of_model(entry).model for entry in settings.models][-1] is None
    assert settings.memory_gib is not None
    assert settings.memory_gib + 0.5 <= float(overlay["mem_limit"].removesuffix("g"))


def test_the_user_of_the_image_owns_the_volume() -> None:
    (user,) = re.findall(r"^USER (\d+)$", RUNTIME, re.MULTILINE)
    assert f"useradd --uid {user} " in RUNTIME
    assert f"install -d -o {user} -g {user} {VOLUME}" in RUNTIME


def test_ports_and_probes() -> None:
    port = Settings.model_fields["port"].default
    assert f"EXPOSE {port}" in RUNTIME
    assert service("compose.yaml")["ports"] == [f"{port}:{port}"]
    for probe, path in ((RUNTIME, "/health"), (service("compose.yaml")["healthcheck"]["test"][-1], "/ready")):
        assert f"os.environ.get('SAMEWISE_PORT', '{port}') + '{path}'" in probe


def test_published_ports_lead_to_the_server() -> None:
    for variables in (image_environment(), service("compose.yaml")["environment"]):
        assert variables["SAMEWISE_HOST"] == "0.0.0.0"


def test_the_stop_waits_for_the_drain() -> None:
    compose = service("compose.yaml")
    assert float(compose["stop_grace_period"].removesuffix("s")) > float(
        compose["environment"]["SAMEWISE_DRAIN_GRACE_S"]
    )


def test_torch_and_the_embedded_model_are_those_of_the_other_files() -> None:
    spec = re.search(r"\$\{TORCH_SPEC:-\$\((.*?)\)\}", DOCKERFILE)[1]  # type: ignore[index]
    found = subprocess.run(["bash", "-c", spec], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert re.fullmatch(r"torch==[\d.]+\n", found)
    model = re.search(r"^EMBEDDED_MODEL := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]  # type: ignore[index]
    assert model in DOCKERFILE


def mounts_of(name: str) -> dict[str, Path]:
    """Paths of our files in the container, and here."""
    pairs = [mount.split(":") for mount in SERVICES[name]["volumes"] if mount.startswith(".")]
    return {inside: ROOT / "deploy" / outside for outside, inside, _ in pairs}


def test_prometheus_reads_the_server_and_its_rules() -> None:
    mounts = mounts_of("prometheus")
    config = yaml.safe_load(mounts["/etc/prometheus/prometheus.yml"].read_text())
    (job,) = config["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    assert target == f"samewise:{Settings.model_fields['port'].default}"
    assert all(mounts[f"/etc/prometheus/{rules}"].exists() for rules in config["rule_files"])


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    mounts = mounts_of("grafana")
    provisioning = mounts["/etc/grafana/provisioning"]
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert SERVICES["prometheus"]["ports"] == ["127.0.0.1:9090:9090"]
    prometheus = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())
    assert source["jsonData"]["timeInterval"] == prometheus["scrape_configs"][0]["scrape_interval"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "samewise.yaml").read_text())["providers"]
    home = Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (mounts[provider["options"]["path"]] / home.name).exists()
    assert str(home.parent) == provider["options"]["path"]


def test_profiles_bring_what_belongs_together() -> None:
    profiles = {name: service.get("profiles", []) for name, service in SERVICES.items()}
    assert profiles == {"samewise": [], "prometheus": [], "grafana": [], "redis": ["limits"]}


def test_limits_can_be_shared_in_the_redis_beside_it() -> None:
    assert COMMENTED_OUT["SAMEWISE_REDIS_URL"] == "redis://redis:6379"
    assert f":{COMMENTED_OUT['SAMEWISE_API_KEYS_FILE']}:ro" in (ROOT / "deploy" / "compose.yaml").read_text()


@pytest.mark.parametrize("further", [(), ("ray",), ("bench", "ray")])
def test_the_image_has_what_settings_need_and_further_extras(further: tuple[str, ...]) -> None:
    (command,) = re.findall(r'^RUN (python -c "import os, tomllib.*?") +> requirements.txt', DOCKERFILE, re.MULTILINE)
    wanted = subprocess.run(
        ["sh", "-c", command.replace("python", sys.executable, 1)],
        cwd=ROOT,
        env={**os.environ, "EXTRAS": " ".join(further)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    told = [one for name in ("images", "kv-events", "page", "redis", "traces", *further) for one in extras[name]]
    assert wanted.split("\n")[:-1] == [*project["dependencies"], *told]
