"""The file of keys: what it may say, what is refused, and when it is read again."""

import hashlib
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from llguidance import LLMatcher

from server.api.body_worker import BodyContext
from server.config import Settings
from server.generation.constraints.json_schema import BOUNDED, schema_fragment
from server.telemetry.request_trace import Sender
from server.tenants.keys import KeyRing, KeysError, Tenant, TenantLimits, read_keys
from tests.server.helpers import chat
from tests.server.tenants.keys import of_tenant, write_keys


def ring_of(path: Path, **settings: Any) -> KeyRing:
    return KeyRing(Settings(api_keys_file=path, **settings))


def test_all_that_can_be_said_of_a_key(tmp_path: Path) -> None:
    limits = {"requests_per_minute": 60, "tokens_per_minute": 1000, "tokens_per_day": 10000, "max_choices": 4}
    ring = ring_of(write_keys(tmp_path / "keys", research={"weight": 3, "priority": -1, **limits}))
    assert ring.tenant_of("research-key") == Tenant("research", 3.0, -1, TenantLimits(**limits), label="research")
    assert ring.tenant_of("other-key") is None
    assert ring.named("research") is ring.tenant_of("research-key")


def test_a_name_may_have_several_keys_and_hashes_in_their_place(tmp_path: Path) -> None:
    hashed = hashlib.sha256(b"secret").hexdigest()
    path = write_keys(tmp_path / "keys", a={"key": ["one", "two"]}, b={"sha256": hashed.upper()}, c={})
    found = [ring_of(path).tenant_of(key) for key in ("one", "two", "secret", hashed, "c-key")]
    assert [None if one is None else one.name for one in found] == ["a", "a", "b", None, "c"]


def test_a_plain_list_still_works_and_its_names_do_not_tell_the_keys(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("first\n\n  second \n")
    ring = ring_of(tmp_path / "keys", api_key="third")
    names = [ring.tenant_of(key).name for key in ("first", "second", "third")]  # type: ignore[union-attr]
    assert names == [hashlib.sha256(key.encode()).hexdigest()[:16] for key in ("first", "second", "third")]


ENTRY = {"name": "a", "key": "secret-key"}
WRONG = {
    "nothing": ("keys:", "keys: Input should be a valid list"),
    "none": ("keys: []", "at least 1"),
    "no YAML": ("keys:\n  - {name: a", "line"),
    "no key": ([{"name": "a"}], "'a' needs 'key' or 'sha256'"),
    "no name": ([{"key": "secret-key"}], re.escape("keys[0].name: Field required")),
    "a name that is no name": ([ENTRY | {"name": "a b"}], r"keys\[0\].name: String should match"),
    "a field that is none": ([ENTRY | {"wieght": 1}], r"keys\[0\].wieght: Extra inputs are not permitted"),
    "another field": ("keys:\n  - {name: a, key: secret-key}\ntenants: []", "tenants: Extra inputs"),
    "twice the name": ([ENTRY, ENTRY | {"key": "other"}], "the name 'a' occurs twice"),
    "twice the key": ([ENTRY, ENTRY | {"name": "b"}], "'b' and 'a' have the same key"),
    "an empty key": ([ENTRY | {"key": ""}], r"keys\[0\].key\[0\]: Value error, a key needs at least one character"),
    "a key with a space": ([ENTRY | {"key": "secret key"}], "must not contain spaces"),
    "a number for a key": ([ENTRY | {"key": 5}], r"keys\[0\].key\[0\]"),
    "a hash that is none": ([ENTRY | {"sha256": "abc"}], r"keys\[0\].sha256\[0\]: String should match"),
    "no weight": ([ENTRY | {"weight": 0}], "weight: Input should be greater"),
    "infinite weight": ("keys:\n  - {name: a, key: secret-key, weight: .inf}", "weight"),
    "a text for a limit": ([ENTRY | {"tokens_per_day": "many"}], "tokens_per_day: Input should be a valid integer"),
    "a limit of nothing": ([ENTRY | {"max_choices": 0}], "max_choices: Input should be greater"),
    "a plain list with spaces": (
        "first\nsecond third\n",
        "line 2: a key must not contain spaces. If this is a YAML file",
    ),
    "another top": ("users:\n  - name: a\n", "line 2: a key must not contain spaces"),
    "an alias for a key": ("keys:\n  - {name: a, key: *secret-key}", "line 2: this is not valid YAML"),
    "a tag for a key": ("keys:\n  - {name: a, key: !secret-key}", "line 2: this is not valid YAML"),
    "a date that is none": ("keys:\n  - {name: a, key: 2026-13-45}", "put it in quotes"),
    "no text": (b"\xff\xfe", "is not a text file"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_used_is_refused_with_the_place_and_without_the_key(tmp_path: Path, case: str) -> None:
    content, says = WRONG[case]
    path = tmp_path / "keys"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else yaml.safe_dump({"keys": content}))
    with pytest.raises(KeysError, match=says) as caught:
        read_keys(path)
    assert str(path) in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_changed_file_is_read_again_and_a_bad_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    now = [0.0]
    path = write_keys(tmp_path / "keys", a={})
    ring = KeyRing(Settings(api_keys_file=path), clock=lambda: now[0])
    write_keys(path, a={"weight": 2}, b={})
    assert ring.tenant_of("b-key") is None, "not looked at at every request"
    now[0] += 2
    assert ring.tenant_of("b-key") == Tenant("b", label="b")
    assert ring.named("a").weight == 2
    path.write_text("keys: 5")
    now[0] += 2
    assert ring.tenant_of("b-key") == Tenant("b", label="b")
    assert "The API keys could not be reloaded" in caplog.text
    path.unlink()
    now[0] += 2
    assert ring.tenant_of("b-key") == Tenant("b", label="b")
    write_keys(path, c={})
    now[0] += 2
    assert ring.tenant_of("b-key") is None
    assert ring.tenant_of("c-key") == Tenant("c", label="c")
    assert ring.named("b") == Tenant("b"), "whose requests may still run"
    assert len([line for line in caplog.messages if "could not be reloaded" in line]) == 2
    assert "-key" not in caplog.text


async def test_a_key_that_has_gone_is_refused_and_a_new_one_taken(make_with_keys, tmp_path: Path) -> None:
    app = make_with_keys({"a": {}})
    async with of_tenant(app, "a") as old, of_tenant(app, "b") as new:
        assert [(await client.get("/v1/models")).status_code for client in (old, new)] == [200, 401]
        write_keys(tmp_path / "keys.yaml", b={})
        app.state.services.accounts.keys.reload()
        assert [(await client.get("/v1/models")).status_code for client in (old, new)] == [401, 200]


async def test_what_a_key_is_allowed_reaches_the_engine(make_with_keys, engine) -> None:
    app = make_with_keys({"a": {"weight": 2.5, "priority": 3}, "b": {}})
    for name in "ab":
        async with of_tenant(app, name) as client:
            body = {"model": "tiny", "prompt": ["x", "y"], "max_tokens": 1, "cache_salt": "s"}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
    said = [(one.client, one.weight, one.tier, one.cache_salt) for one in engine.requests]
    assert said == [("a", 2.5, 3, "s")] * 2 + [("b", 1.0, 0, "s")] * 2
    assert "-key" not in repr(engine.requests)


async def test_isolated_keys_share_no_prefix_whatever_salts_they_choose(make_with_keys, engine) -> None:
    app = make_with_keys({"a": {}, "b": {}}, isolate_keys=True)
    for name, salt in (("a", ""), ("b", ""), ("b", "a/"), ("a", "x")):
        async with of_tenant(app, name) as client:
            body = {"model": "tiny", "prompt": "x", "max_tokens": 1, **({"cache_salt": salt} if salt else {})}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
    assert [one.cache_salt for one in engine.requests] == ["a/", "b/", "b/a/", "a/x"]


async def test_isolated_keys_share_no_checked_schemas(make_with_keys, engine) -> None:
    """Neither in the engine, which knows grammars by their texts, nor where bodies are checked."""
    app = make_with_keys({"a": {}, "b": {}}, isolate_keys=True)
    schema = {"name": "x", "schema": {"type": "integer"}}
    body = {**chat(), "response_format": {"type": "json_schema", "json_schema": schema}}
    for name in "aab":
        async with of_tenant(app, name) as client:
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    first, again, other = (one.sampling.grammar for one in engine.requests)
    assert first == again != other
    assert LLMatcher.validate_grammar(other, None) == ""
    worker = app.state.services.models.default.body_worker
    asked = [await worker.run(num_remembered, b"tools", engine.info, sender=Sender(one)) for one in "aab"]
    assert asked == [0, 1, 0]


def num_remembered(context: BodyContext, body: bytes) -> int:
    """Number of schemas that a worker remembers before it gets another one."""
    before = schema_fragment.cache_info().currsize
    schema_fragment('{"type": "null"}', "x", BOUNDED, is_strict=True)
    return before


def test_nothing_configured_needs_no_key() -> None:
    assert not KeyRing(Settings())
    assert KeyRing(Settings(api_key="x"))
