"""What a response says of the request that it answers: its settings, as they are in force."""

from collections.abc import Mapping
from typing import Any

from server.api.fields.rules import RequestModel
from server.api.fields.structured import JsonObjectFormat
from server.api.responses.output import OutputForm
from server.api.responses.schema import CreateResponse, JsonSchemaFormat, TextConfig
from server.api.responses.telling import Head
from server.api.responses.tools import HostedTool, QualifiedName
from server.generation.notices import as_warnings
from server.generation.planning.plan import Plan


def head_of(body: CreateResponse, plan: Plan, names: Mapping[str, QualifiedName], created: int) -> Head:
    """The head of the response to this body; `created` is in seconds of Unix time."""
    sampling = plan.requests[0].sampling
    reasoning = body.reasoning
    fields = {
        "id": plan.id,
        "object": "response",
        "created_at": created,
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": plan.model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary or reasoning.generate_summary,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.is_stored,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "text": _text(body.text),
        "tool_choice": _plain(body.tool_choice) or "auto",
        "tools": [_tool(tool) for tool in body.tools or () if not isinstance(tool, HostedTool)],
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation or "disabled",
        "seed": plan.seed,
        **({} if body.user is None else {"user": body.user}),
        **({} if body.conversation_id is None else {"conversation": {"id": body.conversation_id}}),
        **({} if plan.verification == "match" else {"verification": plan.verification}),
        **as_warnings(plan.notices),
    }
    return Head(fields, _form(body, plan, names), generates=plan.requests[0].max_tokens > 0)


def _form(body: CreateResponse, plan: Plan, names: Mapping[str, QualifiedName]) -> OutputForm:
    return OutputForm(
        names=names,
        logprobs=plan.requests[0].sampling.logprobs is not None,
        summarizes=body.reasoning is not None and body.reasoning.is_summarized,
        seals="reasoning.encrypted_content" in body.includes,
    )


def _text(asked: TextConfig | None) -> dict[str, Any]:
    verbosity = {} if asked is None or asked.verbosity is None else {"verbosity": asked.verbosity}
    form = None if asked is None else asked.format
    match form:
        case JsonSchemaFormat():
            described = {
                "name": form.name,
                "description": form.description,
                "schema": form.schema_,
                "strict": bool(form.strict),
            }
            return {"format": {"type": "json_schema", **described}, **verbosity}
        case JsonObjectFormat():
            return {"format": {"type": "json_object"}, **verbosity}
    return {"format": {"type": "text"}, **verbosity}


def _tool(tool: RequestModel) -> Any:
    """A tool as it was sent, functions with all that OpenAI's schema requires."""
    sent = _plain(tool)
    required = {"description": None, "parameters": None, "strict": False}
    return {**required, **sent} if sent["type"] == "function" else sent


def _plain(value: object) -> Any:
    return value.model_dump(exclude_none=True, by_alias=True) if isinstance(value, RequestModel) else value
