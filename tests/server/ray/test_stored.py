"""Several replicas refuse what one of them would have stored, and nothing else."""

import json
from typing import Any

import pytest

from server.api.dialects import DIALECTS
from server.api.ollama.routes import CHANGES
from server.errors import InvalidRequestError
from server.ray.routing_fields import SHORT_BYTES, RoutingFields, check_body, check_path, read_fields, unstored

PATHS = {route.path for dialect in DIALECTS for route in dialect.router.routes}  # type: ignore[attr-defined]
OF_WHAT_IS_STORED = {
    *("/v1/files", "/v1/files/{file_id}", "/v1/files/{file_id}/content"),
    *("/v1/batches", "/v1/batches/{batch_id}", "/v1/batches/{batch_id}/cancel"),
    *("/v1/conversations", "/v1/conversations/{conversation_id}", "/v1/conversations/{conversation_id}/items"),
    "/v1/conversations/{conversation_id}/items/{item_id}",
    *("/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel", "/v1/responses/{response_id}/input_items"),
    *("/v1/requests", "/v1/requests/{request_id}", "/v1/usage", "/v1/steps", "/load", "/slots"),
}
OF_NOTHING_STORED = {
    *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens"),
    *("/v1/responses", "/v1/responses/input_tokens", "/v1/responses/compact"),
    *("/v1/embeddings", "/embed", "/v1/score", "/v1/rerank", "/v2/rerank", "/v1/classify", "/invocations"),
    *("/v1/models", "/v1/models/{model:path}", "/v1/capabilities", "/tokenize", "/detokenize", "/tokenizer_info"),
    *("/completion", "/infill", "/apply-template", "/props"),
    *("/", "/api/version", "/api/tags", "/api/ps", "/api/show", "/api/chat", "/api/generate", "/api/embed"),
    *("/api/embeddings", "/api/pull", *CHANGES),
    *("/v1/models/load", "/v1/models/unload", "/v1/models/events", "/v1/models/sse"),
    *("/health", "/ready", "/ping", "/metrics", "/version"),
}
RESPONSES = "/v1/responses"


def fields_of(body: Any) -> RoutingFields:
    fields = read_fields(body if isinstance(body, bytes) else json.dumps(body).encode())
    assert fields is not None
    return fields


def test_of_every_path_it_is_known_which_it_is() -> None:
    """A new one has to be thought of here, and in `stored` if each replica would answer it differently."""
    assert PATHS == OF_WHAT_IS_STORED | OF_NOTHING_STORED


@pytest.mark.parametrize("path", sorted(OF_WHAT_IS_STORED))
def test_paths_of_what_is_stored_are_refused(path: str) -> None:
    with pytest.raises(InvalidRequestError, match="max_replicas=1"):
        check_path(path)


@pytest.mark.parametrize("path", sorted(OF_NOTHING_STORED))
def test_all_other_paths_are_served(path: str) -> None:
    check_path(path)


@pytest.mark.parametrize("path", [RESPONSES, f"{RESPONSES}/input_tokens", f"{RESPONSES}/compact"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"background": True}, "background"),
        ({"store": True}, "store"),
        ({"input": [{"role": "user", "content": "a"}, {"id": "msg_1"}]}, "input[1]"),
        ({"conversation": {"id": "x" * SHORT_BYTES}}, "conversation"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
    ],
)
def test_bodies_that_need_what_is_stored_are_refused(path: str, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_body(path, fields_of({"input": "hi", **fields}))
    assert caught.value.param == param
    assert f"'{param}'" in caught.value.message


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RESPONSES, {"input": "hi", "store": False, "background": False, "previous_response_id": None}),
        (RESPONSES, {"input": [{"id": "msg_1", "role": "user", "content": "a"}]}),
        ("/v1/chat/completions", {"messages": [], "store": True, "conversation": "x"}),
    ],
)
def test_others_are_not(path: str, body: dict[str, Any]) -> None:
    check_body(path, fields_of(body))


@pytest.mark.parametrize("written", ['{"input": "hi"}', ' \n{ "input":"hi","store" : null }'])
def test_a_response_is_not_stored_by_default(written: str) -> None:
    content = unstored(RESPONSES, written.encode(), fields_of(written.encode()))
    assert sorted(json.loads(content, object_pairs_hook=list)) == [("input", "hi"), ("store", False)]


@pytest.mark.parametrize(
    ("path", "written"),
    [(RESPONSES, '{"store":false}'), (RESPONSES, "{}"), (RESPONSES, " { } "), ("/v1/completions", '{"prompt":"a"}')],
)
def test_all_else_stays_as_it_was_written(path: str, written: str) -> None:
    content = written.encode()
    assert unstored(path, content, fields_of(content)) == content
