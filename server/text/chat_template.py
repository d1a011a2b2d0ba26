"""Chat templates: Jinja programs that come with a model and turn messages into a prompt's text."""

import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, meta

from server.errors import shorten
from server.text.image_marks import marks_in, parts_of
from server.text.template_sandbox import TemplateSandbox, TemplateWorkError, compile_source, metered

Message = Mapping[str, Any]

_RESERVED = frozenset({"messages", "add_generation_prompt", "raise_exception", "strftime_now", "tools", "documents"})
_logger = logging.getLogger("samewise.chat_template")
_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Errors of a template that does not accept its messages."""
_CUT_HERE = "\ue000samewise-cut\ue000"


class ChatTemplateError(Exception):
    """The template does not accept these messages."""


def at_second(unix: float) -> datetime:
    """The local date and time of a Unix time."""
    return datetime.fromtimestamp(int(unix)).astimezone()


@dataclass(slots=True)
class Clock:
    """The function `strftime_now` of templates that show the date: an input of the rendering, like the messages."""

    date: datetime | None = None
    """None: the time at which a template first shows it."""
    was_read: bool = False
    """Whether a template has shown the date."""

    def __call__(self, form: str) -> str:
        self.was_read = True
        self.date = self.date or at_second(time.time())
        return self.date.strftime(form)

    @property
    def shown(self) -> str | None:
        """The date in ISO 8601, if a template has shown it."""
        return self.date.isoformat() if self.date is not None and self.was_read else None


class TemplateLineError(ValueError):
    """A source is not a template. The message says why."""

    def __init__(self, reason: str, line: int) -> None:
        """`line` is counted from 1."""
        super().__init__(reason)
        self.line = line


def check_template(source: str) -> None:
    """Raise TemplateLineError unless the source compiles."""
    try:
        compile_source(TemplateSandbox(), source)
    except TemplateSyntaxError as error:
        raise TemplateLineError(shorten(error.message or type(error).__name__, 200), error.lineno) from error


@dataclass(frozen=True, slots=True)
class TemplateSources:
    """A model's chat templates as Jinja sources."""

    default: str
    tool_use: str | None = None
    """For requests with tools; None if the default takes them."""


class ChatTemplate:
    """A compiled chat template. Rendering runs in a sandbox and has no side effects."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], tool_use: str | None = None) -> None:
        """`tool_use` is the source for requests with tools. Raises ValueError if a source is not a valid template."""
        environment = TemplateSandbox()
        try:
            self._template = compile_source(environment, source)
            with metered():
                variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except TemplateSyntaxError as error:
            reason = shorten(error.message or type(error).__name__, 200)
            raise ValueError(f"The chat template cannot be read: line {error.lineno}: {reason}") from error
        self.variables = variables - _RESERVED - set(special_tokens)
        """Variables that a request may set."""
        self.knows_tools = "tools" in variables
        """Whether the template shows tools to the model."""
        self.shows_date = "strftime_now" in variables
        """Whether the template may show the date."""
        self.source = source
        self.with_tools = self if tool_use is None else ChatTemplate(tool_use, special_tokens)
        """The template for requests with tools."""
        self.knows_pairs = self.names_role("query") and self.names_role("document")
        """Whether the template takes a query and a document, as messages with these roles."""
        self._special_tokens = dict(special_tokens)
        self._knows_developer = "developer" in source

    @property
    def sources(self) -> TemplateSources:
        """The sources of this template and of the one for tools."""
        return TemplateSources(self.source, None if self.with_tools is self else self.with_tools.source)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The prompt's text, special tokens included. `tools` are OpenAI's objects.

        A developer message becomes a system message unless the template knows that role. A content with marks of images
        becomes a list of parts if the template shows such lists; otherwise the marks stay in the text. Raises
        ChatTemplateError, and TemplateWorkError if rendering takes more work than is allowed here.
        """
        values = {**self._special_tokens, **variables}
        try:
            return self._rendered(
                messages=[self._in_form(self._known_role(message)) for message in messages],
                tools=list(tools) or None,
                add_generation_prompt=add_generation_prompt,
                **values,
            )
        except RecursionError as error:
            raise ChatTemplateError("it recurses too deeply") from error
        except _REFUSALS as error:
            raise ChatTemplateError(str(error) or type(error).__name__) from error

    def _rendered(self, **values: Any) -> str:
        """The text of the template with these values. Raises `_REFUSALS` and TemplateWorkError."""
        with metered():
            text: str = self._template.render(**{"strftime_now": Clock(), "documents": None, **values})
            return text

    def render_open(
        self, messages: Sequence[Message], *, variables: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """The prompt's text up to the end of the last message's content, so that the model continues it.

        Raises ChatTemplateError, also if the template does not show that content unchanged.
        """
        *before, last = messages
        marked = {**last, "content": last["content"] + _CUT_HERE}
        text = self.render([*before, marked], add_generation_prompt=False, variables=variables, tools=tools)
        head, found, _ = text.rpartition(_CUT_HERE)
        if not found:
            raise ChatTemplateError("it does not show the final message as it is, so that it cannot be continued")
        return head

    def after_answer(self) -> str:
        """The text after the content of an assistant's last message; empty if the template does not show it."""
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _CUT_HERE}]
        try:
            text = self.render(messages, add_generation_prompt=False, variables={})
        except TemplateWorkError:
            _logger.warning(
                "the chat template takes long to show two short messages: chats are rendered in a worker process, and "
                "refused if they take too much work there; the setting chat_template replaces it"
            )
            return ""
        except ChatTemplateError:
            return ""
        return text.rpartition(_CUT_HERE)[2] if _CUT_HERE in text else ""

    def ignores(self, key: str, role: str, messages: Sequence[Message], *, variables: Mapping[str, Any]) -> bool:
        """Whether the prompt is the same without this key of the role's messages; False if one is refused."""
        without = [
            {name: value for name, value in message.items() if name != key or message["role"] != role}
            for message in messages
        ]
        return self._shows_alike(without, messages, variables)

    def shows_role(self, role: str, messages: Sequence[Message], *, variables: Mapping[str, Any]) -> bool:
        """Whether the prompt depends on the role's name and on the content of its messages.

        Renders four times.
        """
        renamed, longer = [], []
        for message in messages:
            is_it = message["role"] == role
            renamed.append({**message, "role": _CUT_HERE} if is_it else message)
            longer.append({**message, "content": message["content"] + _CUT_HERE} if is_it else message)
        return not any(self._shows_alike(other, messages, variables) for other in (renamed, longer))

    def names_role(self, role: str) -> bool:
        """Whether the template mentions the role, so that its author intended to support it."""
        return bool(re.search(rf"""['"]{re.escape(role)}['"]""", self.source))

    def _shows_alike(self, some: Sequence[Message], others: Sequence[Message], variables: Mapping[str, Any]) -> bool:
        """Whether both render to the same prompt. False if the template refuses either."""
        try:
            first, second = (
                self.render(messages, add_generation_prompt=False, variables=variables) for messages in (some, others)
            )
        except ChatTemplateError:
            return False
        return first == second

    def _in_form(self, message: Message) -> Message:
        """The message with its content as a string or as a list of parts, whichever the template shows."""
        content = message.get("content")
        if not isinstance(content, str):
            return message
        as_list = self._shows_lists if marks_in(content) else not self._shows_strings and self._shows_lists
        return {**message, "content": parts_of(content)} if as_list else message

    @cached_property
    def _shows_strings(self) -> bool:
        """Whether the template shows a content that is a string. Some templates for images drop it without an error."""
        return _CUT_HERE in self._probed(_CUT_HERE)

    @cached_property
    def _shows_lists(self) -> bool:
        """Whether the template shows the text of a content that is a list, and not the list itself."""
        text = self._probed([{"type": "text", "text": _CUT_HERE}])
        return _CUT_HERE in text and "'type'" not in text and '"type"' not in text

    def _probed(self, content: str | list[dict[str, str]]) -> str:
        """The prompt of a user's message with this content; empty if the template refuses it."""
        try:
            messages = [{"role": "user", "content": content}]
            return self._rendered(messages=messages, tools=None, add_generation_prompt=False, **self._special_tokens)
        except _REFUSALS:
            return ""

    def _known_role(self, message: Message) -> Message:
        if message["role"] == "developer" and not self._knows_developer:
            return {**message, "role": "system"}
        return message
