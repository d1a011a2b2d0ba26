"""The text of docs/api.md, from the routes, their models and the errors."""

import inspect
import textwrap
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from fastapi.routing import APIRoute
from schema_tables import answer_table, request_table

from model_runner.contract import SAMPLER_ORDER
from server.api.answer_object import schema_of
from server.api.capabilities import bodies_of, describe_fields
from server.api.chat.schema import ChatCompletionRequest
from server.api.dialects import DIALECTS
from server.api.fields.foreign import ForeignFields
from server.api.fields.rules import RequestModel
from server.api.models import ModelInfo, ModelPage
from server.api.openai.errors import ErrorBody, error_type
from server.api.openapi import ERRORS
from server.config import Settings
from server.errors import ApiError
from server.generation.notices import MAX_NOTICES
from server.generation.planning.limits import MAX_ANSWER_MIB
from server.generation.settings import DecodingSettings, facts_of
from server.http.auth import OPEN_PATHS
from server.http.json_body import MAX_DEPTH

"""The events of streams that have another form than the answer."""
BODIES = bodies_of(DIALECTS)
TREATMENTS = {
    "honoured": "Honoured:",
    "hint": "Hints, left out where they mean nothing here and then reported:",
    "no_effect": "Validated, without effect on the output:",
}
WIDTH = 120
ROUTES = [route for dialect in DIALECTS for route in dialect.router.routes if isinstance(route, APIRoute)]
INTRODUCTION = """\
# API reference

Written by `docs/generate.py` from the routes, their models and the errors. `GET /v1/capabilities` says the same of
requests for the model at hand, with its defaults, and `/docs` and `/openapi.json` describe requests and answers in
OpenAPI's form.

{endpoints}
A path below `/v1` is also served without it (`POST /chat/completions`), for clients whose base URL lacks it. Wherever
it is, another path gets 404, another method 405, and a fault of the server 500.

A body is one JSON object, declared as `application/json`, nested at most {depth} levels deep and without a key twice;
only a [file](batches.md#files) comes as a form.
A field is **honoured** exactly, or has **no effect** on the output and is only validated, or is **refused** with an
error that names it. A **hint** (effort, caching, storage, presentation) is honoured where it means something here, and
else left out and reported. A field that is not listed is refused as unknown; inside messages, which clients echo as
they got them from whatever server, it is left out and reported. A server that runs with `--lenient` does the same with
unknown fields everywhere, where the answer can report them. `null` counts as absent in every object, also for a field
that is unknown or required.

What was left out of a request, or changed (as `max_tokens` beyond the context, which becomes what there is room for),
is reported in `warnings` of the answer, with path and reason, of a stream in its first chunk, and by its paths in the
header `x-samewise-ignored`: at most {max_notices} fields, of the same one in several messages the first. A server that
runs with `--strict` refuses all of these instead.

Where a request says nothing, except on [llama.cpp's routes](llama_cpp.md#defaults), the model's
`generation_config.json` decides on {model_defaults} and on which tokens end
the output: its `do_sample: false` is temperature 0, `max_new_tokens` and `stop_strings` are `max_tokens` and `stop`. A
warning at the start of the server names what else it sets that would change answers. All else, and what that file
leaves open, has the default below.

An answer that could take more than {max_answer} MiB is refused. The log-probabilities, token ids and echoed texts that
it reports count, for every prompt and every choice. What a stream reports of its output does not count, because it is
sent as it comes. Without `max_tokens`, the output is limited instead, and `warnings` says to how many tokens.

In the tables, `[]` stands for each entry of an array and `.*` for each key of an object. An optional property of an
answer is left out where it does not apply.

Every answer has an `x-request-id`. By it, or by the answer's own id, `GET /v1/requests/{{request_id}}` tells
[what became of the request](requests.md), and `GET /v1/requests` lists the last ones of the key.

Where API keys are configured, a request needs the header `Authorization: Bearer KEY` or `x-api-key: KEY`, except for
{open}; with `--open-metrics` for `/metrics` and `/load`, too.

## Fields of other servers

Requests for vLLM, SGLang, llama.cpp, Ollama or OpenRouter need not be rewritten. Most of their fields are fields of
this server. Others mean the same as one of them (such as `regex`, `json_schema`, `grammar`, `think`, `reasoning`,
`include_reasoning`, `request_id`), and the tables below say so. Errors and warnings have the name that the client used.

Hints are {foreign_hints}. They are left out and reported.

{foreign_refused} ask for another answer, and are refused unless they are empty, false or `null`.

A request without a `model` gets the served one, which is reported.

## From logits to tokens

The order is: `contrastive`, `dola` or `guidance`; `logit_bias`, `allowed_token_ids`, `bad_words`, `min_tokens` and
`no_repeat_ngram_size`, `repetition_penalty` (prompt and output), `frequency_penalty` and `presence_penalty` (output
only), DRY, `exponential_decay_length_penalty`; then the highest at temperature 0, else {order}, and a draw. `top_k`
keeps ties, and `sampler_order` changes the order after the greedy choice. The noise of the draw depends on seed,
choice, position and token alone. Logprobs are of the raw distribution unless the server runs with
`--logprobs processed`.

`beam_search` and `penalty_alpha` (contrastive search) choose tokens in other ways, and `best_of` chooses among answers.
[Decoding strategies](decoding.md) has the formulas of all of them.

Special tokens written out in a prompt or a message are read as such, as in other servers of this kind, except in the
texts around [a gap that is filled in](llama_cpp.md#filling-in-the-middle).

## Speculation

Tokens are guessed ahead by one of several methods, and the model verifies several at a time. `speculation` says how
for one request; a request without it takes the server's `--speculation`. `GET /v1/capabilities` lists the methods of
the server at hand. It goes together with every parameter but {not_speculated}. `verify` alone decides what it means for
the answer:

| `verify` | the answer |
|---|---|
| `match`, the default | the same tokens and logprobs as without speculation, whatever method is used |
| `rejection` | drawn from the same distribution, but other tokens: the seed need not give the same answer again |
| `typical` | drawn from another distribution, which favours what was guessed (Medusa's typical acceptance) |

An answer that was verified by one of the latter two says so in `verification`, as do all of its chunks.

`prediction` (OpenAI's predicted outputs) is what the answer will probably be, such as a file before a small change. Its
tokens are drafts like any other: with `match` they never change the answer. It needs the method `prediction`, which is
then the default, or `auto`, and goes together with whatever speculation goes together with.

## Errors

{errors}
Anthropic's API has a form of its own for them, and 529 for 429: see [its page](messages.md).
[llama.cpp's API](llama_cpp.md) has its own form as well.

Every answer carries `x-request-id`, and the same as `request-id`: the request's own, where that is up to 128 letters,
digits, dots, hyphens and
underscores, else a new one.

An error before the first token is a real status, also for a stream, unless nothing came for `keepalive_s`
({keepalive:g} s by default): then the stream has begun with a comment line, to be kept alive by whatever lies between,
and is a 200. A stream that has begun ends, after an error, with `data: {{"error": ...}}` and `data: [DONE]`;
in Anthropic's API, with an event `error`; one of a response begins and ends with events of its own, the last of them
`response.failed`.

{error_body}"""


def render_api() -> str:
    """The whole page."""
    parts = [_wrapped(_introduction()), *(part for route in ROUTES for part in _section(route))]
    return "\n".join(parts).rstrip() + "\n"


def _foreign(support: str) -> list[str]:
    """Fields of other servers that are treated in this way."""
    return [name for name, field in describe_fields(ForeignFields, {}).items() if field.support == support]


def _introduction() -> str:
    of_model = [name for name, facts in facts_of(DecodingSettings).items() if facts.of_model is not None]
    return INTRODUCTION.format(
        endpoints=_endpoints(),
        depth=MAX_DEPTH,
        max_notices=MAX_NOTICES,
        max_answer=MAX_ANSWER_MIB,
        model_defaults=_code([*of_model, "max_tokens"]),
        foreign_hints=_code(_foreign("hint")),
        foreign_refused=_code(_foreign("refused")),
        open=_code(sorted(OPEN_PATHS)),
        order=_code(SAMPLER_ORDER, last=", "),
        not_speculated=_code(describe_fields(ChatCompletionRequest, {})["speculation"].excludes),
        errors=_error_table(),
        keepalive=Settings.model_fields["keepalive_s"].default,
        error_body=answer_table(schema_of(ErrorBody)),
    )


def _endpoints() -> str:
    lines = ["| endpoint | | errors |", "|---|---|---|"]
    for route in ROUTES:
        errors = ", ".join(str(status) for status in route.responses if status != 200)
        lines.append(f"| `{_title(route)}` | {_summary(route)} | {errors} |")
    return "\n".join([*lines, ""])


def _error_table() -> str:
    """All errors that there are, by status; those of one status that have several types in the words of each."""
    by_type: dict[tuple[int, str], type[ApiError]] = {}
    for error in _errors(ApiError):
        by_type.setdefault((error.status, error_type(error)), error)
    num_types = Counter(status for status, _ in by_type)
    lines = ["| status | type | when | headers |", "|---|---|---|---|"]
    for (status, name), error in sorted(by_type.items(), key=lambda entry: entry[0][0]):
        when = ERRORS[status] if num_types[status] == 1 else inspect.getdoc(error)
        headers = "<br>".join(f"`{name}: {value}`" for name, value in _headers(error).items())
        lines.append(f"| {status} | `{name}` | {when} | {headers} |")
    return "\n".join([*lines, ""])


def _errors(error: type[ApiError]) -> Iterator[type[ApiError]]:
    """Those that are raised, which the private ones are not."""
    for kind in error.__subclasses__():
        if not kind.__name__.startswith("_"):
            yield kind
        yield from _errors(kind)


def _headers(error: type[ApiError]) -> dict[str, str]:
    needed = [one for one in inspect.signature(error).parameters.values() if one.default is one.empty]
    texts = ["..." for one in needed if one.kind is not one.KEYWORD_ONLY]
    numbers = {one.name: 1.0 for one in needed if one.kind is one.KEYWORD_ONLY}
    return dict(error(*texts, **numbers).headers)


def _section(route: APIRoute) -> Iterator[str]:
    """One endpoint: its request and its answer."""
    yield f"## {_title(route)}\n"
    yield f"{_summary(route)}\n"
    takes_body = "requestBody" in (route.openapi_extra or {})
    if takes_body and (request := BODIES.get(route.path)):
        yield from _request(request)
    yield from _answers(route.responses.get(200, {}).get("content", {}))


def _answers(content: Mapping[str, Any]) -> Iterator[str]:
    """The answer in each of its forms, and the events of its stream where they are something else."""
    answer = content.get("application/json", {}).get("schema")
    if answer is None:
        return
    forms = answer.get("anyOf", [answer])
    for one in forms:
        entry = one.get("items", one)
        if "$ref" not in entry or (entry is not one and entry in forms):
            continue  # another form's description says when there is this one
        if entry is not one:
            when = "To `texts`, the" if len(forms) > 1 else "The"
            yield f"{when} answer is an array, of which each entry has:\n"
        else:
            yield f"The answer{_form(one)}:\n"
        yield answer_table(entry)
    event = content.get("text/event-stream", {}).get("x-event-schema", answer)
    if event != answer:
        yield "Each event of a stream:\n"
        yield answer_table(event)


def _form(answer: Mapping[str, Any]) -> str:
    """In which form it is, where there are several."""
    return " in Anthropic's form" if answer in (schema_of(ModelInfo), schema_of(ModelPage)) else ""


def _request(request: type[RequestModel]) -> Iterator[str]:
    """Fields that are treated alike stand together."""
    described = describe_fields(request, {})
    for support, title in TREATMENTS.items():
        if rows := {name: field for name, field in described.items() if field.support == support}:
            yield f"{title}\n"
            yield request_table(rows)
    if refused := [name for name, field in described.items() if field.support == "refused"]:
        yield f"Refused unless they ask for nothing: {', '.join(f'`{name}`' for name in refused)}.\n"


def _title(route: APIRoute) -> str:
    (method,) = route.methods
    return f"{method} {route.path}".replace(":path}", "}")


def _summary(route: APIRoute) -> str:
    return " ".join((inspect.getdoc(route.endpoint) or "").split())


def _wrapped(text: str) -> str:
    """With the lines of paragraphs filled up; tables and headings stay as they are."""
    blocks = text.split("\n\n")
    return "\n\n".join(
        block if block.startswith(("|", "#")) else textwrap.fill(block, WIDTH, break_on_hyphens=False)
        for block in blocks
    )


def _code(names: Collection[str], last: str = " and ") -> str:
    """Names in a sentence."""
    *most, final = [f"`{name}`" for name in names]
    return f"{', '.join(most)}{last}{final}" if most else final
