"""The page docs/reference/errors.md: statuses from the exceptions, and codes, which are compared with the sources."""

import ast
import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from marked_pages import table
from schema_tables import SchemaTables

from server.api.answer_object import components, schema_of
from server.api.capabilities import resolve
from server.api.messages.schema import THREAD_UNSUPPORTED
from server.api.openai.errors import ErrorBody, error_type
from server.api.openapi import ERRORS
from server.config import Settings
from server.errors import ApiError

SERVER = Path(__file__).parents[1] / "server"
PAGE = """\
<!-- docs/generate.py writes this page -->

# Errors

Every status and code that the API returns, and what to do about it. `error.message` names the field, its value and the
way out; `error.code` is for programs.

```bash
curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{{
  "prompt": "Hello", "temperature": 3
}}'
```

```json
{{
  "error": {{
    "message": "Invalid 'temperature': decimal above maximum value. Expected a value <= 2, but got 3 instead.",
    "type": "invalid_request_error", "param": "temperature", "code": "decimal_above_max_value"
  }}
}}
```

{body}
This is OpenAI's form. [Anthropic's API](api/messages.md), [llama.cpp's](api/llama-cpp.md) and
[Ollama's](api/ollama.md) have their own forms with the same messages. Anthropic's API has status 529 where the queue is
full. If a symptom has no status, such as a server that does not start, see
[troubleshooting](../how-to/troubleshooting.md).

## Statuses

{statuses}
An unknown path gets 404 and a wrong method 405, on every path. A host or an origin that is not allowed gets 403, too:
see [browsers](../how-to/operate.md#browsers). A 503 says nothing about the request itself: send it again, unless
`x-should-retry` is `false`. A 500 is a bug of the server, which the same request may meet again.

## Codes

`code` is `null` where the status says all.

{codes}
## Codes of batches

`errors` of a [batch](api/batches.md) has these codes for lines that are malformed, and the file of errors has them for
lines that were not answered.

{batch_codes}
## Errors of streams

An error before the first token has its own status, also for a stream. There is one exception: after `--keepalive-s`
({keepalive:g} seconds by default) without a token, a stream begins with a comment line and status 200, so that
proxies keep it open. While one of several models is being loaded, these lines are `: loading`.

A stream that has begun ends with `data: {{"error": ...}}` and `data: [DONE]`. In Anthropic's API it ends with an event
`error`, and a response ends with the event `response.failed`. Its `error.code` is `rate_limit_exceeded`,
`invalid_prompt` or `server_error`.
"""
ACTIONS: Mapping[tuple[int, str], str] = {
    (400, "invalid_request_error"): "Correct the field in `param`. The code says what is wrong with it.",
    (401, "invalid_request_error"): "Send `Authorization: Bearer KEY` or `x-api-key: KEY`.",
    (403, "invalid_request_error"): "Use a key that may, or give this one the right in the keys file.",
    (404, "invalid_request_error"): "Check the path against the [endpoints](api/index.md#endpoints), the model against "
    "`GET /v1/models`, and the id.",
    (405, "invalid_request_error"): "Use a method of the header `Allow`.",
    (413, "invalid_request_error"): "Send less, or raise `--max-body-mib` or `--max-file-mib`.",
    (415, "invalid_request_error"): "Set the header `Content-Type`; do not compress the body.",
    (426, "invalid_request_error"): "Use a websocket client, or POST. A proxy in between must pass on `Upgrade`.",
    (429, "rate_limit_exceeded"): "Retry after `Retry-After`. Raise `--max-waiting`, or add replicas.",
    (429, "requests"): "Retry after `Retry-After`, or raise the key's limit: [tenants](../how-to/tenants.md#limits).",
    (429, "tokens"): "Retry after `Retry-After`, or raise the key's limit: [tenants](../how-to/tenants.md#limits).",
    (429, "insufficient_quota"): "Wait for the next day (UTC), or raise the key's quota.",
    (500, "server_error"): "Look up the request id in the server's log, and report the traceback.",
    (501, "server_error"): "Load another model with `samewise serve MODEL`.",
    (503, "server_error"): "Retry. Before sending traffic, wait until `GET /ready` returns 200.",
    (504, "server_error"): "Ask for fewer tokens, or raise `--request-timeout-s`.",
}
CODES: Mapping[str, tuple[str, str]] = {
    "context_length_exceeded": ("Prompt and output have more tokens than the context.",
        "Shorten the prompt, lower `max_tokens`, set `truncate_prompt_tokens`, or raise `--max-model-len`."),
    "unknown_parameter": ("The field does not exist.",
        "Correct its name; the message suggests one. `--lenient` ignores and reports unknown fields."),
    "missing_required_parameter": ("A required field is missing.", "Add it."),
    "invalid_type": ("The value has another JSON type.", "Send the type that the message names."),
    "invalid_value": ("The value is not one that the field takes.", "Send one that the message names."),
    "integer_above_max_value": ("The number is above its limit.", "Lower it to the limit in the message."),
    "integer_below_min_value": ("The number is below its limit.", "Raise it to the limit in the message."),
    "decimal_above_max_value": ("The number is above its limit.", "Lower it to the limit in the message."),
    "decimal_below_min_value": ("The number is below its limit.", "Raise it to the limit in the message."),
    "string_above_max_length": ("The string is too long.", "Shorten it to the limit in the message."),
    "string_below_min_length": ("The string is too short.", "Lengthen it to the limit in the message."),
    "array_above_max_length": ("The array is too long.", "Shorten it to the limit in the message."),
    "array_below_min_length": ("The array is too short.", "Lengthen it to the limit in the message."),
    "empty_array": ("The array is empty.", "Send at least one entry."),
    "object_above_max_properties": ("The object has too many keys.", "Send fewer, up to the limit in the message."),
    "invalid_parameter_combination": ("Two fields cannot be combined.", "Remove one of them."),
    "unsupported_parameter": ("This server or its model does not support the field.",
        "Remove it, or start the server with what the message names. With `--strict`, ignored hints are refused, too."),
    "unsupported_value": ("This server does not support the value.", "Send another; the message lists them if it can."),
    "unsupported_model": ("The model cannot do this task.",
        "Serve a model that can: [models](models.md#embedding-and-scoring-models)."),
    "model_not_found": (
        "No model of this name is served, or the key may not use it.",
        "Use a name of `GET /v1/models`, or remove `model`.",
    ),
    "invalid_image_format": ("The file is not an image, or of another format.", "Send PNG, JPEG, WebP or GIF."),
    "invalid_image_url": ("The image cannot be fetched from its URL.",
        "Check that the URL answers without a redirect, or send a data URL. The server's log has the reason."),
    "invalid_image": ("The image is cut off or damaged, or takes far more work to decode than its pixels need.",
        "Save it again, and send the whole file."),
    "invalid_base64": ("The image is not valid base64.", "Encode the file with the standard alphabet."),
    "image_too_large": (
        "The image has too many bytes or pixels, or is too long and narrow, or all images need too much memory.",
        "Scale it down or crop it, or raise `--max-image-mib`, `--max-image-megapixels` or `--image-cache-gib`."),
    "not_found": ("There is no stored object with this id, or it belongs to another key.", "Check the id and the key."),
    "previous_response_not_found": ("The response of `previous_response_id` is not stored.",
        "Send the whole input. `--max-stored-mib` limits what is kept, and only `--data-dir` keeps it over a restart."),
    "unknown_url": ("The path does not exist.", "See the [endpoints](api/index.md#endpoints)."),
    "invalid_api_key": ("The API key is missing or wrong.", "Send a key of `--api-key` or `--api-keys-file`."),
    "not_permitted": ("The API key may not load and unload models.",
        "Give it `manage: true` in the keys file: [tenants](../how-to/tenants.md#models)."),
    "rate_limit_exceeded": ("The queue is full, or a limit of the key is reached.",
        "Retry after `Retry-After`; see the statuses above."),
    "insufficient_quota": ("The key has used its tokens for the day.", "Wait for the next day, or raise the quota."),
    "model_loading": ("The model was not loaded within `load_timeout_s`.",
        "Retry after `Retry-After`. Raise `--load-timeout-s` or `--memory-gib`, or serve fewer models."),
    "model_unavailable": ("The model cannot be loaded, or was never loaded; the message says which.",
        "Correct the cause. After `Retry-After`, a request tries again: "
        "[several models](../how-to/several-models.md)."),
    "no_token_left": ("The request's settings rule out every token.",
        "Relax `allowed_token_ids`, `bad_words`, `logit_bias` or the form of the output."),
    "request_too_complex": ("Checking the request took too much time or memory.",
        "Simplify its schemas, patterns or grammars."),
    "files_limit_exceeded": ("All files together would exceed `--max-files-mib`.",
        "Delete files, or raise the setting."),
    "too_many_batches": ("The key has too many unfinished batches.", "Wait for one, or cancel it."),
    "not_implemented": ("The server cannot do what the path is for.",
        "Use one of Ollama's [paths that are here](api/ollama.md)."),
    "invalid_stream_id": ("The `stream_id` of a websocket event is malformed.",
        "Use 1 to 256 letters, digits, `_`, `-`, `.`."),
    "websocket_stream_limit_reached": ("Too many streams are open on the websocket.",
        "Reuse a `stream_id`, or open another websocket."),
    "websocket_connection_limit_reached": ("The websocket is too old, or too many are open.", "Open a new one."),
    THREAD_UNSUPPORTED: ("The messages API has no stored threads here.", "Send all messages in the request."),
}  # fmt: skip
BATCH_CODES: Mapping[str, tuple[str, str]] = {
    "empty_file": ("The file has no lines.", "Upload a file with one request a line."),
    "too_many_lines": ("The file has more lines than a batch may have.", "Split it, or raise `--max-batch-lines`."),
    "line_too_large": ("A line is larger than a request may be.", "Shorten it, or raise `--max-body-mib`."),
    "invalid_json_line": ("A line is not JSON.", "Correct the line that `line` names."),
    "invalid_line": ("A line has not the fields of a request.",
        "Send `custom_id`, `method`, `url` and `body` in each line."),
    "duplicate_custom_id": ("Two lines have the same `custom_id`.", "Give each line its own."),
    "mismatched_endpoint": ("A line's `url` is not the batch's `endpoint`.", "Use one endpoint in a file."),
    "input_file_not_found": ("The input file was deleted.", "Upload it again and create a new batch."),
    "not_stored": ("Results cannot be stored now.",
        "Make room on the disk of `--data-dir`. The batch waits and then continues by itself."),
    "server_error": ("A fault of the server.", "See its log, then create a new batch."),
    "batch_expired": ("The completion window ended before this line was run.", "Create a batch of these lines."),
    "batch_cancelled": ("The batch was cancelled before this line was run.", "Create a batch of these lines."),
}  # fmt: skip
NOT_CODES = frozenset({"invalid_prompt", "server_error"})
"""Codes of failed responses, which the page names in its text."""


def render_errors() -> str:
    """The page. Ends the program if the table of codes and the sources differ."""
    _check_codes()
    body = schema_of(ErrorBody)
    plain = SchemaTables(lambda schema: resolve(schema, components(body)), str, str)
    return PAGE.format(
        body=plain.answer(body),
        statuses=_statuses(),
        codes=_table(CODES),
        batch_codes=_table(BATCH_CODES),
        keepalive=Settings.model_fields["keepalive_s"].default,
    )


def _table(codes: Mapping[str, tuple[str, str]]) -> str:
    rows = [(f"`{code}`", meaning, action) for code, (meaning, action) in codes.items()]
    return table(("code", "meaning", "what to do"), rows)


def _statuses() -> str:
    """All errors by status; where one status has several types, each in the words of its exception."""
    by_type: dict[tuple[int, str], type[ApiError]] = {}
    for error in _errors(ApiError):
        by_type.setdefault((error.status, error_type(error)), error)
    if by_type.keys() != ACTIONS.keys():
        raise SystemExit(f"docs/errors_page.py: ACTIONS and the errors differ in {by_type.keys() ^ ACTIONS.keys()}")
    num_types = Counter(status for status, _ in by_type)
    rows = []
    for (status, name), error in sorted(by_type.items(), key=lambda entry: entry[0][0]):
        when = ERRORS[status] if num_types[status] == 1 else inspect.getdoc(error) or ""
        headers = "<br>".join(f"`{name}: {value}`" for name, value in _headers(error).items())
        rows.append((str(status), f"`{name}`", when, ACTIONS[status, name], headers))
    return table(("status", "type", "when", "what to do", "headers"), rows)


def _errors(error: type[ApiError]) -> Iterator[type[ApiError]]:
    """The exceptions that are raised; private ones are not."""
    for kind in error.__subclasses__():
        if not kind.__name__.startswith("_"):
            yield kind
        yield from _errors(kind)


def _headers(error: type[ApiError]) -> dict[str, str]:
    needed = [one for one in inspect.signature(error).parameters.values() if one.default is one.empty]
    texts = ["..." for one in needed if one.kind is not one.KEYWORD_ONLY]
    numbers = {one.name: 1.0 for one in needed if one.kind is one.KEYWORD_ONLY}
    return dict(error(*texts, **numbers).headers)


def _check_codes() -> None:
    raised, strings = set[str](), set[str]()
    for source in SERVER.rglob("*.py"):
        if "page" in source.parts or "cli" in source.parts:
            continue
        tree = ast.parse(source.read_text())
        strings |= {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        raised |= {code for node in ast.walk(tree) if isinstance(node, ast.Call) for code in _codes_in(node)}
    known = CODES.keys() | BATCH_CODES.keys()
    if unknown := raised - known - NOT_CODES:
        raise SystemExit(f"docs/errors_page.py lacks the codes {', '.join(sorted(unknown))}")
    made = {f"{kind}_{end}" for kind in ("integer", "decimal") for end in ("above_max_value", "below_min_value")}
    if gone := known - strings - made:
        raise SystemExit(f"docs/errors_page.py has codes that nothing raises: {', '.join(sorted(gone))}")


def _codes_in(call: ast.Call) -> Iterator[str]:
    """The codes that a call names: `code="..."`, or the first argument of a function that takes one."""
    for keyword in call.keywords:
        if keyword.arg == "code" and isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, str):
            yield keyword.value.value
    name = (
        call.func.id
        if isinstance(call.func, ast.Name)
        else call.func.attr
        if isinstance(call.func, ast.Attribute)
        else ""
    )
    if name in ("problem", "_only", "batch_error", "_LineError", "_give_up") and call.args:
        first = call.args[0]
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield first.value
