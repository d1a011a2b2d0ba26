"""Wishes of the reasoning: each reaches a template that has a variable for it, or is reported."""

from typing import Any

import pytest

from server.generation.request import Conversation
from server.generation.template_variables import template_variables
from server.text.chat_template import ChatTemplate

NONE, SWITCH, EFFORT = "{{ messages }}", "{{ enable_thinking }}", "{{ reasoning_effort }}"
ON, OFF = {"enable_thinking": True}, {"enable_thinking": False}
KWARGS = "chat_template_kwargs."


@pytest.mark.parametrize(
    ("source", "own", "thinks", "effort", "shown", "reported"),
    [
        (SWITCH, {}, False, None, OFF, {}),
        ("{{ thinking }}", {}, True, None, {"thinking": True}, {}),
        (NONE, {}, False, None, {}, {"thinking": "no switch"}),
        (EFFORT, {}, False, None, {}, {"thinking": "no switch"}),
        (SWITCH, ON, False, None, ON, {"thinking": KWARGS + "enable_thinking"}),
        (SWITCH, OFF, True, None, OFF, {"thinking": KWARGS + "enable_thinking"}),
        (SWITCH, ON, True, None, ON, {}),
        (SWITCH + "{{ thinking }}", {"thinking": True}, False, None, {"thinking": True},
         {"thinking": KWARGS + "thinking"}),
        (EFFORT, {}, None, "high", {"reasoning_effort": "high"}, {}),
        (NONE, {}, None, "high", {}, {"reasoning_effort": "no such variable"}),
        (SWITCH, {}, None, "high", {}, {"reasoning_effort": "no such variable"}),
        (NONE, {}, None, "none", {}, {"reasoning_effort": "no such variable"}),
        (SWITCH, {}, None, "none", OFF, {}),
        (SWITCH + EFFORT, {}, None, "none", {**OFF, "reasoning_effort": "none"}, {}),
        (SWITCH, ON, None, "none", ON, {"reasoning_effort": KWARGS + "enable_thinking"}),
        (SWITCH + EFFORT, OFF, None, "high", OFF, {"reasoning_effort": KWARGS + "enable_thinking"}),
        (EFFORT, {"reasoning_effort": "low"}, None, "high", {"reasoning_effort": "low"},
         {"reasoning_effort": KWARGS + "reasoning_effort"}),
        (SWITCH + EFFORT, {}, True, "high", {**ON, "reasoning_effort": "high"}, {}),
        (SWITCH, {}, False, "none", OFF, {}),
        (SWITCH, {}, True, "none", ON, {"reasoning_effort": "'thinking'"}),
        (SWITCH + EFFORT, {}, False, "high", OFF, {"reasoning_effort": "'thinking'"}),
        (EFFORT, {}, False, "high", {"reasoning_effort": "high"}, {"thinking": "no switch"}),
    ],
)  # fmt: skip
def test_a_wish_is_followed_or_reported(
    source: str,
    own: dict[str, Any],
    thinks: bool | None,
    effort: str | None,
    shown: dict[str, Any],
    reported: dict[str, str],
):
    asked = Conversation(messages=(), variables=own, thinks=thinks, effort=effort)
    variables, notices = template_variables(ChatTemplate(source, {}), asked)
    assert variables == shown
    assert [notice.path for notice in notices] == list(reported)
    assert [
        notice.reason for notice, why in zip(notices, reported.values(), strict=True) if why not in notice.reason
    ] == []
