"""Constraints on an answer and how it is parsed: its schema or grammar, its tools, and the model's own formats."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from model_runner.contract import Thinking
from server.errors import InvalidRequestError
from server.generation.constraints.check import begins, check_grammar, grammar_of
from server.generation.constraints.fragment import ConstraintError, Fragment, sequence, whole
from server.generation.notices import Notice
from server.generation.output_formats import ModelFormats, ParserConfig
from server.generation.parsing.call_grammar import GrammarBuilder, OfferedTool, optional
from server.generation.parsing.choose import FULL_OUTPUT_FORMATS, REASONING_TAGS, TOOL_FORMATS
from server.generation.request import Conversation, GenerationRequest
from server.generation.tools import ToolUse
from server.text.tokenizer import Tokenizer

_NOT_WITH_FORMAT = "Not enforced with this model's format of calls."
_SPACE = Fragment("SPACE?")
_SPACE_RULE = "SPACE: /[ \\t\\r\\n]{1,16}/\n"
"""Whitespace that models write around their reasoning, which belongs to no part. It is bounded, because a model might
otherwise continue it forever."""


@dataclass(frozen=True, slots=True)
class OutputConstraints:
    """How the answers to one request are constrained and parsed."""

    grammar: str | None = None
    """Grammar of the output; None if it is unconstrained."""
    prefix: str = ""
    """Text of the grammar that the prompt already ends with."""
    parser: ParserConfig | None = None
    """How to parse the output; None if all of it is text."""
    thinking: Thinking | None = None
    """A limit on the reasoning."""


class ConstraintRules:
    """Makes the constraints of requests to one model."""

    def __init__(self, tokenizer: Tokenizer, formats: ModelFormats) -> None:
        self._tokenizer = tokenizer
        self._formats = formats
        self._controls = {marker: token for token, marker in formats.controls(tokenizer).items()}

    def of_conversation(self, request: GenerationRequest, prompt: str, notices: list[Notice]) -> OutputConstraints:
        """Constraints on the answer to a conversation whose rendered prompt is `prompt`.

        Notices name what is not enforced. Raises ConstraintError, or InvalidRequestError for what this model's format
        does not support.
        """
        continued = _continued(request)
        if continued is not None:
            return _continuation(request, continued, notices)
        held = self._held(request, prompt, notices)
        grammar = None
        if held is not None:
            grammar = whole(self._after_reasoning(held, prompt, is_free=_is_free(request)))
            grammar = self._checked(grammar, request, notices)
        is_constrained, has_constraint = grammar is not None, request.constraint is not None
        parser = self._formats_for(request).parser_config(
            self._tokenizer, prompt, request.tools, is_constrained=is_constrained, has_constraint=has_constraint
        )
        return OutputConstraints(grammar, parser=parser, thinking=self._thinking(request, prompt))

    def _formats_for(self, request: GenerationRequest) -> ModelFormats:
        """The formats by which the answer is parsed, without reasoning if the request wants it in the text."""
        if request.separates_reasoning:
            return self._formats
        if self._formats.tool_format in FULL_OUTPUT_FORMATS:
            self._refuse(request.path("separates_reasoning"))
        return replace(self._formats, reasoning=None)

    def _thinking(self, request: GenerationRequest, prompt: str) -> Thinking | None:
        """The limit on reasoning; None for a model without reasoning, which satisfies any limit."""
        if request.thinking_budget is None:
            return None
        if self._formats.reasoning is None:
            if self._formats.tool_format in FULL_OUTPUT_FORMATS:
                self._refuse(request.path("thinking_budget"))
            return None
        tags = REASONING_TAGS[self._formats.reasoning]
        begin, end = (self._spelled(tag) for tag in (tags.begin, tags.end))
        return Thinking(request.thinking_budget, begin, end, self._formats.is_thinking(prompt))

    def _spelled(self, tag: str) -> bytes:
        """A tag as `Thinking` spells it, with control tokens marked."""
        spelled = tag.encode()
        for marker in self._controls:
            spelled = spelled.replace(marker.encode(), b"\xff" + marker.encode())
        return spelled

    def _held(self, request: GenerationRequest, prompt: str, notices: list[Notice]) -> Fragment | None:
        """The grammar of the output after the reasoning; None if it is unconstrained."""
        answer = None if request.constraint is None else request.constraint.fragment("answer")
        notices += () if answer is None else answer.notices
        if request.tools is not None:
            return self._calls(request, request.tools, prompt, answer, notices)
        if answer is not None and self._formats.tool_format in FULL_OUTPUT_FORMATS:
            self._refuse(request.path("constraint"))
        return answer

    def _calls(
        self, request: GenerationRequest, tools: ToolUse, prompt: str, answer: Fragment | None, notices: list[Notice]
    ) -> Fragment | None:
        offered = [
            OfferedTool(tool.name, tool.schema, tool.path, tool.is_strict, tool.pattern, request.opens_objects)
            for tool in tools.callable
        ]
        for one in offered:
            one.check_root()
        builder = GrammarBuilder(
            offered,
            "calls",
            self._controls,
            needs_call=tools.mode == "required",
            is_parallel=tools.is_parallel,
            is_thinking=self._formats.is_thinking(prompt),
            answer=answer,
        )
        held = TOOL_FORMATS[self._formats.tool_format].grammar(builder)
        if held is None:
            self._leave_free(request, tools, notices)
            return None
        for tool, one in zip(tools.callable, offered, strict=True):
            notices += tool.left_out
            notices += (Notice(tool.path, left.reason) if tool.is_custom else left for left in one.left_out)
        return held

    def _leave_free(self, request: GenerationRequest, tools: ToolUse, notices: list[Notice]) -> None:
        """The format's calls cannot be constrained: refuse what relies on that, and report the rest."""
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
        """The grammar with the reasoning before it.

        If any text is an answer, a call can end the reasoning, so the grammar applies there, too.
        """
        if self._formats.reasoning is None:
            return held
        tags = REASONING_TAGS[self._formats.reasoning]
        writer = GrammarBuilder((), "thought", self._controls)
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
        """The grammar; None if it is too large and no strict feature relies on it."""
        try:
            check_grammar(grammar, request.path("constraint") or "tools")
        except ConstraintError as error:
            tools = request.tools
            if not _is_free(request) or tools is None or any(tool.is_strict for tool in tools.callable):
                raise
            notices.append(Notice("tools", f"The tools' schemas are not enforced: {error.reason}"))
            notices += _not_counted(request, tools, "Not enforced, because the tools' schemas are not.")
            return None
        return grammar


def _continued(request: GenerationRequest) -> str | None:
    """The text with which a constrained answer already begins; None if it does not continue a message."""
    prompt = request.prompts[0]
    if _is_free(request) or not isinstance(prompt, Conversation) or not prompt.continue_last:
        return None
    return str(prompt.messages[-1]["content"])


def _continuation(request: GenerationRequest, begun: str, notices: list[Notice]) -> OutputConstraints:
    """Constraints on the rest of a structured answer, which is neither reasoning nor a call."""
    path = request.path("continue_last")
    if request.constraint is None or request.tools is not None:
        other = request.path("tool_choice") if request.constraint is None else "tools"
        message = f"Setting '{path}' and '{other}' at the same time is not supported with structured output."
        raise InvalidRequestError(message, param=path, code="invalid_parameter_combination")
    constraint = request.path("constraint")
    grammar = grammar_of(request.constraint, constraint, notices)
    if not begins(grammar, begun):
        message = f"Invalid '{path}': the final message's content does not begin an answer that fits '{constraint}'."
        raise InvalidRequestError(message, param=path, code="invalid_value")
    return OutputConstraints(grammar, begun)


def _is_free(request: GenerationRequest) -> bool:
    """Whether any text is a valid answer."""
    return request.constraint is None and (request.tools is None or request.tools.mode == "auto")


def _not_counted(request: GenerationRequest, tools: ToolUse, reason: str) -> Sequence[Notice]:
    """The notice for `parallel_tool_calls` if several calls are not allowed but cannot be prevented."""
    return () if tools.is_parallel else (Notice(request.path("parallel_tool_calls"), reason),)
