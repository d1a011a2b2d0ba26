"""Schemas are found in files and packages, and read by their own draft."""

import json
from pathlib import Path
from zipfile import ZipFile

import yaml
from jsonschema import Draft4Validator, Draft202012Validator

from bench.schemas import evenly, of_file, validator_of

COMPONENTS = {"schemas": {"a/b": {"type": "object"}, "c": {"type": "null"}}}


def test_schemas_are_found_in_json_openapi_and_wheels(tmp_path: Path) -> None:
    (tmp_path / "by_name.json").write_text(json.dumps({"x": {"type": "null"}}))
    (tmp_path / "api.yaml").write_text(yaml.safe_dump({"openapi": "3.1.0", "components": COMPONENTS}))
    with ZipFile(tmp_path / "some-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(tmp_path / "api.yaml", "some/api.yaml")
        wheel.writestr("some/list.json", "[1]")
    assert dict(of_file(tmp_path / "by_name.json")) == {"by_name.json/x": {"type": "null"}}
    found = dict(of_file(tmp_path / "api.yaml"))
    assert list(found) == ["api.yaml/a/b", "api.yaml/c"]
    assert found["api.yaml/a/b"] == {"$ref": "#/components/schemas/a~1b", "components": COMPONENTS}
    assert list(dict(of_file(tmp_path / "some-1.0-py3-none-any.whl"))) == ["some/api.yaml/a/b", "some/api.yaml/c"]


def test_sources_have_the_same_share_as_far_as_they_have_schemas() -> None:
    kept = evenly([{str(number): number for number in range(9)}, {"x": 1}], 4)
    assert len(kept) == 4
    assert "x" in kept


def test_a_flag_at_a_bound_is_of_draft_4() -> None:
    assert validator_of({"minimum": 3, "exclusiveMinimum": True}) is Draft4Validator
    assert validator_of({"exclusiveMinimum": 3}) is Draft202012Validator
