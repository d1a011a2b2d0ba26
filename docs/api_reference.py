"""The pages of docs/reference/api, from the routes, the models of their requests and answers, and the errors."""

import inspect
import textwrap
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from api_objects import OBJECTS, Placement, name_in, openapi_document
from api_pages import EXAMPLES, GROUPS, PAGES, ApiPage, FieldGroup
from fastapi.routing import APIRoute
from marked_pages import DOCS, code, table, with_generated
from schema_tables import SchemaTables

from model_runner.contract import SAMPLER_ORDER
from server.api.answer_object import components
from server.api.capabilities import FieldCapability, bodies_of, describe_fields
from server.api.chat.schema import ChatCompletionRequest
from server.api.dialects import DIALECTS
from server.api.fields.rules import RequestModel
from server.api.openai.pages import Query
from server.config import Settings
from server.generation.notices import MAX_NOTICES
from server.generation.planning.limits import MAX_ANSWER_MIB
from server.generation.settings import DecodingSettings, facts_of
from server.http.auth import OPEN_PATHS
from server.http.event_stream import EVENT_STREAM, NDJSON
from server.http.json_body import MAX_DEPTH

API = DOCS / "reference" / "api"
FIELDS = "fields"
"""The page of the fields that requests of several pages share."""
ROUTES = [route for dialect in DIALECTS for route in dialect.router.routes if isinstance(route, APIRoute)]
BODIES = bodies_of(DIALECTS)
WIDTH = 120
NOTE = "<!-- docs/generate.py writes this page -->\n\n"

INDEX = """\
# API

Samewise answers OpenAI's API, Anthropic's, llama.cpp's and Ollama's on one port. This page says what holds for all
endpoints; each has a page with its fields, its answer and an example.

```bash
curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' -d '{{
  "messages": [{{"role": "user", "content": "Hello"}}]
}}'
```

`GET /v1/capabilities` returns the same fields for the loaded model, with its defaults. A running server also has an
OpenAPI document at `/openapi.json`, and a page that shows it at `/docs`.

## Endpoints

{endpoints}
A path below `/v1` is also served without that prefix, for clients whose base URL lacks it: `POST /chat/completions`.

## Requests

A body is one JSON object with the content type `application/json`. Programs, unlike web pages, may leave the type out,
or send the one that `curl -d` sets. A body has at most {depth} levels and no key twice.
Only a [file](files.md) is uploaded as a form. `null` is the same as no field.

Where API keys are configured, send `Authorization: Bearer KEY` or `x-api-key: KEY`. {open} need no key. With
`--open-metrics`, `/metrics` and `/load` need none either.

### No field is ignored in silence

Each field has one of four treatments, which the tables show:

| treatment | meaning |
|---|---|
| honoured | Does what it says. This is the default. |
| **Hint** | Honoured where it applies. Otherwise it is ignored and listed in `warnings`. |
| **No effect** | Validated. It cannot change the output. |
| refused | An error names it, unless its value asks for nothing. |

An unknown field is refused with a suggestion. In messages, which clients echo as another server wrote them, it is
ignored and listed in `warnings`. `--lenient` does that with unknown fields everywhere. `--strict` refuses whatever
would be listed in `warnings`.

`warnings` of the answer has the path and the reason of each field that was ignored or changed, such as a `max_tokens`
beyond the context. A stream has it in its first chunk. The header `x-samewise-ignored` has the paths. At most
{max_notices} fields are listed, and of a field in several messages only the first.

### Defaults

A field that is not set has the default in its table, unless the model's `generation_config.json` sets another. The
embedded model's has a `temperature` of 0.2 and a `top_p` of 0.9. That file can set the tokens that end the output, and:

- {model_defaults}

Its `do_sample: false` means temperature 0; `max_new_tokens` and `stop_strings` mean `max_tokens` and `stop`. A warning
at startup names what else in that file would change answers.
[llama.cpp's endpoints](llama-cpp.md#defaults) have llama.cpp's defaults instead, and [Ollama's](ollama.md#defaults)
have Ollama's where the model sets none.

## Answers

Every answer has the header `x-request-id`, and the same id as `request-id`. It is the request's own `x-request-id` if
that has up to 128 letters, digits, dots, hyphens and underscores. [`GET /v1/requests/{{request_id}}`](requests.md)
shows where the time of that request went.

An answer that could take more than {max_answer} MiB is refused. Its log-probabilities, token ids and echoed text count,
for every prompt and choice. The output of a stream counts only in responses, whose last event has all of it. Without
`max_tokens`, the output is limited so that it fits, and `warnings` has the limit.

In the tables of answers, `[]` is each entry of an array and `.*` each key of an object. A property that is optional is
missing where it does not apply.

[Errors](../errors.md) lists every status and code. [Shared fields](fields.md) and [shared objects](objects.md) are
described once for all endpoints.
"""

FIELDS_INTRODUCTION = """\
# Shared fields

Fields that requests to several endpoints take. Each endpoint's page lists the ones that it has.

```bash
curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{
  "prompt": "Once upon a time", "max_tokens": 20, "seed": 7, "temperature": 0.8, "min_p": 0.05, "speculation": "off"
}'
```
"""

OBJECTS_INTRODUCTION = """\
# Shared objects

Objects that occur in requests or answers of several endpoints. This request's answer has three of them:
[Usage](#usage), [TokenLogprob](#tokenlogprob) and [Notice](#notice).

```bash
curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' -d '{
  "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "logprobs": true, "verbosity": "low"
}'
```
"""

AFTER_GROUP = {
    "Sampling and stopping": """\
### Order of the samplers

1. `contrastive`, `dola` or `guidance` changes the scores.
2. `logit_bias`, `allowed_token_ids`, `bad_words`, `min_tokens` and `no_repeat_ngram_size` allow, ban and shift tokens.
3. `repetition_penalty` (prompt and output), `frequency_penalty` and `presence_penalty` (output), DRY and
   `exponential_decay_length_penalty` change the logits.
4. At temperature 0, the token with the highest logit is taken.
5. Otherwise these samplers follow, and one token is drawn. `sampler_order` changes their order. `top_k` keeps ties.

```text
{order}
```

The noise of the draw depends on seed, choice, position and token alone. Logprobs describe the raw distribution unless
the server runs with `--logprobs processed`. `beam_search` and `penalty_alpha` (contrastive search) choose tokens in
other ways, and `best_of` chooses among answers: see [decoding](../../explanation/decoding.md) for all formulas.

Special tokens that are written out in a prompt or a message count as special tokens, except in the texts around
[a gap to fill](llama-cpp.md#filling-in-the-middle). With the
server's `--literal-messages` they are text in messages, too; the chat template's own are tokens either way.

### Speculation

Speculation guesses tokens ahead and verifies several of them in one step. `speculation` sets it for one request; by
default the server's `--speculation` holds. `GET /v1/capabilities` lists the methods. It works with all parameters
except {not_speculated}. `speculation.verify` alone decides what it means for the answer:

| `verify` | answer |
|---|---|
| `match`, the default | The same tokens and logprobs as without speculation, whatever the method. |
| `rejection` | From the same distribution, but other tokens: the seed need not give the same answer again. |
| `typical` | From another distribution, which favours guessed tokens (Medusa's typical acceptance). |

After `rejection` or `typical`, the answer and all chunks have the property `verification`.

`prediction` (OpenAI's predicted outputs) is a text that the answer will probably repeat, such as a file before a small
change. Its tokens are drafts, so with `match` they never change the answer. It needs the method `prediction`, which is
then the default, or `auto`.
""",
    "Fields of other servers": """\
Requests written for these servers need not be changed. Most of their fields are fields of this server. Others are
another name of one, such as `regex`, `json_schema`, `grammar`, `think`, `reasoning` and `include_reasoning`; the tables
say so. Errors and warnings use the name that the client used. A request without a `model` gets the served one, and
`warnings` says so.
""",
}


class ApiReference:
    """Renders all pages."""

    def __init__(self) -> None:
        self.document = openapi_document()
        self.components: Mapping[str, Any] = self.document["components"]["schemas"]
        self.answer_objects = components(self.document).keys()
        self.placement = Placement(self.components)
        self.fields = {path: describe_fields(model, {}, Settings()) for path, model in BODIES.items()}
        self.groups: dict[tuple[type[RequestModel], str], FieldGroup] = {}
        for path, model in BODIES.items():
            for name in self.fields[path]:
                if group := self._group_of(model, name):
                    self.groups[model, name] = group
        self._place_objects()

    def render(self) -> dict[Path, str]:
        """Each page's path and text."""
        pages = {page: "\n".join([*self._page(page), *self._end(page.name)]) for page in PAGES}
        texts = {
            API / f"{page.name}.md": with_generated(API / f"{page.name}.md", text.rstrip() + "\n")
            if page.is_written
            else NOTE + text.rstrip() + "\n"
            for page, text in pages.items()
        }
        fields = "\n".join([FIELDS_INTRODUCTION, *self._end(FIELDS)])
        shared = "\n".join([OBJECTS_INTRODUCTION, *self._end(OBJECTS)])
        texts[API / "index.md"] = NOTE + self._index()
        texts[API / f"{FIELDS}.md"] = NOTE + fields.rstrip() + "\n"
        texts[API / f"{OBJECTS}.md"] = NOTE + shared.rstrip() + "\n"
        return texts

    def _index(self) -> str:
        of_model = [name for name, facts in facts_of(DecodingSettings).items() if facts.of_model is not None]
        rows = [
            (f"[`{title_of(route)}`]({page.name}.md#{anchor(title_of(route))})", summary_of(route))
            for page in PAGES
            for route in self._routes(page)
        ]
        text = INDEX.format(
            endpoints=table(("endpoint", "description"), rows),
            depth=MAX_DEPTH,
            max_notices=MAX_NOTICES,
            max_answer=MAX_ANSWER_MIB,
            model_defaults=code([*of_model, "max_tokens"]),
            open=code(sorted(OPEN_PATHS), " and "),
        )
        return wrapped(text)

    # Placement

    def _group_of(self, model: type[RequestModel], name: str) -> FieldGroup | None:
        """The group that describes a field, if other requests have the same field; the most special of several."""
        owner = _owner(model, name)
        found = [group for group in GROUPS if owner in group.model.__mro__ and issubclass(owner, RequestModel)]
        shared = [
            other
            for other in BODIES.values()
            if other is not model and name in _names(other) and _owner(other, name) is owner
        ]
        if not shared:
            return None
        if not found:
            raise SystemExit(
                f"docs/api_pages.py needs a group for the shared fields of {owner.__qualname__}, such as {name}"
            )
        return min(found, key=lambda group: len(group.model.__mro__))

    @cached_property
    def _page_of_group(self) -> dict[str, str]:
        """The page that describes a group: the page of its requests, or the page of shared fields."""
        page_of_path = {route.path: page.name for page in PAGES for route in self._routes(page)}
        pages: dict[str, set[str]] = {}
        for path, model in BODIES.items():
            for name in self.fields[path]:
                if group := self.groups.get((model, name)):
                    pages.setdefault(group.title, set()).add(page_of_path[path])
        return {title: next(iter(found)) if len(found) == 1 else FIELDS for title, found in pages.items()}

    def _place_objects(self) -> None:
        """Tell the placement which schemas each page shows."""
        for page in PAGES:
            for route in self._routes(page):
                for name in self._own_fields(route):
                    self.placement.add(page.name, self._schema(BODIES[route.path], name))
                for schema in _answers(route):
                    self.placement.add(page.name, schema)
        for title, page_name in self._page_of_group.items():
            for schema in self._fields_of_group(title)[1].values():
                self.placement.add(page_name, schema)

    @staticmethod
    def _routes(page: ApiPage) -> list[APIRoute]:
        def belongs(path: str) -> bool:
            return any(path == one or (one.endswith("*") and path.startswith(one[:-1])) for one in page.paths)

        return [route for route in ROUTES if belongs(route.path)]

    def _schema(self, model: type[RequestModel], name: str) -> Any:
        return self.components[model.__name__]["properties"][name]

    def _body(self, route: APIRoute) -> type[RequestModel] | None:
        return BODIES.get(route.path) if "requestBody" in (route.openapi_extra or {}) else None

    def _own_fields(self, route: APIRoute) -> dict[str, FieldCapability]:
        """The fields of a request that are described at its endpoint."""
        model = self._body(route)
        fields = self.fields[route.path] if model else {}
        return {name: field for name, field in fields.items() if (model, name) not in self.groups}

    def _fields_of_group(self, title: str) -> tuple[dict[str, FieldCapability], dict[str, Any]]:
        """The fields of a group, with what excludes them in any request, and their schemas."""
        fields: dict[str, FieldCapability] = {}
        schemas: dict[str, Any] = {}
        for path, model in BODIES.items():
            for name, field in self.fields[path].items():
                if (group := self.groups.get((model, name))) is None or group.title != title:
                    continue
                known = fields.get(name, field)
                fields[name] = msgspec.structs.replace(
                    known, excludes=list(dict.fromkeys([*known.excludes, *field.excludes]))
                )
                schemas.setdefault(name, self._schema(model, name))
        return fields, schemas

    # Rendering

    def _tables(self, page: str) -> SchemaTables:
        def link(reference: str) -> str:
            name = name_in(reference)
            place = self.placement.page_of(name)
            shown = self._shown(name)
            return f"[{shown}]({'' if place == page else f'{place}.md'}#{anchor(shown)})"

        def purpose(reference: str) -> str:
            return _first_sentence(self.components[name_in(reference)].get("description", ""))

        return SchemaTables(self.placement.expand, link, purpose)

    def _shown(self, name: str) -> str:
        """An object's name; of several with one name on a page, the OpenAPI document's name has the module."""
        *modules, short = name.split("__")
        page = self.placement.page_of(name)
        alike = [other for other in self.placement.sections(page) if other.split("__")[-1] == short]
        return short if len(alike) == 1 else f"{short} ({modules[-2]})"

    def _page(self, page: ApiPage) -> Iterator[str]:
        routes = self._routes(page)
        shown_at_top = None
        if not page.is_written:
            shown_at_top = next(title_of(route) for route in routes if title_of(route) in EXAMPLES)
            yield f"# {page.title}\n\n{page.purpose}\n\n{_example(shown_at_top)}"
        for route in routes:
            yield from self._section(page, route, has_example=title_of(route) != shown_at_top)

    def _section(self, page: ApiPage, route: APIRoute, *, has_example: bool) -> Iterator[str]:
        """One endpoint: its request and its answer."""
        title = title_of(route)
        tables = self._tables(page.name)
        yield f"## {title}\n\n{summary_of(route)}\n"
        if has_example and title in EXAMPLES:
            yield _example(title)
        for query in _queries(route):
            yield "Query parameters:\n"
            yield tables.object_of_a_request(query.model_json_schema())
        if model := self._body(route):
            yield from self._request(page.name, route.path, model)
        yield from self._answer(tables, route)
        errors = [str(status) for status in route.responses if status != 200]
        if errors:
            yield f"[Errors](../errors.md): {', '.join(sorted(errors))}.\n"

    def _request(self, page: str, path: str, model: type[RequestModel]) -> Iterator[str]:
        own, groups = dict[str, FieldCapability](), dict[str, list[str]]()
        lineage = list(model.__mro__)
        ordered = sorted(
            self.fields[path].items(), key=lambda item: (not item[1].required, lineage.index(_owner(model, item[0])))
        )
        for name, field in ordered:
            if group := self.groups.get((model, name)):
                groups.setdefault(group.title, []).append(name)
            else:
                own[name] = field
        if own:
            yield "Fields:\n"
            yield self._tables(page).request(own, {name: self._schema(model, name) for name in own})
        if groups:
            rows = []
            for title, names in groups.items():
                place = self._page_of_group[title]
                rows.append((f"[{title}]({'' if place == page else f'{place}.md'}#{anchor(title)})", code(names)))
            yield "Shared fields:\n"
            yield table(("described in", "fields"), rows)

    def _answer(self, tables: SchemaTables, route: APIRoute) -> Iterator[str]:
        """The answer in each of its forms, and the events of its stream where they have another form."""
        content = route.responses.get(200, {}).get("content", {})
        answer = content.get("application/json", {}).get("schema")
        if answer is None:
            return
        forms = answer.get("anyOf", [answer])
        tabled = [form for form in forms if "$ref" in form and not self.placement.has_section(name_in(form["$ref"]))]
        linked = [form for form in forms if form not in tabled]
        if linked:
            yield f"{'The answer' if not tabled else 'Or the answer'} is {tables.values({'anyOf': linked})}.\n"
        for form in tabled:
            yield "The answer:\n"
            yield tables.answer(form)
        stream = content.get(EVENT_STREAM, content.get(NDJSON, {}))
        event = stream.get("x-event-schema", answer)
        if event == answer:
            return
        if "$ref" in event and not self.placement.has_section(name_in(event["$ref"])):
            yield "Each event of a stream:\n"
            yield tables.answer(event)
        else:
            yield f"Each event of a stream is {tables.values(event)}.\n"

    def _end(self, page: str) -> Iterator[str]:
        """The groups of fields and the objects that have their place on a page."""
        tables = self._tables(page)
        for group in GROUPS:
            if self._page_of_group.get(group.title) != page:
                continue
            fields, schemas = self._fields_of_group(group.title)
            yield f"## {group.title}\n\n{group.purpose}\n"
            yield tables.request(fields, schemas)
            if group.title in AFTER_GROUP:
                yield f"{wrapped(self._filled(AFTER_GROUP[group.title])).rstrip()}\n"
        if names := self.placement.sections(page):
            if page != OBJECTS:
                yield "## Objects\n"
            for name in names:
                yield from self._object(tables, name, "##" if page == OBJECTS else "###")

    def _object(self, tables: SchemaTables, name: str, heading: str) -> Iterator[str]:
        schema = self.components[name]
        purpose = " ".join(schema.get("description", "").split())
        yield f"{heading} {self._shown(name)}\n\n{purpose}\n"
        yield tables.answer(schema) if name in self.answer_objects else tables.object_of_a_request(schema)

    @staticmethod
    def _filled(text: str) -> str:
        not_speculated = describe_fields(ChatCompletionRequest, {}, Settings())["speculation"].excludes
        return text.format(order=" → ".join(SAMPLER_ORDER), not_speculated=code(not_speculated, " and "))


def title_of(route: APIRoute) -> str:
    """Method and path."""
    (method,) = route.methods
    return f"{method} {route.path}".replace(":path}", "}")


def summary_of(route: APIRoute) -> str:
    """The description of an endpoint, in one line."""
    return " ".join((inspect.getdoc(route.endpoint) or "").split())


def anchor(heading: str) -> str:
    """The anchor that Python-Markdown gives a heading."""
    kept = "".join(character for character in heading.lower() if character.isalnum() or character in "_- ")
    return "-".join(kept.replace("-", " ").split())


def wrapped(text: str) -> str:
    """The text with the lines of its paragraphs filled; tables, lists, code and headings stay as they are."""
    blocks = text.split("\n\n")
    return "\n\n".join(
        block
        if block.lstrip().startswith(("|", "#", "```", "1.", "-", "<"))
        else textwrap.fill(block, WIDTH, break_on_hyphens=False, break_long_words=False)
        for block in blocks
    )


def _example(title: str) -> str:
    example = f"```bash\n{EXAMPLES[title]}\n```\n"
    if "$ID" not in example:
        return example
    whose = "an uploaded file" if title == "POST /v1/batches" else "the object, which the answer to its POST has"
    return f"{example}\n`$ID` is the `id` of {whose}.\n"


def _answers(route: APIRoute) -> Iterator[Any]:
    for content in route.responses.get(200, {}).get("content", {}).values():
        for key in ("schema", "x-event-schema"):
            if key in content:
                yield content[key]


def _queries(route: APIRoute) -> list[type[Query]]:
    """The models of an endpoint's query, which its function names."""
    named = inspect.getclosurevars(inspect.unwrap(route.endpoint)).globals.values()
    return [one for one in named if isinstance(one, type) and issubclass(one, Query)]


def _names(model: type[RequestModel]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


def _owner(model: type[RequestModel], name: str) -> type:
    """The class that defines a field, which may be a base."""
    attribute = next(own for own, field in model.model_fields.items() if (field.alias or own) == name)
    return next(base for base in model.__mro__ if attribute in inspect.get_annotations(base))


def _first_sentence(text: str) -> str:
    return " ".join(text.split("\n\n", maxsplit=1)[0].split())
