"""A generation request in the form that all APIs are converted to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from model_runner.contract import Pooling
from server.generation.constraints.fragment import Constraint
from server.generation.notices import Notice
from server.generation.sent_images import SentImage
from server.generation.settings import DecodingSettings
from server.generation.tools import ToolUse
from server.text.chat_template import Clock


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A text to continue."""

    text: str
    path: str | None = None
    """The prompt's path in the request; None for the only prompt."""
    adds_special: bool = True
    """Whether to add the special tokens that begin and end every text."""

    def opposed(self, negative: str) -> "TextPrompt":
        """The negative prompt in the form of this one, for guidance."""
        return TextPrompt(negative, adds_special=self.adds_special)


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A text to continue, as tokens."""

    tokens: Sequence[int]
    path: str
    num_first: int | None = None
    """For an encoder: tokens of the first text of a pair, with its special tokens; None: one text."""

    def opposed(self, negative: str) -> TextPrompt:
        """The negative prompt, for guidance."""
        return TextPrompt(negative)


@dataclass(frozen=True, slots=True)
class MixedPrompt:
    """A text to continue, in pieces that are texts or tokens; each text is encoded separately."""

    pieces: Sequence[str | int]
    path: str

    def opposed(self, negative: str) -> TextPrompt:
        """The negative prompt, for guidance."""
        return TextPrompt(negative)


@dataclass(frozen=True, slots=True)
class ContextFile:
    """A file that a fill-in-the-middle prompt shows before the one with the gap."""

    name: str | None
    text: str


@dataclass(frozen=True, slots=True)
class FillIn:
    """A text with a gap to fill, for models with fill-in tokens."""

    before: Sequence[str] | Sequence[int]
    """The text before the gap: texts to encode one by one, or tokens."""
    after: str
    path: str
    """Path of the text before the gap."""
    after_path: str
    files: Sequence[ContextFile] | None = None
    """Other files to show before. None: a single-file prompt, even if the model supports several files."""

    @property
    def parts(self) -> Sequence[str | int]:
        """All texts and tokens of the prompt."""
        return [*self.before, self.after, *(file.text for file in self.files or ())]

    def opposed(self, negative: str) -> "FillIn":
        """The prompt with the negative prompt before the gap, for guidance."""
        return replace(self, before=(negative,))


Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages to answer, rendered by the model's chat template."""

    messages: Sequence[Message]
    """Messages in the form of chat templates: role, content as one string, and further keys. Images are marks in the
    content (server/text/image_marks.py)."""
    images: Sequence[SentImage] = ()
    """The images, by the indices of their marks."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools to show to the model, in the form of chat templates."""
    may_call: bool = True
    """Whether the tools may be called. If not, only a template that supports tools shows them."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the template. Unknown ones are reported."""
    thinks: bool | None = None
    """Whether the model should reason before it answers. Reported as `thinking` if the template has no switch for
    it."""
    clock: Clock = field(default_factory=Clock)
    """The date that the template shows, unless the variables have one."""
    effort: str | None = None
    """How much the model should reason; "none" also turns the switch off. Reported as `reasoning_effort` if the
    template has no variable for it."""
    open_turn: bool = True
    """Whether the prompt ends with the beginning of the assistant's turn."""
    continue_last: bool = False
    """Whether the last message is continued instead of answered."""
    drops_oldest: bool = False
    """Whether to drop and report the oldest messages if the conversation does not fit."""
    adds_special: bool = False
    """Whether to add the special tokens that begin and end every text to the template's text."""

    def opposed(self, negative: str) -> "Conversation":
        """The conversation with `negative` as its first system message, for guidance."""
        messages = list(self.messages)
        roles = ("system", "developer")
        first = next((index for index, message in enumerate(messages) if message["role"] in roles), None)
        if first is not None:
            del messages[first]
        messages.insert(first or 0, {"role": "system", "content": negative})
        return replace(self, messages=messages)


Prompt = TextPrompt | TokenPrompt | MixedPrompt | FillIn | Conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Prompts, how to answer them, and what to report."""

    model: str | None
    """The model name that the client sent, or None."""
    may_omit_model: bool = False
    """Whether clients of this API usually omit the model, so that a missing name is not reported."""
    prompts: Sequence[Prompt]
    id: str | None = None
    """Id of the answer; None to generate one."""
    own_id: str | None = None
    """The client's own id, used in the answer's id. It need not be unique."""
    id_prefix: str = "gen-"
    """Prefix of a generated id, as the API prescribes it."""
    decoding: DecodingSettings = field(default_factory=DecodingSettings)
    biased_texts: Sequence[tuple[str, float]] = ()
    """Texts, with a bias for the logits of all their tokens; added to `decoding.logit_bias`."""
    max_tokens: int | None = None
    """Limit for each choice."""
    default_max_tokens: int | None = None
    """The API's default limit, used if the model has none. None: the server's default."""
    may_fill_context: bool = False
    """Whether the output may fill the context if `max_tokens` is None."""
    num_choices: int = 1
    """Choices to generate for each prompt."""
    seed: int | None = None
    logprobs: int | None = None
    """Alternatives to report for each output token."""
    logprob_token_ids: Sequence[int] = ()
    """Tokens to report for each output token, in place of alternatives."""
    prompt_logprobs: int | None = None
    """Alternatives to report for each prompt token."""
    echoes: bool = False
    """Whether each choice's text begins with its prompt."""
    num_repeats: int = 1
    """How often the answer repeats the report on a prompt: once, or in each choice."""
    reports_tokens: bool = False
    """Whether the answer lists the output's tokens. With `logprobs`, it always does."""
    pooling: Pooling | None = None
    """Pooling to compute instead of generating; `max_tokens` is then 0."""
    truncate_prompt: int | None = None
    """Tokens to keep of each prompt; -1: as many as fit."""
    keeps_beginning: bool = False
    """Whether to keep the beginning of prompts instead of their end."""
    constraint: Constraint | None = None
    """Constraint on the answer's text. It does not apply to reasoning and calls."""
    tools: ToolUse | None = None
    """Tools that the answer may call."""
    opens_objects: bool | None = None
    """Whether objects in the tools' arguments may have properties that their schemas do not name, as in JsonStyle."""
    thinking_budget: int | None = None
    """Reasoning tokens after which the end of the reasoning is forced."""
    separates_reasoning: bool = True
    """Whether the answer returns the reasoning separately from the text."""
    prediction: str | None = None
    """The expected output, for speculation."""
    priority: int = 0
    cache_salt: str = ""
    learn: bool | None = None
    """Whether heads may be trained on the request; None (not specified) allows it."""
    stream: bool = False
    is_held: bool = False
    """Whether the whole answer is in memory at its end even if it is streamed."""
    paths: Mapping[str, str] = field(default_factory=dict)
    """The API's names of fields that errors may name, where they differ from the names here."""
    notices: Sequence[Notice] = ()
    """Notices of fields that the API layer has ignored already."""

    @property
    def fills_in(self) -> bool:
        """Whether its prompts are texts with a gap."""
        return isinstance(self.prompts[0], FillIn)

    def path(self, name: str) -> str:
        """The path of a field in the client's request."""
        return self.paths.get(name, name)
