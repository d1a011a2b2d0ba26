"""The file for `serve deploy` fits the code."""

import ast
import importlib.util
from pathlib import Path

import yaml

from server.ray.options import read_arguments

CONFIG = yaml.safe_load((Path(__file__).parents[3] / "deploy" / "ray" / "serve.yaml").read_text())


def test_the_arguments_can_be_used() -> None:
    (application,) = CONFIG["applications"]
    deployment = read_arguments(application["args"])
    assert deployment.options.most > deployment.options.min_replicas
    assert deployment.settings.log_format == "json"


def test_the_import_path_leads_to_the_builder() -> None:
    """Without importing it, which needs Ray."""
    module, name = CONFIG["applications"][0]["import_path"].split(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    functions = [node for node in ast.parse(Path(spec.origin).read_text()).body if isinstance(node, ast.FunctionDef)]
    assert name in {function.name for function in functions}
