"""The Helm chart, rendered by Helm itself, and what a cluster would say of the result."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml
from helm_python import Chart

from tests.deploy.custom_resources import CUSTOM_RESOURCES

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "samewise"
VALUES_FILES = sorted((CHART / "ci").glob("*-values.yaml"))
Manifest = dict[str, Any]


def read_values(file: Path) -> dict[str, Any]:
    return yaml.safe_load(file.read_text())


def render_files(
    values: Mapping[str, Any] | None = None, name: str = "samewise", namespace: str = "llm"
) -> dict[str, str]:
    """Render each template with the values. Raises HelmError."""
    return _chart().render(dict(values or {}), name=name, namespace=namespace)


def render(values: Mapping[str, Any] | None = None, name: str = "samewise", namespace: str = "llm") -> list[Manifest]:
    """All that is installed with these values, but the notes. Raises HelmError."""
    files = render_files(values, name, namespace)
    texts = [text for file, text in files.items() if file.endswith(".yaml")]
    return [manifest for text in texts for manifest in yaml.safe_load_all(text) if manifest]


def render_one(kind: str, values: Mapping[str, Any] | None = None) -> Manifest:
    """The only one of its kind."""
    (found,) = (manifest for manifest in render(values) if manifest["kind"] == kind)
    return found


def render_pod(values: Mapping[str, Any] | None = None) -> Manifest:
    """The pod's template."""
    (found,) = (one for one in render(values) if one["kind"] in ("Deployment", "StatefulSet"))
    return found["spec"]["template"]


def container_of(pod: Manifest) -> Manifest:
    (found,) = pod["spec"]["containers"]
    return found


def variables_of(pod: Manifest) -> dict[str, Any]:
    """The container's environment: values, or where they are from."""
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container_of(pod)["env"]}


def check(manifest: Manifest, version: str) -> None:
    """Raises a ValidationError if a cluster of this version does not know a field, or takes another type for it."""
    kind = (manifest["apiVersion"], manifest["kind"])
    if kind in CUSTOM_RESOURCES:
        assert manifest["metadata"].keys() <= {"name", "namespace", "labels"}
        jsonschema.validate(manifest["spec"], CUSTOM_RESOURCES[kind])
    else:
        kubernetes_validate.validate(manifest, version, strict=True)


@cache
def _chart() -> Chart:
    return Chart.load(CHART)
