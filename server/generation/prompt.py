"""From a request's prompt to its tokens."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from server.errors import InvalidRequestError, shorten
from server.generation.generic_tools import spelled_out, with_description
from server.generation.notices import Notice
from server.generation.request import ContextFile, Conversation, FillIn, TextPrompt
from server.generation.template_variables import template_variables
from server.text.chat_template import ChatTemplate, ChatTemplateError
from server.text.fill_in import FillInTokens
from server.text.image_marks import guard, index_of, is_mark, marks_in, split_at_marks
from server.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
_SYSTEM = ("system", "developer")
_SPEAKERS = ("user", "assistant")


def one_system_message(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages with all system messages merged into one at the beginning."""
    system = [message for message in messages if message["role"] in _SYSTEM]
    others = [message for message in messages if message["role"] not in _SYSTEM]
    return [_merged(system), *others] if system else others


def one_turn_each(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages with successive messages of the user, or of the assistant, merged into one."""
    turns: list[Message] = []
    for role, group in groupby(messages, key=lambda message: message["role"]):
        same = list(group)
        turns += [_merged(same)] if role in _SPEAKERS else same
    return turns


def _merged(messages: Sequence[Message]) -> Message:
    """One message with the content of all; of keys that cannot be joined, the last value."""
    whole: dict[str, Any] = {key: value for message in messages for key, value in message.items()}
    whole["role"] = messages[0]["role"]
    for key in ("content", "reasoning_content"):
        if key in whole:
            whole[key] = "\n\n".join(message[key] for message in messages if message.get(key))
    if "tool_calls" in whole:
        whole["tool_calls"] = [call for message in messages for call in message.get("tool_calls", ())]
    return whole


Messages = Sequence[Mapping[str, Any]]
ROLES = ("developer", "system", "user", "assistant", "tool")
"""Roles that most templates support. For templates that lack one, messages are rewritten."""
MAX_OTHER_ROLES = 4
"""Limit on further roles, because the conversation is rendered several times for each."""
MAY_SHOW = ("name", "reasoning_content")
"""Message keys that the template may not show; they are then ignored and reported."""
_NOT_SHOWN = "The model's chat template does not show it."
_SAME = ("role", "content")
_MARK = "\ue000{}\ue001"
"""Marks a message by its index."""
_UNMISTAKABLE = 8
"""Characters from which a content is not found by chance in a template's own text."""
_MAX_SEARCHED = 8
"""Contents that are searched for in vain before the others are not searched for at all: each search takes long."""
_PROJECT, _FILE, _OPEN_FILE = "myproject", "tmp", "filename"
"""Placeholder names of the project, of a file without a name, and of the file with the gap."""
_SNIPPET = "\n\n--- snippet ---\n\n"
"""Heading of each file in the prompt of a model without a multi-file format."""


@dataclass(frozen=True, slots=True)
class ImageTexts:
    """How a chat template writes images."""

    placeholder: str
    """The text that it writes for an image in a list of parts."""
    around: tuple[str, str]
    """Texts before and after an image, which a template that shows only strings does not write."""
    typed: tuple[str, ...]
    """Tokens that stay text where a client types them."""


def read_prompt(
    tokenizer: Tokenizer,
    prompt: TextPrompt | Conversation,
    path: str = "messages",
    images: ImageTexts | None = None,
) -> tuple[str, list[Notice]]:
    """The prompt's text, including the special tokens that it writes itself, and notices of ignored parts.

    Raises InvalidRequestError if there is no chat template, or the template refuses the conversation; errors name
    `path`.
    """
    if isinstance(prompt, TextPrompt):
        return prompt.text, []
    return render(tokenizer.chat_template, prompt, path, images)


def encode(tokenizer: Tokenizer, text: str, prompt: TextPrompt | Conversation | None = None) -> list[int]:
    """The tokens of a prompt's text, with the special tokens that begin and end every text if the prompt wants them.

    Without a prompt, only the text's own tokens.
    """
    return tokenizer.encode(text, add_special_tokens=prompt is not None and prompt.adds_special)


def encode_pieces(tokenizer: Tokenizer, pieces: Sequence[str | int]) -> list[int]:
    """The tokens of a prompt in pieces, with the special tokens that begin a text if the first is a text."""
    tokens: list[int] = []
    for index, piece in enumerate(pieces):
        if isinstance(piece, int):
            tokens.append(piece)
        else:
            tokens += tokenizer.beginning_ids if index == 0 else ()
            tokens += tokenizer.encode(piece, add_special_tokens=False)
    return tokens


def encode_fill_in(tokenizer: Tokenizer, prompt: FillIn) -> list[int]:
    """The tokens of a text with a gap, in the format of the model's family.

    Special tokens spelled in the texts are encoded as ordinary text. Raises InvalidRequestError if the model has no
    fill-in tokens.
    """
    marks = tokenizer.fill_in
    if marks is None:
        message = (
            f"Unsupported parameter: '{prompt.after_path}' needs a model with tokens for filling in the middle, such "
            "as <|fim_prefix|>, and this model's tokenizer has none that are known. Please use another model."
        )
        raise InvalidRequestError(message, param=prompt.after_path, code="unsupported_parameter")
    before: list[int] = []
    for part in prompt.before:
        before += [part] if isinstance(part, int) else tokenizer.encode_literally(part, continues=bool(before))
    gap = marks.around(before, tokenizer.encode_literally(prompt.after, continues=True))
    return [*tokenizer.beginning_ids, *_files_before(tokenizer, marks, prompt.files), *gap]


def _files_before(tokenizer: Tokenizer, marks: FillInTokens, files: Sequence[ContextFile] | None) -> list[int]:
    """The tokens that show other files before a text with a gap, as in llama.cpp."""
    if files is None:
        return []
    if marks.repository is None or marks.file is None:
        return [token for file in files for token in tokenizer.encode_literally(_SNIPPET + file.text)]
    tokens = [marks.repository, *tokenizer.encode_literally(f"{_PROJECT}\n")]
    for file in files:
        name = tokenizer.encode_literally(f"{_FILE if file.name is None else file.name}\n")
        tokens += [marks.file, *name, *tokenizer.encode_literally(file.text)]
    return [*tokens, marks.file, *tokenizer.encode_literally(f"{_OPEN_FILE}\n")]


def render(
    template: ChatTemplate | None,
    conversation: Conversation,
    path: str = "messages",
    images: ImageTexts | None = None,
) -> tuple[str, list[Notice]]:
    """The conversation's text, special tokens included, and notices of parts that the template does not show.

    In the text, images are marks. Raises InvalidRequestError as `read_prompt` does, and for an image that the template
    does not show.
    """
    if template is None:
        message = "This model has no chat template. Use /v1/completions."
        raise InvalidRequestError(message, param=path, code="unsupported_parameter")
    if conversation.continue_last and not conversation.messages[-1]["content"]:
        message = "'continue_final_message' needs a final message with content."
        raise InvalidRequestError(message, param="continue_final_message", code="invalid_value")
    template = template.with_tools if conversation.tools else template
    if images is not None:
        messages, tools = guard((tuple(conversation.messages), tuple(conversation.tools)), images.typed)
        conversation = replace(conversation, messages=messages, tools=tools)
    variables, notices = template_variables(template, conversation)
    try:
        with_tools = _with_tools(template, conversation, variables)
        taken, text = _shown(template, with_tools, variables, notices)
        if images is not None and conversation.images:
            text = _with_marks(template, taken, variables, text, images)
        notices += _not_shown(template, conversation.messages, taken.messages, variables)
        notices += _unnamed_roles(template, conversation.messages, taken.messages, variables, path)
    except ChatTemplateError as error:
        raise _unacceptable(conversation.messages, shorten(str(error), 200), path) from error
    return text, notices


def _with_marks(
    template: ChatTemplate, taken: Conversation, variables: Mapping[str, Any], text: str, images: ImageTexts
) -> str:
    """The text with marks in the places of its images: where the template has left them or written placeholders.

    Typed placeholders are guarded, so these are all the template's. Raises InvalidRequestError for an image without a
    place.
    """
    marks = [mark for message in taken.messages for mark in marks_in(message["content"])]
    if sorted(marks_in(text)) == sorted(marks):
        before, after = images.around
        return "".join(f"{before}{piece}{after}" if is_mark(piece) else piece for piece in split_at_marks(text))
    pieces = text.split(images.placeholder)
    if len(pieces) - 1 != len(marks):
        raise _unshown_image(template, taken, variables, len(pieces) - 1, images.placeholder)
    return "".join(piece + mark for piece, mark in zip(pieces, [*marks, ""], strict=True))


def _unshown_image(
    template: ChatTemplate, taken: Conversation, variables: Mapping[str, Any], num_places: int, placeholder: str
) -> InvalidRequestError:
    """The error for the first message whose images have no places in the prompt."""
    messages = list(taken.messages)
    found = [(index, marks) for index, message in enumerate(messages) if (marks := marks_in(message["content"]))]
    at, marks = found[0]
    for at, marks in found:
        plain = "".join(piece for piece in split_at_marks(messages[at]["content"]) if not is_mark(piece))
        without = [*messages[:at], {**messages[at], "content": plain}, *messages[at + 1 :]]
        text = _text(template, replace(taken, messages=without), variables)
        if num_places - text.count(placeholder) != len(marks):
            break
    path = taken.images[index_of(marks[0])].path
    role = messages[at]["role"]
    message = f"Invalid '{path}': the model's chat template does not show images in messages of the role '{role}'."
    return InvalidRequestError(message, param=path, code="invalid_value")


def _with_tools(template: ChatTemplate, conversation: Conversation, variables: Mapping[str, Any]) -> Conversation:
    """The conversation with tools and calls written as text if the template does not support them."""
    messages = conversation.messages
    if not _shows_calls(template, messages, variables):
        messages = spelled_out(messages)
    if not conversation.tools or template.knows_tools:
        return _with_messages(conversation, messages)
    if conversation.may_call:
        messages = with_description(messages, conversation.tools)
    return replace(conversation, messages=messages, tools=())


def _with_messages(conversation: Conversation, messages: Messages) -> Conversation:
    return conversation if messages is conversation.messages else replace(conversation, messages=messages)


def _shows_calls(template: ChatTemplate, messages: Messages, variables: Mapping[str, Any]) -> bool:
    """Whether the template shows the calls and results of these messages."""
    if any(message.get("tool_calls") for message in messages):
        ignores = template.ignores("tool_calls", "assistant", messages, variables=variables)
        return "tool_calls" in template.source and not ignores
    return "tool" in template.source or not any(message["role"] == "tool" for message in messages)


def _shown(
    template: ChatTemplate, conversation: Conversation, variables: Mapping[str, Any], notices: list[Notice]
) -> tuple[Conversation, str]:
    """The text, and the conversation as the template accepted it.

    If the template refuses the messages, or drops system messages, simpler forms are tried. Raises the first error if
    all fail.
    """
    refusal, accepted = None, None
    for messages, applied in _forms(conversation.messages):
        if messages is not conversation.messages and applied[-1] is _AS_USER and accepted is None:
            break  # the template says that it supports no system messages, or something else is wrong
        form = _with_messages(conversation, messages)
        try:
            text = _text(template, form, variables)
        except ChatTemplateError as error:
            refusal = refusal or error
            continue
        dropped = _dropped(template, form, variables, text)
        accepted = accepted or (form, text, applied, dropped)
        if not any(messages[index]["role"] in _SYSTEM for index in dropped):
            accepted = form, text, applied, dropped
            break
    if accepted is None:
        assert refusal is not None, "there is at least one form"
        raise refusal
    form, text, applied, dropped = accepted
    notices += [*applied, *_content_notices(conversation.messages, [form.messages[index] for index in dropped])]
    return form, text


def _dropped(
    template: ChatTemplate, conversation: Conversation, variables: Mapping[str, Any], text: str
) -> Sequence[int]:
    """The indices of messages whose content is not in the prompt's `text`.

    Contents are searched for in their order. What is not found may have been rewritten, so that it is rendered again
    with a mark in each.
    """
    missing: list[int] = []
    at = 0
    for index, message in enumerate(conversation.messages):
        content = message["content"].strip()
        if not content or (conversation.images and marks_in(content)):
            continue
        is_unmistakable = len(content) >= _UNMISTAKABLE or message["role"] in _SPEAKERS
        found = text.find(content, at) if is_unmistakable and len(missing) < _MAX_SEARCHED else -1
        if found < 0:
            missing.append(index)
        else:
            at = found + len(content)
    if not missing:
        return ()
    marked = list(conversation.messages)
    for index in missing:
        marked[index] = {**marked[index], "content": f"{marked[index]['content']}{_MARK.format(index)}"}
    try:
        text = _text(template, replace(conversation, messages=marked), variables)
    except ChatTemplateError:
        return ()
    return [index for index in missing if _MARK.format(index) not in text]


def _content_notices(sent: Messages, dropped: Messages) -> Iterator[Notice]:
    """Notices of messages that the template drops."""
    for message in dropped:
        index = next((i for i, one in enumerate(sent) if all(one[key] == message[key] for key in _SAME)), None)
        path = "messages" if index is None else f"messages[{index}].content"
        yield Notice(path, _NOT_SHOWN)


def _forms(messages: Messages) -> Iterator[tuple[Messages, Sequence[Notice]]]:
    """The messages, then simpler forms of them, from the least to the most changed, with notices of the changes."""
    applied: Sequence[Notice] = ()
    yield messages, applied
    for simplified, notice in _SIMPLIFICATIONS:
        simpler = simplified(messages)
        if simpler != list(messages):
            messages, applied = simpler, (*applied, notice)
            yield messages, applied


def _with_objects(messages: Messages) -> Messages:
    """The messages with an object for each call's arguments."""
    return [_with_object(message) for message in messages]


def _with_object(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with an object for each of its calls' arguments."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        as_object = {"arguments": arguments} if isinstance(arguments, str) else arguments
        calls.append({**call, "function": {**call["function"], "arguments": as_object}})
    return {**message, "tool_calls": calls}


def _instructions_as_user(messages: Messages) -> Messages:
    """The messages with system messages as the user's, as makers of models without system messages advise."""
    return one_turn_each([{**one, "role": "user"} if one["role"] in _SYSTEM else one for one in messages])


_AS_USER = Notice("messages[].role", "The chat template does not show system messages here; shown as the user's.")
_SIMPLIFICATIONS = (
    (
        _with_objects,
        Notice("messages[].tool_calls[].function.arguments", "Wrapped in an object, as the chat template needs one."),
    ),
    (one_system_message, Notice("messages[].role", "The system messages were merged into the first.")),
    (one_turn_each, Notice("messages[].role", "Messages of one role that follow each other were merged.")),
    (_instructions_as_user, _AS_USER),
)


def _text(template: ChatTemplate, conversation: Conversation, variables: Mapping[str, Any]) -> str:
    if conversation.continue_last:
        return template.render_open(conversation.messages, variables=variables, tools=conversation.tools)
    return template.render(
        conversation.messages,
        add_generation_prompt=conversation.open_turn,
        variables=variables,
        tools=conversation.tools,
    )


def _not_shown(
    template: ChatTemplate, messages: Messages, taken: Messages, variables: Mapping[str, Any]
) -> Iterator[Notice]:
    """Notices of message keys that the template does not show, tested on the messages as it accepted them.

    Each role is tested by itself, because templates treat roles differently.
    """
    first: dict[tuple[str, str], int] = {}
    for index, message in enumerate(messages):
        for key in MAY_SHOW:
            if message.get(key):
                first.setdefault((key, message["role"]), index)
    for (key, role), index in first.items():
        if template.ignores(key, role, taken, variables=variables):
            yield Notice(f"messages[{index}].{key}", _NOT_SHOWN)


def _other_roles(messages: Messages) -> Mapping[str, int]:
    """Roles beyond ROLES, with the index of each one's first message."""
    first: dict[str, int] = {}
    for index, message in enumerate(messages):
        if message["role"] not in ROLES:
            first.setdefault(message["role"], index)
    return first


def _unnamed_roles(
    template: ChatTemplate, messages: Messages, taken: Messages, variables: Mapping[str, Any], path: str
) -> Iterator[Notice]:
    """Notices of roles that the template renders but does not mention.

    Raises InvalidRequestError for roles whose messages it does not show.
    """
    others = _other_roles(messages)
    if len(others) > MAX_OTHER_ROLES:
        message = (
            f"Invalid '{path}': expected at most {MAX_OTHER_ROLES} roles besides {_known_roles()}, "
            f"but got {len(others)} instead."
        )
        raise InvalidRequestError(message, param=path, code="invalid_value")
    for role, index in others.items():
        if not template.shows_role(role, taken, variables=variables):
            raise _unknown_role(role, f"{path}[{index}].role", "does not show messages of this role")
        if not template.names_role(role):
            yield Notice(f"{path}[{index}].role", "The model's chat template renders it, but does not know this role.")


def _unacceptable(messages: Messages, reason: str, path: str) -> InvalidRequestError:
    """The error for messages that the template refuses. Names a role beyond ROLES if there is one."""
    why = f"does not accept these messages: {reason}"
    for role, index in _other_roles(messages).items():
        return _unknown_role(role, f"{path}[{index}].role", why)
    return InvalidRequestError(f"The model's chat template {why}", param=path, code="invalid_value")


def _unknown_role(role: str, path: str, why: str) -> InvalidRequestError:
    known = _known_roles()
    message = f"Invalid value: '{shorten(role)}'. The model's chat template {why}. Supported values are: {known}."
    return InvalidRequestError(message, param=path, code="invalid_value")


def _known_roles() -> str:
    return ", ".join(f"'{name}'" for name in ROLES)
