"""Tests for the reader of JSON from strangers, and that nothing in the package reads JSON otherwise."""

import ast
import json
from pathlib import Path

import pytest

import model_runner
import server
from model_runner.json_files import find_object, parse_json, parse_object, read_list, read_object
from model_runner.refusal import UnsupportedModelError

OF_CLIENTS = {
    *("http/json_body.py", "api/messages/answer.py", "api/fields/structured.py", "cli/foreign_flags.py"),
    *("generation/choice.py", "generation/constraints/lark.py", "generation/constraints/json_schema.py"),
    "generation/parsing/json_text.py",
}
"""Modules of the server that read texts of clients, which it has bounded and parsed before, or of the model."""
OWN = {"api/responses/references.py", "api/responses/store.py", "storage/batches.py"}
"""Modules of the server that read what it stored itself."""
TOOLS = {"cli/loadtest/benchmark.py", "page/nicegui_hardening.py"}
"""Modules for people who test a server, and the page's own messages."""


def uses_json_directly(path: Path) -> bool:
    """Whether a module calls `json.load` or `json.loads`, or imports them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr in {"load", "loads"}:
            if isinstance(node.value, ast.Name) and node.value.id == "json":
                return True
        elif isinstance(node, ast.ImportFrom) and node.module == "json":
            return True
    return False


@pytest.mark.parametrize(
    ("package", "allowed"), [(model_runner, {"json_files.py"}), (server, OF_CLIENTS | OWN | TOOLS)]
)
def test_files_of_strangers_have_one_reader(package: object, allowed: set[str]) -> None:
    folder = Path(package.__path__[0])  # type: ignore[attr-defined]
    direct = {path.relative_to(folder).as_posix() for path in folder.rglob("*.py") if uses_json_directly(path)}
    assert direct == allowed, "use model_runner.json_files, which bounds what it reads"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "Expecting property name"),
        (b"", "Expecting value"),
        (b'"\xff"', "can't decode byte 0xff"),
        (b'{"a":' * 70 + b"1" + b"}" * 70, "more than 64 nested levels"),
        (b"[" * 200_000, "more than 64 nested levels"),
        (b'{"a": 1e999}', "the number 1e999 is too large"),
        (b'{"a": -1' + b"0" * 5000 + b"}", "a number has 5002 digits"),
        (b'{"a": "\\ud800"}', "surrogates not allowed"),
        (b'{"a": "\xed\xa0\x80"}', "can't decode byte 0xed"),
        (b" " * (9 << 20) + b"{}", "it has more than 8,388,608 bytes"),
        (b"[" + b"[]," * (2 << 20) + b"[]]", "it has more than 2,097,152 objects and lists"),
    ],
)
def test_damage_is_one_short_line(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=reason) as failure:
        read_object(path, most=9 << 20 if b"[]" in content else 8 << 20)
    message = str(failure.value)
    assert message.startswith(f"{path} is not valid JSON (")
    assert message.endswith("; download it again")
    assert len(message.removeprefix(str(path))) < 200


def test_the_form_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "modules.json"
    assert find_object(path) == {}
    path.write_text("[]")
    assert read_list(path) == []
    with pytest.raises(UnsupportedModelError, match=r"modules\.json does not hold a JSON object; download it again"):
        find_object(path)
    for wrong in ("{}", "[1]", "null"):
        path.write_text(wrong)
        with pytest.raises(UnsupportedModelError, match="does not hold a JSON list of objects"):
            read_list(path)


def test_what_real_files_have_is_read() -> None:
    content = {"infinite": [0.0, float("inf")], "limit": int(1e30), "emoji": "\U0001f600", "deep": [[[[{}]]]]}
    assert parse_json(json.dumps(content).encode(), "it") == content  # escapes the emoji as two surrogates
    assert parse_object(b"\xef\xbb\xbf" + json.dumps(content, ensure_ascii=False).encode(), "it") == content
