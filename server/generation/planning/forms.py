"""What an answer is held to, and how it is read: its constraint, its tools and the model's own formats put together."""

from dataclasses import dataclass

from model_runner.contract import Thinking
from server.errors import InvalidRequestError
from server.generation.constraints.check import check_grammar
from server.generation.constraints.errors import ConstraintError
from server.generation.constraints.fragment import Fragment, text, whole
from server.generation.notices import Notice
from server.generation.parsing.call_grammar import OfferedTool, Wanted
from server.generation.parsing.choose import READ_EVERYTHING, REASONING_TAGS, TOOL_FORMATS
from server.generation.planning.plan import Reading
from server.generation.planning.reading import ModelFormats
from server.generation.request import GenerationRequest
from server.generation.tools import ToolUse
from server.text.tokenizer import Tokenizer

_SEPARATORS = ("\n\n", "\n")
"""What models write between their reasoning and the answer, if anything."""


@dataclass(frozen=True, slots=True)
class Form:
    """Of one request's answers."""

    grammar: str | None = None
    """None: the model is free."""
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
        held = self._held(request, notices)
        grammar = None
        if held is not None:
            grammar = whole(self._after_reasoning(held, prompt, is_free=_is_free(request)))
            grammar = self._checked(grammar, request, notices)
        is_held, is_free = grammar is not None, _is_free(request)
        reading = self._formats.reading(self._tokenizer, prompt, request.tools, is_held=is_held, is_free=is_free)
        return Form(grammar, reading, self._thinking(request, prompt))

    def _thinking(self, request: GenerationRequest, prompt: str) -> Thinking | None:
        """A model without reasoning keeps to any bound."""
        if request.thinking_budget is None:
            return None
        if self._formats.reasoning is None:
            if self._formats.tool_format in READ_EVERYTHING:
                self._refuse(request.path("thinking_budget"))
            return None
        tags = REASONING_TAGS[self._formats.reasoning]
        begin, end = (tuple(self._tokenizer.encode(tag, add_special_tokens=False)) for tag in (tags.begin, tags.end))
        return Thinking(request.thinking_budget, begin, end, self._formats.is_thinking(prompt))

    def _held(self, request: GenerationRequest, notices: list[Notice]) -> Fragment | None:
        """What comes after the reasoning."""
        answer = None if request.constraint is None else request.constraint.fragment("answer")
        if request.tools is not None:
            return self._calls(request, request.tools, answer, notices)
        if answer is not None and self._formats.tool_format in READ_EVERYTHING:
            self._refuse(request.path("constraint"))
        return answer

    def _calls(
        self, request: GenerationRequest, tools: ToolUse, answer: Fragment | None, notices: list[Notice]
    ) -> Fragment | None:
        offered = [OfferedTool(tool.name, tool.parameters, tool.path, tool.is_strict) for tool in tools.callable]
        wanted = Wanted(
            offered,
            "calls",
            self._controls,
            needs_call=tools.mode == "required",
            is_parallel=tools.is_parallel,
            answer=answer,
        )
        held = TOOL_FORMATS[self._formats.tool_format].grammar(wanted)
        if held is None:
            self._leave_free(request, tools, notices)
            return None
        notices += (notice for tool in offered for notice in tool.left_out)
        return held

    def _leave_free(self, request: GenerationRequest, tools: ToolUse, notices: list[Notice]) -> None:
        """The format's calls cannot be held to anything: refuse what relies on that."""
        if tools.mode == "required":
            self._refuse(request.path("tool_choice"))
        if request.constraint is not None:
            self._refuse(request.path("constraint"))
        strict = next((tool for tool in tools.callable if tool.is_strict and not tool.is_custom), None)
        if strict is not None:
            self._refuse(strict.path.rpartition(".")[0] + ".strict")
        if not tools.is_parallel:
            path = request.path("parallel_tool_calls")
            notices.append(Notice(path, "Not enforced with this model's format of calls."))

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
        begin = None if self._formats.is_thinking(prompt) else writer.text(tags.begin)
        body = Fragment("body", f"body: {held.start}\n{held.rules}")
        if is_free:
            if not writer.is_control(tags.end):
                return held  # free text has both tags
            opened = "" if begin is None else f"({begin.start})?"
            return Fragment(f"({opened} body {writer.text(tags.end).start})? body", body.rules)
        thought = writer.until(tags.end)
        separated = f"{thought.start} ({' | '.join(text(separator).start for separator in _SEPARATORS)})?"
        before = separated if begin is None else f"({begin.start} {separated})?"
        return Fragment(f"{before} body", thought.rules + body.rules)

    def _checked(self, grammar: str, request: GenerationRequest, notices: list[Notice]) -> str | None:
        """The grammar, or none where it is too large and nothing relies on it."""
        try:
            check_grammar(grammar, request.path("constraint") or "tools")
        except ConstraintError as error:
            if not _is_free(request) or request.tools is None or any(t.is_strict for t in request.tools.callable):
                raise
            notices.append(Notice("tools", f"Calls are not held to their schemas: {error.reason}"))
            return None
        return grammar


def _is_free(request: GenerationRequest) -> bool:
    """Whether any text is an answer."""
    return request.constraint is None and (request.tools is None or request.tools.mode == "auto")
