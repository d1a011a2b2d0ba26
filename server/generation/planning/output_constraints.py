"""What an answer is held to, and how it is read: its constraint, its tools and the model's own formats put together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from model_runner.contract import Thinking
from server.errors import InvalidRequestError
from server.generation.constraints.check import begins, check_grammar, grammar_of
from server.generation.constraints.fragment import ConstraintError, Fragment, sequence, whole
from server.generation.notices import Notice
from server.generation.output_formats import ModelFormats, Reading
from server.generation.parsing.call_grammar import OfferedTool, Wanted, optional
from server.generation.parsing.choose import READ_EVERYTHING, REASONING_TAGS, TOOL_FORMATS
from server.generation.request import Conversation, GenerationRequest
from server.generation.tools import ToolUse
from server.text.tokenizer import Tokenizer

_NOT_WITH_FORMAT = "Not enforced with this model's format of calls."
_SPACE = Fragment("SPACE?")
_SPACE_RULE = "SPACE: /[ \\t\\r\\n]{1,16}/\n"
"""What models write before their reasoning, and between it and the answer: belongs to neither. Bounded, since a model
that may write any number goes on for ever."""


@dataclass(frozen=True, slots=True)
class Form:
    """Of one request's answers."""

    grammar: str | None = None
    """None: the model is free."""
    prefix: str = ""
    """Of what the grammar allows: the prompt ends with it."""
    reading: Reading | None = None
    """None: all of it is text."""
    thinking: Thinking | None = None
    """A bound on the reasoning."""


class FormRules:
    """What requests can ask for, of one model."""

    def __init__(self, tokenizer: Tokenizer, formats: ModelFormats) -> None:
        self._tokenizer = tokenizer
        self._formats = formats
        self._controls = {marker: token for token, marker in formats.controls(tokenizer).items()}

    def of_conversation(self, request: GenerationRequest, prompt: str, notices: list[Notice]) -> Form:
        """For the answer to a prompt that ends with this text; adds what cannot be enforced to `notices`.

        Raises ConstraintError, or InvalidRequestError for what this model's format does not allow for.
        """
        continued = _continued(request)
        if continued is not None:
            return _continuation(request, continued)
        held = self._held(request, prompt, notices)
        grammar = None
        if held is not None:
            grammar = whole(self._after_reasoning(held, prompt, is_free=_is_free(request)))
            grammar = self._checked(grammar, request, notices)
        is_held, has_form = grammar is not None, request.constraint is not None
        reading = self._formats_for(request).reading(
            self._tokenizer, prompt, request.tools, is_held=is_held, has_form=has_form
        )
        return Form(grammar, reading=reading, thinking=self._thinking(request, prompt))

    def _formats_for(self, request: GenerationRequest) -> ModelFormats:
        """By which the answer is read: without reasoning, where the request wants it in the text."""
        if request.separates_reasoning:
            return self._formats
        if self._formats.tool_format in READ_EVERYTHING:
            self._refuse(request.path("separates_reasoning"))
        return replace(self._formats, reasoning=None)

    def _thinking(self, request: GenerationRequest, prompt: str) -> Thinking | None:
        """A model without reasoning keeps to any bound."""
        if request.thinking_budget is None:
            return None
        if self._formats.reasoning is None:
            if self._formats.tool_format in READ_EVERYTHING:
                self._refuse(request.path("thinking_budget"))
            return None
        tags = REASONING_TAGS[self._formats.reasoning]
        begin, end = (self._spelled(tag) for tag in (tags.begin, tags.end))
        return Thinking(request.thinking_budget, begin, end, self._formats.is_thinking(prompt))

    def _spelled(self, tag: str) -> bytes:
        """A tag as Thinking has it."""
        spelled = tag.encode()
        for marker in self._controls:
            spelled = spelled.replace(marker.encode(), b"\xff" + marker.encode())
        return spelled

    def _held(self, request: GenerationRequest, prompt: str, notices: list[Notice]) -> Fragment | None:
        """What comes after the reasoning."""
        answer = None if request.constraint is None else request.constraint.fragment("answer")
        if request.tools is not None:
            return self._calls(request, request.tools, prompt, answer, notices)
        if answer is not None and self._formats.tool_format in READ_EVERYTHING:
            self._refuse(request.path("constraint"))
        return answer

    def _calls(
        self, request: GenerationRequest, tools: ToolUse, prompt: str, answer: Fragment | None, notices: list[Notice]
    ) -> Fragment | None:
        offered = [
            OfferedTool(tool.name, tool.schema, tool.path, tool.is_strict, tool.pattern) for tool in tools.callable
        ]
        for one in offered:
            one.check_root()
        wanted = Wanted(
            offered,
            "calls",
            self._controls,
            needs_call=tools.mode == "required",
            is_parallel=tools.is_parallel,
            is_thinking=self._formats.is_thinking(prompt),
            answer=answer,
        )
        held = TOOL_FORMATS[self._formats.tool_format].grammar(wanted)
        if held is None:
            self._leave_free(request, tools, notices)
            return None
        for tool, one in zip(tools.callable, offered, strict=True):
            notices += tool.left_out
            notices += (Notice(tool.path, left.reason) if tool.is_custom else left for left in one.left_out)
        return held

    def _leave_free(self, request: GenerationRequest, tools: ToolUse, notices: list[Notice]) -> None:
        """The format's calls cannot be held to anything: refuse what relies on that."""
        if tools.mode == "required":
            self._refuse(request.path("tool_choice"))
        if request.constraint is not None:
            self._refuse(request.path("constraint"))
        strict = next((tool for tool in tools.callable if tool.is_strict), None)
        if strict is not None:
            self._refuse(strict.path.rpartition(".")[0] + ".strict")
        notices += (Notice(tool.path, _NOT_WITH_FORMAT) for tool in tools.callable if tool.is_custom and tool.path)
        notices += _not_counted(request, tools, _NOT_WITH_FORMAT)

    def _refuse(self, path: str) -> None:
        message = f"Unsupported parameter: '{path}' cannot be enforced with this model's format of answers, "
        name = f"'{self._formats.tool_format}'."
        raise InvalidRequestError(message + name, param=path, code="unsupported_parameter")

    def _after_reasoning(self, held: Fragment, prompt: str, *, is_free: bool) -> Fragment:
        """With the reasoning before it, which a call ends where any text is an answer, and is held there, too."""
        if self._formats.reasoning is None:
            return held
        tags = REASONING_TAGS[self._formats.reasoning]
        writer = Wanted((), "thought", self._controls)
        is_begun = self._formats.is_thinking(prompt)
        begin = sequence(_SPACE, writer.text(tags.begin))
        body = Fragment("body")
        if is_free:
            if not writer.is_control(tags.end):
                return held  # free text has both tags
            thought = sequence(body, writer.text(tags.end))
            whole_thought = thought if is_begun else sequence(optional(begin), thought)
            answer = sequence(optional(whole_thought), body)
        else:
            thought = sequence(writer.until(tags.end), _SPACE)
            answer = sequence(thought if is_begun else optional(sequence(begin, thought)), body)
        return Fragment(answer.start, f"{answer.rules}{_SPACE_RULE}body: {held.start}\n{held.rules}")

    def _checked(self, grammar: str, request: GenerationRequest, notices: list[Notice]) -> str | None:
        """The grammar, or none where it is too large and nothing relies on it."""
        try:
            check_grammar(grammar, request.path("constraint") or "tools")
        except ConstraintError as error:
            tools = request.tools
            if not _is_free(request) or tools is None or any(tool.is_strict for tool in tools.callable):
                raise
            notices.append(Notice("tools", f"Calls are not held to their schemas: {error.reason}"))
            notices += _not_counted(request, tools, "Not enforced where calls are not held to their schemas.")
            return None
        return grammar


def _continued(request: GenerationRequest) -> str | None:
    """The text that the answer of a form goes on with; None if it begins anew, or has no form."""
    prompt = request.prompts[0]
    if _is_free(request) or not isinstance(prompt, Conversation) or not prompt.continue_last:
        return None
    return str(prompt.messages[-1]["content"])


def _continuation(request: GenerationRequest, begun: str) -> Form:
    """The rest of an answer of a form, which is no reasoning and no call."""
    path = request.path("continue_last")
    if request.constraint is None or request.tools is not None:
        other = request.path("tool_choice") if request.constraint is None else "tools"
        message = (
            f"Setting '{path}' and '{other}' at the same time is not supported for an answer that is held to a form."
        )
        raise InvalidRequestError(message, param=path, code="invalid_parameter_combination")
    form = request.path("constraint")
    grammar = grammar_of(request.constraint, form)
    if not begins(grammar, begun):
        message = f"Invalid '{path}': the content of the final message does not begin an answer that fits '{form}'."
        raise InvalidRequestError(message, param=path, code="invalid_value")
    return Form(grammar, begun)


def _is_free(request: GenerationRequest) -> bool:
    """Whether any text is an answer."""
    return request.constraint is None and (request.tools is None or request.tools.mode == "auto")


def _not_counted(request: GenerationRequest, tools: ToolUse, reason: str) -> Sequence[Notice]:
    """What is to be told where nothing keeps a model from calling more than once."""
    return () if tools.is_parallel else (Notice(request.path("parallel_tool_calls"), reason),)
