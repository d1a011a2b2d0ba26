"""Writes docs/api.md from the request models, so that the reference cannot drift from the code.

With `--check` it writes nothing and fails if the file is not what would be written.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from server.capabilities import ENDPOINTS, FieldCapability, describe_fields

TARGET = Path(__file__).parent / "api.md"
INTRODUCTION = """\
# API reference

Written by `docs/generate.py` from the request models; `GET /v1/capabilities` says the same for the model at hand, with
its defaults, and `/docs` and `/openapi.json` describe the answers.

A field is **honoured** exactly, or has **no effect** on the output and is only validated, or is **refused** with an
error that names it. A field that is not listed is refused as unknown. `null` counts as absent everywhere. Where a
request says nothing, the model's `generation_config.json` decides, then the default below.

Other endpoints: `GET /v1/models`, `GET /v1/models/{id}`, `GET /v1/capabilities`, `GET /tokenizer_info`, `GET /health`
(the process is alive), `GET /ready` (the engine answers), `GET /metrics` (Prometheus), `GET /version`.

Processing order: contrastive, dola or guidance; logit_bias, allowed_token_ids, bad_words, min_tokens,
no_repeat_ngram_size, repetition_penalty (prompt and output), frequency_penalty and presence_penalty (output only), DRY,
exponential_decay_length_penalty; then greedy choice at temperature 0, else temperature, top_n_sigma, typical_p,
epsilon_cutoff, eta_cutoff, top_k (keeps ties), top_p, min_p, XTC, mirostat, and a draw; `sampler_order` changes the
order after the greedy choice. The noise of the draw depends on seed, choice, position and token alone. Logprobs are of
the raw distribution unless the server runs with `--logprobs processed`. [Decoding strategies](decoding.md) has the
formulas.

`penalty_alpha` (contrastive search) and `best_of` choose tokens and answers in other ways: see
[decoding strategies](decoding.md).

Special tokens written out in a prompt or a message are read as such, as in other servers of this kind.

## Speculation

Tokens are guessed ahead by one of several methods, and the model verifies several at a time. `speculation` says how
for one request; a request without it takes the server's `--speculation`. `GET /v1/capabilities` lists the methods of
the server at hand. It goes together with every other parameter: `verify` alone decides what it means for the answer.

| `verify` | the answer |
|---|---|
| `match`, the default | the same tokens and logprobs as without speculation, whatever method is used |
| `rejection` | drawn from the same distribution, but other tokens: the seed need not give the same answer again |
| `typical` | drawn from another distribution, which favours what was guessed (Medusa's typical acceptance) |

An answer that was verified by one of the latter two says so: it and all of its chunks have `"verification":
"rejection"` or `"typical"` beside `seed`.

`prediction` (OpenAI's predicted outputs) is what the answer will probably be, such as a file before a small change. Its
tokens are drafts like any other: with `match` they never change the answer. It needs the method `prediction`, which is
then the default, or `auto`, and goes together with `n`, logprobs, penalties and everything else.

`usage.completion_tokens_details` counts the draft tokens of any method, over all choices: those that became output as
`accepted_prediction_tokens`, the others that were verified as `rejected_prediction_tokens`. Only the former are among
the `completion_tokens`.

## Errors

Always `{"error": {"message", "type", "param", "code"}}`; every answer carries `x-request-id`.

| status | when |
|---|---|
| 400 | malformed, unknown, out of range, unsupported, or too long for the context (`context_length_exceeded`) |
| 400 | `no_token_left`: the request's settings ruled out every token, which shows only while the answer is made |
| 401 | no API key, or a wrong one, where keys are configured |
| 404 | unknown model or path |
| 413 | body larger than `max_body_mib` |
| 429 | queue full; `Retry-After`, `retry-after-ms` and `x-should-retry: true` say when to come back |
| 500 | a fault of the server; the message names the request id, the log has the rest |
| 503 | starting or draining; `Retry-After` and `x-should-retry: true`. While an engine is replaced, requests wait |

An error before the first token is a real status, also for a stream; after it, the stream ends with
`data: {"error": ...}` and `data: [DONE]`.
"""


def main() -> None:
    """Write or check the file."""
    text = render()
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(text)
    elif TARGET.read_text() != text:
        raise SystemExit("docs/api.md is out of date; run python docs/generate.py")


def render() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for path, request in ENDPOINTS.items():
        fields = describe_fields(request, {})
        parts.append(f"## POST {path}\n")
        parts += [_table(fields, support) for support in ("honoured", "no_effect", "refused")]
    return "\n".join(part for part in parts if part).rstrip() + "\n"


def _table(fields: Mapping[str, FieldCapability], support: str) -> str:
    """Fields that are treated alike; empty if there are none."""
    rows = {name: field for name, field in fields.items() if field.support == support}
    if not rows:
        return ""
    if support == "refused":
        names = ", ".join(f"`{name}`" for name in rows)
        return f"Refused unless they ask for nothing: {names}.\n"
    title = {"honoured": "Honoured:", "no_effect": "Validated, without effect on the output:"}[support]
    lines = [title, "", "| field | values | default | |", "|---|---|---|---|"]
    for name, field in rows.items():
        default = "required" if field.required else "" if field.default is None else f"`{json.dumps(field.default)}`"
        lines.append(f"| `{name}` | {_values(field.values)} | {default} | {_notes(field)} |")
        lines += _property_rows(name, field.values)
    return "\n".join([*lines, ""])


def _property_rows(path: str, schema: Mapping[str, Any]) -> list[str]:
    """The properties of an object that a field may be."""
    rows = [
        row for option in [*schema.get("anyOf", []), *schema.get("oneOf", [])] for row in _property_rows(path, option)
    ]
    for name, values in schema.get("properties", {}).items():
        needed = "required" if name in schema.get("required", []) else ""
        rows.append(f"| `{path}.{name}` | {_values(values)} | {needed} | {values.get('description', '')} |")
    return rows


def _notes(field: FieldCapability) -> str:
    notes = [field.description or ""]
    notes += [f"Needs `{other}`." for other in field.requires]
    if field.excludes:
        notes.append(f"Not with {', '.join(f'`{other}`' for other in field.excludes)}.")
    return " ".join(note for note in notes if note)


def _values(schema: Mapping[str, Any]) -> str:
    """A JSON schema in a few words."""
    if options := schema.get("anyOf") or schema.get("oneOf"):
        texts = [_values(option) for option in options if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(texts))
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array":
        length = _range(schema.get("minItems"), schema.get("maxItems"))
        return f"array of {_values(schema.get('items', {}))}" + (f", {length} entries" if length else "")
    low, high = schema.get("minimum"), schema.get("maximum")
    if "exclusiveMinimum" in schema:
        return f"{kind} > {schema['exclusiveMinimum']}" + (f", ≤ {high}" if high is not None else "")
    if "exclusiveMaximum" in schema:
        return f"{kind} ≥ {low}, < {schema['exclusiveMaximum']}"
    length = _range(schema.get("minLength"), schema.get("maxLength"))
    limits = _range(low, high) or (f"{length} characters" if length else "")
    return f"{kind} {limits}".strip()


def _range(low: float | None, high: float | None) -> str:
    """Bounds that somebody could meet; those of the integer type itself are left out."""
    low, high = (None if bound is None or abs(bound) >= 2**31 - 1 else bound for bound in (low, high))
    if low is None and high is None:
        return ""
    if high is None:
        return f"≥ {low}"
    if low == high:
        return f"{low}"
    return f"≤ {high}" if low is None else f"{low}..{high}"


if __name__ == "__main__":
    main()
