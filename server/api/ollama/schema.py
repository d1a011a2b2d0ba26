"""Request schemas of POST /api/chat and /api/generate, and their conversion to generation requests."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from server.api.fields.decoding import NumAlternatives
from server.api.fields.reasoning import Think
from server.api.fields.rules import SUPPORTED_ONLY, RequestModel, hint, problem, refused, related, same_as
from server.api.fields.structured import GuidedFields
from server.api.ollama.messages import MAX_TOOLS, History, OllamaMessage, OllamaTool, tool_use, with_images
from server.api.ollama.options import OllamaOptions, with_ollama_defaults
from server.api.ollama.served import name_for, thinks
from server.errors import InvalidRequestError
from server.generation.constraints.fragment import Constraint
from server.generation.constraints.json_schema import JsonObject, JsonSchema
from server.generation.notices import Notice
from server.generation.request import Conversation, FillIn, GenerationRequest, Prompt, TextPrompt
from server.generation.sent_images import SentImages
from server.generation.served_model import ServedModel
from server.models.residence import StayBounds
from server.text.tokenizer import Tokenizer

MODEL = "Name of the served model, in any case, with or without `:latest`."
LONGEST_DURATION = 100
"""Characters of the longest duration that is read."""
_PART = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")
_DURATION = re.compile(rf"[+-]?(?:(?:{_PART.pattern})+|0)")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_NO_OPTIONS = OllamaOptions()
_PATHS = {
    "prompt": "messages",
    "max_tokens": "options.num_predict",
    "thinking": "think",
    "reasoning_effort": "think",
    "repetition_penalty": "options.repeat_penalty",
    "logprobs": "top_logprobs",
    "constraint": "format",
}


def _check_duration(value: float | str) -> float | str:
    """Refuse texts that are not durations."""
    if isinstance(value, str) and (len(value) > LONGEST_DURATION or not _DURATION.fullmatch(value)):
        raise problem("invalid_value", "Invalid '{path}': expected seconds, or a duration such as '5m' or '-1s'.")
    return value


def seconds_of(duration: float | str) -> float:
    """The seconds of a valid duration; infinite if it is negative."""
    if not isinstance(duration, str):
        return math.inf if duration < 0 else duration
    if duration.startswith("-"):
        return math.inf
    return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(duration))


KeepAlive = Annotated[
    Annotated[float, Tag("<number>")] | Annotated[str, Tag("<string>")],
    Discriminator(lambda value: "<string>" if isinstance(value, str) else "<number>"),
    AfterValidator(_check_duration),
]
Format = Annotated[
    Annotated[Literal["", "json"], Tag("<string>")] | Annotated[dict[str, Any], Tag("<object>")],
    Discriminator(lambda value: "<string>" if isinstance(value, str) else "<object>"),
]


class KeptFields(RequestModel):
    """The model and how long it stays loaded: fields of every request that uses it."""

    model: str = Field(description=MODEL)
    options: OllamaOptions | None = Field(None, description="Settings by Ollama's names.")
    keep_alive: KeepAlive | None = Field(
        None,
        description="How long the model stays loaded after the request: seconds, or a duration. Negative: for ever. "
        "The longest wish of all requests counts, within what the operator has set; reported where it has no effect.",
        json_schema_extra={"x-support": "hint"},
    )

    @property
    def keep_s(self) -> float | None:
        """`keep_alive` in seconds; infinite for ever."""
        return None if self.keep_alive is None else seconds_of(self.keep_alive)

    def kept(self, bounds: StayBounds) -> Iterator[Notice]:
        """A notice if the model stays for another time than `keep_alive` says."""
        if self.keep_s is None or (stay_s := bounds.stay_of(self.keep_s)) == self.keep_s:
            return
        if bounds.fixed is not None:
            yield Notice("keep_alive", f"The model stays loaded: {bounds.fixed}.")
        elif stay_s < self.keep_s:
            yield Notice("keep_alive", f"The model stays loaded for at most {stay_s:g} s after a request (idle_s).")
        else:
            reason = f"The model stays loaded for at least {stay_s:.3g} s, so that it is not loaded again all the time."
            yield Notice("keep_alive", reason)

    @property
    def set_options(self) -> OllamaOptions:
        """The options, or none."""
        return self.options or _NO_OPTIONS


class NamedFields(RequestModel):
    """The model of a request that does not use it, by one of two fields."""

    model: str | None = Field(None, description=f"{MODEL} Either this or `name` is required.")
    name: str | None = same_as("model", "Older name.")

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        if self.model is None and self.name is None:
            raise problem("missing_required_parameter", "Missing required parameter: 'model'.", "model")
        return self

    @property
    def named(self) -> str:
        """The name in the request."""
        return self.model or self.name or ""


class OllamaFields(KeptFields, GuidedFields):
    """The fields that POST /api/chat and POST /api/generate share."""

    stream: bool | None = Field(
        None, description="Answer with a JSON object a line; on by default.", json_schema_extra={"x-default": True}
    )
    format: Format | None = Field(
        None,
        description="`json`: any JSON object. An object: JSON by this schema; keywords that cannot be enforced are "
        "ignored and reported.",
    )  # fmt: skip
    think: Think | None = Field(
        None, description="Whether to think first, or how much. Refused if the model cannot think, except `false`. "
        "Ignored and reported if the chat template has no switch for it.",
        json_schema_extra=related(excludes=["raw", "suffix"]),
    )  # fmt: skip
    logprobs: bool | None = Field(None, description="Report the log-probability of each token.")
    top_logprobs: NumAlternatives | None = Field(
        None, description="Report this many alternatives for each token, at most the setting `max_logprobs`.",
        json_schema_extra=related(requires=["logprobs"]),
    )  # fmt: skip
    shift: bool | None = hint(
        "Whether the context shifts when it is full.", "The context does not shift: an answer ends when it is full."
    )

    @property
    def only_loads(self) -> bool:
        """Whether the request only asks for the model to be loaded or unloaded."""
        raise NotImplementedError

    @property
    def writes_json(self) -> bool:
        return bool(self.format)

    @property
    def constraint(self) -> Constraint | None:
        """The requested form of the text. Raises ConstraintError."""
        if isinstance(self.format, dict):
            return JsonSchema(self.format, "format", self.json_style, is_strict=False)
        return JsonObject(self.json_style) if self.format == "json" else None


class OllamaChatRequest(OllamaFields):
    """Request schema for POST /api/chat."""

    messages: list[OllamaMessage] | None = Field(
        None,
        description="The conversation, oldest first. Without messages, the answer only says that the model is loaded.",
    )
    tools: list[OllamaTool] | None = Field(
        None, max_length=MAX_TOOLS, fail_fast=True, description="Tools that the model may call."
    )
    truncate: bool | None = Field(
        None,
        description="Whether the oldest messages of a conversation that is too long are dropped and reported; on by "
        "default. If off, it is refused.",
        json_schema_extra={"x-default": True, **related(on=True)},
    )  # fmt: skip

    @property
    def only_loads(self) -> bool:
        return not self.messages

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        names: set[str] = set()
        for index, tool in enumerate(self.tools or ()):
            if tool.function.name in names:
                path = f"tools[{index}]"
                message = f"Invalid '{path}': there are two tools called '{tool.function.name}'."
                raise problem("invalid_value", message, path)
            names.add(tool.function.name)
        return self


class OllamaGenerateRequest(OllamaFields):
    """Request schema for POST /api/generate."""

    prompt: str | None = Field(
        None,
        description="The user's message. It is a text to continue with `raw`, and for a model without a chat template. "
        "Without a prompt, the answer only says that the model is loaded.",
    )  # fmt: skip
    system: str | None = Field(
        None, description="The system prompt.", json_schema_extra=related(excludes=["raw", "suffix"])
    )
    suffix: str | None = Field(
        None, description="The text after a gap that follows the prompt, for models that fill in the middle.",
        json_schema_extra=related(excludes=["raw"]),
    )  # fmt: skip
    raw: bool | None = Field(None, description="Continue the prompt as it is, without the chat template.")
    truncate: bool | None = hint("Whether to cut a prompt that is too long.", "A prompt that is too long is refused.")
    images: list[str] | None = Field(
        None, description="Images in base64. The model sees them before the prompt.",
        json_schema_extra=related(excludes=["raw", "suffix"]),
    )  # fmt: skip
    template: Annotated[Literal[""] | None, SUPPORTED_ONLY] = refused("A prompt template in Go's format.")
    context: Annotated[Annotated[list[Any], Field(max_length=0)] | None, SUPPORTED_ONLY] = refused(
        "Tokens of the conversation so far: send the conversation to /api/chat instead."
    )
    width: Annotated[Literal[0] | None, SUPPORTED_ONLY] = refused("Width of an image to generate.")
    height: Annotated[Literal[0] | None, SUPPORTED_ONLY] = refused("Height of an image to generate.")
    steps: Annotated[Literal[0] | None, SUPPORTED_ONLY] = refused("Steps of generating an image.")

    @property
    def only_loads(self) -> bool:
        return not (self.prompt or self.suffix or self.images)

    def without_template(self) -> "tuple[OllamaGenerateRequest, Sequence[Notice]]":
        """The request for a model without a chat template, which continues the prompt, and notices of what is dropped.

        As in Ollama, whose template is then nothing but the prompt.
        """
        if self.suffix or self.raw or self.images:
            return self, ()
        reason = "The model has no chat template: it continues the prompt, and gets nothing else."
        notices = [Notice("system", reason)] if self.system else []
        return self.model_copy(update={"raw": True}), notices


def chat_intent(body: OllamaChatRequest) -> GenerationRequest:
    """Convert a body of POST /api/chat; `for_model` completes it."""
    history = History(body.messages or ())
    tools = tool_use(body.tools)
    conversation = Conversation(
        messages=tuple(history.messages),
        tools=() if tools is None else tuple(tool.for_template() for tool in tools.tools),
        drops_oldest=body.truncate is not False,
        images=history.images.all,
        **_thinking(body),
    )
    return _request(body, conversation, history.paths, tools=tools)


def generate_intent(body: OllamaGenerateRequest) -> GenerationRequest:
    """Convert a body of POST /api/generate; `for_model` completes it."""
    text = body.prompt or ""
    prompt: Prompt
    if body.suffix:
        prompt = FillIn([text], body.suffix, "prompt", "suffix")
    elif body.raw:
        prompt = TextPrompt(text)
    else:
        system = [{"role": "system", "content": body.system}] if body.system else []
        sent = SentImages()
        message = {"role": "user", "content": with_images(text, body.images, sent, "images")}
        prompt = Conversation(messages=(*system, message), images=sent.all, **_thinking(body))
    return _request(body, prompt, {"prompt": "prompt"})


def _thinking(body: OllamaFields) -> dict[str, Any]:
    """The arguments of a Conversation for `think`."""
    is_level = isinstance(body.think, str)
    return {"thinks": True if is_level else body.think, "effort": body.think if is_level else None}


def _request(body: OllamaFields, prompt: Prompt, paths: dict[str, str], **more: Any) -> GenerationRequest:
    options, constraint = body.set_options, body.constraint
    return GenerationRequest(
        model=body.model,
        prompts=(prompt,),
        id_prefix="gen-",
        decoding=options.decoding,
        max_tokens=options.num_tokens,
        may_fill_context=options.num_tokens is None,
        seed=None if options.seed == -1 else options.seed,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        constraint=constraint,
        stream=body.stream is not False,
        paths={**_PATHS, **paths},
        notices=tuple(body.ignored()),
        **more,
    )


def for_model(request: GenerationRequest, model: ServedModel, tokenizer: Tokenizer) -> GenerationRequest:
    """The request with the served model's name, and with Ollama's defaults where the model has none.

    Raises NotFoundError if there is no model of this name, and InvalidRequestError if it shall think and cannot.
    """
    name = name_for(model, request.model or "")
    decoding = with_ollama_defaults(request.decoding, model.defaults.values)
    prompts = [_thinking_by(prompt, model, tokenizer) for prompt in request.prompts]
    return replace(request, model=name, decoding=decoding, prompts=tuple(prompts))


def _thinking_by(prompt: Prompt, model: ServedModel, tokenizer: Tokenizer) -> Prompt:
    """The prompt with the thinking that this model has: on or off, a level, or none."""
    if not isinstance(prompt, Conversation) or prompt.thinks is None:
        return prompt
    if not thinks(model):
        if prompt.thinks:
            message = f'"{model.name}" does not support thinking'
            raise InvalidRequestError(message, param="think", code="unsupported_value")
        return replace(prompt, thinks=None)
    template = tokenizer.chat_template
    has_levels = template is not None and "reasoning_effort" in template.variables
    return replace(prompt, thinks=None) if prompt.effort is not None and has_levels else prompt
