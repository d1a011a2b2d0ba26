"""Messages and tools in Ollama's format, and their conversion."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from server.api.fields.images import from_base64
from server.api.fields.rules import EchoedModel, Opaque, RequestModel
from server.api.fields.tools import FunctionDefinition, cache_control
from server.errors import InvalidRequestError
from server.generation.sent_images import SentImage, SentImages
from server.generation.tools import Tool, ToolUse
from server.text.image_marks import joined

MAX_TOOLS = 512
_ID_DIGITS = 5


def with_images(content: str, sent: Sequence[str] | None, images: SentImages, path: str) -> str:
    """The content with marks for the images in base64, which come before the text and are added to `images`.

    Raises InvalidRequestError for an image that is not base64. `path` is the field's.
    """
    marks = []
    for index, text in enumerate(sent or ()):
        at = f"{path}[{index}]"
        data = from_base64(text)
        if data is None:
            raise InvalidRequestError(
                f"Invalid '{at}': the image is not valid base64.", param=at, code="invalid_base64"
            )
        marks.append(images.add(SentImage("images", data, at, at)))
    return joined([*marks, content])


class OllamaFunctionCall(EchoedModel):
    """The function and the arguments of an earlier call."""

    index: int | None = Field(None, description="Index of the call.")
    name: str = Field(description="The function that was called.")
    arguments: dict[str, Any] = Field(description="The arguments: an object, not text.")


class OllamaToolCall(EchoedModel):
    """A call that the assistant made earlier."""

    id: str | None = Field(None, description="Id of the call. If absent, calls and results are matched by their order.")
    type: Literal["function"] | None = Field(None, description="Always `function`.")
    function: OllamaFunctionCall


class OllamaMessage(EchoedModel):
    """A message of the conversation. Unknown fields are ignored and reported."""

    role: str = Field(
        min_length=1, max_length=64,
        description="`system`, `user`, `assistant`, `tool`, or another role that the chat template supports.",
    )  # fmt: skip
    content: str | None = Field(None, description="The text.")
    thinking: str | None = Field(
        None, description="The assistant's thinking; ignored and reported if the chat template does not show it."
    )
    images: list[str] | None = Field(None, description="Images in base64. The model sees them before the text.")
    tool_calls: list[OllamaToolCall] | None = Field(None, description="Calls by the assistant.")
    tool_name: str | None = Field(
        None, description="The tool whose result this is. Ignored and reported if the chat template does not show it."
    )
    tool_call_id: str | None = Field(None, description="Id of the call that a message of the role `tool` answers.")


class OllamaTool(RequestModel):
    """A function that the model may call."""

    type: Literal["function"] | None = Field(None, description="Always `function`.")
    function: FunctionDefinition
    cache_control: Opaque | None = cache_control()


def tool_use(tools: Sequence[OllamaTool] | None) -> ToolUse | None:
    """The tools that the answer may call; None: none."""
    made: Sequence[Tool] = [tool.function.tool(f"tools[{index}].function") for index, tool in enumerate(tools or ())]
    return ToolUse(made) if made else None


class History:
    """A conversation for a chat template, and the paths of its parts in the request.

    Ollama's clients need not send ids of calls, and chat templates may need them: calls without one get an id by
    their number. A result without one gets the id of the first unanswered call, of its tool if it names one.
    """

    def __init__(self, messages: Sequence[OllamaMessage]) -> None:
        self.messages: list[Mapping[str, Any]] = []
        self.paths: dict[str, str] = {}
        self.images = SentImages()
        self._unanswered: list[tuple[str, str]] = []
        """Ids and names of the calls without a result."""
        self._num_calls = 0
        for message in messages:
            self._add(message)

    def _add(self, message: OllamaMessage) -> None:
        path = f"messages[{len(self.messages)}]"
        content = with_images(message.content or "", message.images, self.images, f"{path}.images")
        made: dict[str, Any] = {"role": message.role, "content": content}
        if message.thinking:
            made["reasoning_content"] = message.thinking
            self.paths[f"{path}.reasoning_content"] = f"{path}.thinking"
        if message.tool_calls:
            made["tool_calls"] = [self._call(call) for call in message.tool_calls]
        if message.role == "tool":
            made["tool_call_id"] = self._answered(message)
        if message.tool_name is not None:
            made["name"] = message.tool_name
            self.paths[f"{path}.name"] = f"{path}.tool_name"
        self.messages.append(made)

    def _call(self, call: OllamaToolCall) -> Mapping[str, Any]:
        self._num_calls += 1
        id_ = call.id or f"call{self._num_calls:0{_ID_DIGITS}}"  # nine letters and digits, as some templates ask for
        self._unanswered.append((id_, call.function.name))
        function = {"name": call.function.name, "arguments": call.function.arguments}
        return {"id": id_, "type": "function", "function": function}

    def _answered(self, result: OllamaMessage) -> str:
        """The id of the call that a result answers; empty if no call waits for one."""
        waiting = self._unanswered
        if result.tool_call_id is not None:
            self._unanswered = [(id_, name) for id_, name in waiting if id_ != result.tool_call_id]
            return result.tool_call_id
        if not waiting:
            return ""
        place = next((place for place, (_, name) in enumerate(waiting) if name == result.tool_name), 0)
        return waiting.pop(place)[0]
