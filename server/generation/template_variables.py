"""Variables of a conversation's chat template: the request's own, and those for its reasoning settings."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn

from server.errors import InvalidRequestError, shorten
from server.generation.notices import Notice
from server.generation.request import Conversation
from server.text.chat_template import ChatTemplate

_DATE = "template_date"
"""The variable with which a request sets the date that a template shows as today's."""
_EFFORT = "reasoning_effort"
_NO_EFFORT = "none"
_SWITCHES = ("enable_thinking", "thinking")
"""Template variables that turn the reasoning on or off."""
_NO_VARIABLE = "The model's chat template has no such variable."
_NO_SWITCH = "The model's chat template has no switch for it."


def template_variables(template: ChatTemplate, conversation: Conversation) -> tuple[Mapping[str, Any], list[Notice]]:
    """The variables to render with, and notices of settings that the template does not support.

    The date that the request sets becomes the conversation's. In a conflict, the request's own variables take
    precedence, then `thinks`, then `effort`.
    """
    given = {name: value for name, value in conversation.variables.items() if value is not None}
    known = template.variables
    if template.shows_date and _DATE not in known and _DATE in given:
        conversation.clock.date = _date(given.pop(_DATE))
    wishes = _Wishes(template, conversation, {name: value for name, value in given.items() if name in known})
    notices = [Notice(f"chat_template_kwargs.{shorten(name)}", _NO_VARIABLE) for name in given if name not in known]
    notices += [*wishes.of_thinking(), *wishes.of_effort()]
    clock = {"strftime_now": conversation.clock} if template.shows_date else {}
    return {**clock, **wishes.followed, **wishes.own}, notices


def _date(value: object) -> datetime:
    """A date in ISO 8601. Raises InvalidRequestError."""
    try:
        return datetime.fromisoformat(value) if isinstance(value, str) else _not_a_date()
    except ValueError:
        return _not_a_date()


def _not_a_date() -> NoReturn:
    path = f"chat_template_kwargs.{_DATE}"
    message = f"Invalid '{path}': expected a date in ISO 8601, such as '2026-11-28' or '2026-11-28T09:30:00+01:00'."
    raise InvalidRequestError(message, param=path, code="invalid_value")


class _Wishes:
    """The reasoning settings of one conversation, and the variables that follow from them."""

    def __init__(self, template: ChatTemplate, conversation: Conversation, own: Mapping[str, Any]) -> None:
        """`own` has the request's own variables that the template knows."""
        self._known = template.variables
        self.own = own
        self._thinks = conversation.thinks
        self._effort = conversation.effort
        self._switch = next((name for name in _SWITCHES if name in self.own), None) or next(
            (name for name in _SWITCHES if name in self._known), None
        )
        self.followed: dict[str, Any] = {}

    def of_thinking(self) -> Iterator[Notice]:
        """Set the switch, or report why not."""
        if self._thinks is None:
            return
        if self._switch is None:
            yield Notice("thinking", _NO_SWITCH)
        elif self.own.get(self._switch, self._thinks) != self._thinks:
            yield Notice("thinking", _otherwise(f"chat_template_kwargs.{self._switch}"))
        else:
            self.followed[self._switch] = self._thinks

    def of_effort(self) -> Iterator[Notice]:
        """Set the effort, and turn the switch off for "none"; or report why not. Call `of_thinking` first."""
        if self._effort is None:
            return
        thinks = self._effort != _NO_EFFORT
        decided = self.own.get(self._switch, self.followed.get(self._switch)) if self._switch is not None else None
        if self.own.get(_EFFORT, self._effort) != self._effort:
            yield Notice(_EFFORT, _otherwise(f"chat_template_kwargs.{_EFFORT}"))
        elif decided is not None and bool(decided) != thinks:
            by_own = self._switch in self.own
            yield Notice(_EFFORT, _otherwise(f"chat_template_kwargs.{self._switch}" if by_own else "thinking"))
        elif _EFFORT not in self._known and (thinks or self._switch is None):
            yield Notice(_EFFORT, _NO_VARIABLE)
        else:
            self._follow_effort(self._effort)

    def _follow_effort(self, effort: str) -> None:
        if _EFFORT in self._known:
            self.followed[_EFFORT] = effort
        if effort == _NO_EFFORT and self._switch is not None:
            self.followed[self._switch] = False


def _otherwise(path: str) -> str:
    return f"Overridden by '{path}'."
