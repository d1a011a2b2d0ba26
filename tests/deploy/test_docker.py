"""The files for Docker: they fit each other and the code."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.cli.flags import OTHER_VARIABLES, PREFIX
from server.config import Settings

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
COMPOSE = {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / "deploy").glob("compose*.yaml")}
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
    variables = {**image_environment(), **service(file)["environment"]}
    ours = {name: value for name, value in variables.items() if name.startswith(PREFIX)}
    assert ours.keys() - OTHER_VARIABLES <= {PREFIX + field.upper() for field in Settings.model_fields}
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    Settings()


@pytest.mark.parametrize("file", COMPOSE)
def test_build_arguments_are_the_dockerfiles(file: str) -> None:
    build = service(file)["build"]
    arguments = {} if isinstance(build, str) else build["args"]
    assert arguments.keys() <= set(re.findall(r"^ARG (\w+)=", DOCKERFILE, re.MULTILINE))


def test_a_volume_holds_what_is_downloaded_and_never_what_the_image_brings() -> None:
    mounts = dict(reversed(volume.split(":")) for volume in service("compose.yaml")["volumes"])
    assert mounts == {VOLUME: "data"}
    assert COMPOSE["compose.yaml"]["volumes"].keys() == {"data"}
    folders = {name: value for name, value in image_environment().items() if value.startswith("/") and name != "PATH"}
    cache = folders.pop("SAMEWISE_CACHE")
    assert not cache.startswith(VOLUME)
    assert re.search(rf"^COPY --from=build --chown=(\d+):\1 {cache} {cache}$", RUNTIME, re.MULTILINE)
    assert folders.keys() >= {"HF_HOME", "TRITON_CACHE_DIR"}
    assert all(folder.startswith(f"{VOLUME}/") for folder in folders.values())


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


def test_the_stop_waits_for_the_drain() -> None:
    compose = service("compose.yaml")
    assert float(compose["stop_grace_period"].removesuffix("s")) > float(
        compose["environment"]["SAMEWISE_DRAIN_GRACE_S"]
    )


def test_torch_and_the_embedded_model_are_those_of_the_other_files() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert re.search(r'^ARG TORCH_SPEC="(.*)"$', DOCKERFILE, re.MULTILINE)[1] in dependencies  # type: ignore[index]
    model = re.search(r"^EMBEDDED_MODEL := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]  # type: ignore[index]
    assert model in DOCKERFILE
