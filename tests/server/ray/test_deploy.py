"""The file for `serve deploy`, and the example with several models, fit the code."""

import ast
import importlib.util
from pathlib import Path

import yaml

from server.ray.options import read_arguments

ROOT = Path(__file__).parents[3]
CONFIG = yaml.safe_load((ROOT / "deploy" / "ray" / "serve.yaml").read_text())


def test_the_arguments_can_be_used() -> None:
    (application,) = CONFIG["applications"]
    deployment = read_arguments(application["args"])
    assert deployment.options.most > deployment.options.min_replicas
    assert deployment.settings.log_format == "json"


def test_the_example_with_several_models_can_be_used() -> None:
    page = (ROOT / "docs" / "how-to" / "ray.md").read_text()
    example = page.partition("## Several models")[2].partition("```yaml")[2].partition("```")[0]
    chat, embeddings = read_arguments(yaml.safe_load(example)["args"]).models
    assert (chat.options.min_replicas, chat.options.most, chat.settings.device) == (2, 4, "cuda")
    assert (embeddings.names, embeddings.options.most, embeddings.settings.device) == (("embeddings",), 2, "cpu")


def test_the_import_path_leads_to_the_builder() -> None:
    """Without importing it, which needs Ray."""
    module, name = CONFIG["applications"][0]["import_path"].split(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    functions = [node for node in ast.parse(Path(spec.origin).read_text()).body if isinstance(node, ast.FunctionDef)]
    assert name in {function.name for function in functions}
