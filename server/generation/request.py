"""What is asked for, whichever API it came through: the one form that the pipeline knows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from model_runner.contract import Pooling
from server.generation.constraints.fragment import Constraint
from server.generation.notices import Notice
from server.generation.settings import DecodingSettings
from server.generation.tools import ToolUse


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A text to continue."""

    text: str
    path: str | None = None
    """None: it is the request's only prompt."""
    adds_special: bool = True
    """Whether its tokens are put between those that begin and end every text."""

    def opposed(self, negative: str) -> "TextPrompt":
        """The prompt that guidance goes away from."""
        return TextPrompt(negative, adds_special=self.adds_special)


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A text to continue, as tokens."""

    tokens: Sequence[int]
    path: str

    def opposed(self, negative: str) -> TextPrompt:
        """See TextPrompt."""
        return TextPrompt(negative)


@dataclass(frozen=True, slots=True)
class MixedPrompt:
    """A text to continue, in pieces that are texts or tokens; each text is encoded by itself."""

    pieces: Sequence[str | int]
    path: str

    def opposed(self, negative: str) -> TextPrompt:
        """See TextPrompt."""
        return TextPrompt(negative)


@dataclass(frozen=True, slots=True)
class ContextFile:
    """A file that a fill-in-the-middle prompt shows before the one with the gap."""

    name: str | None
    text: str


@dataclass(frozen=True, slots=True)
class FillIn:
    """A text with a gap to fill in, by the tokens that the model has for that."""

    before: Sequence[str] | Sequence[int]
    """Texts that are encoded one by one, or tokens."""
    after: str
    path: str
    """Of what stands before the gap."""
    after_path: str
    files: Sequence[ContextFile] | None = None
    """Other files; None: the prompt is that of a file alone, even if the model has a pattern for several."""

    @property
    def parts(self) -> Sequence[str | int]:
        """All texts and tokens that it has."""
        return [*self.before, self.after, *(file.text for file in self.files or ())]

    def opposed(self, negative: str) -> "FillIn":
        """The prompt that guidance goes away from."""
        return replace(self, before=(negative,))


Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages to answer, by the model's chat template."""

    messages: Sequence[Message]
    """As templates take them: role, content as one string, and what else a message has."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Of which the model is told, as templates take them."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Of the template. One that it does not have is reported."""
    thinks: bool | None = None
    """Whether the model is to think before it answers, where the template has a switch for that; else it is reported
    as `thinking`."""
    effort: str | None = None
    """How much it is to think, where the template has a variable for that; "none" turns the switch off as well. Else it
    is reported as `reasoning_effort`."""
    open_turn: bool = True
    """Whether the prompt ends with the beginning of the assistant's turn."""
    continue_last: bool = False
    """Whether the last message is continued instead of answered."""
    drops_oldest: bool = False
    """Whether the oldest messages are left out, and that is reported, where all of them do not fit."""
    adds_special: bool = False
    """Whether the template's text is put between the tokens that begin and end every text."""

    def opposed(self, negative: str) -> "Conversation":
        """The same with another system message, in place of the first one if there are several."""
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
    """As the client named it; None: it did not."""
    may_omit_model: bool = False
    """Whether clients of this API usually name no model, so that none is reported as missing."""
    prompts: Sequence[Prompt]
    id: str | None = None
    """Of the answer. None: one is made."""
    own_id: str | None = None
    """The client's own, of which the answer's is made. It need not differ from others."""
    id_prefix: str = "gen-"
    """Of an id that is made, as far as its API prescribes it."""
    decoding: DecodingSettings = field(default_factory=DecodingSettings)
    biased_texts: Sequence[tuple[str, float]] = ()
    """Texts, with what is added to the logit of each token of one; besides `decoding.logit_bias`."""
    max_tokens: int | None = None
    """For each choice."""
    default_max_tokens: int | None = None
    """The API's, where the model has none. None: the server's."""
    may_fill_context: bool = False
    """Whether `max_tokens` of None asks for the rest of the context."""
    num_choices: int = 1
    """To generate for each prompt."""
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
    """How often the answer repeats what it tells of a prompt: once, or in each choice."""
    reports_tokens: bool = False
    """Whether the answer names the tokens of the output; it does in any case with `logprobs`."""
    pooling: Pooling | None = None
    """Numbers that are asked for in place of answers; `max_tokens` is 0 then."""
    truncate_prompt: int | None = None
    """How many tokens at the end of each prompt are used; -1: as many as fit."""
    keeps_beginning: bool = False
    """Whether those are used that are at its beginning instead."""
    constraint: Constraint | None = None
    """What the answer's text is held to; not its reasoning, and not its calls."""
    tools: ToolUse | None = None
    """What the answer may call."""
    thinking_budget: int | None = None
    """Tokens of reasoning after which its end is forced."""
    separates_reasoning: bool = True
    """Whether the answer tells the reasoning apart from the text."""
    prediction: str | None = None
    """What the answer will probably be."""
    priority: int = 0
    cache_salt: str = ""
    learn: bool | None = None
    """Whether heads may be trained on it; None: nothing is said, and they may."""
    stream: bool = False
    paths: Mapping[str, str] = field(default_factory=dict)
    """How the API calls what errors may name, where it is not by the name here."""
    notices: Sequence[Notice] = ()
    """Of what the API has left out already."""

    @property
    def fills_in(self) -> bool:
        """Whether its prompts are texts with a gap."""
        return isinstance(self.prompts[0], FillIn)

    def path(self, name: str) -> str:
        """Where the client finds a field."""
        return self.paths.get(name, name)
