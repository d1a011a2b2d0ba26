"""What the scheduler and the runner say to each other. Plain data: this module imports no torch.

A *key* names one choice of one request for as long as it runs. The scheduler deals in counts and block ids; tokens,
logits and probabilities stay in the runner until it commits them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, Literal, TypeVar, overload

_Item = TypeVar("_Item")

_CHUNK: Final = 64
"""Items that forks of a SharedList have in common or copy."""


class SharedList(Sequence[_Item]):
    """A list that is only appended to, and of which forks go on by themselves.

    Full chunks are never changed, so forks have them in common: to fork takes a copy of one chunk at most, and of a
    reference to each of the others, however long the list is.
    """

    __slots__ = ("_full", "_last")

    def __init__(self, items: Iterable[_Item] = ()) -> None:
        items = list(items)
        end = len(items) - len(items) % _CHUNK
        self._full = [items[start : start + _CHUNK] for start in range(0, end, _CHUNK)]
        self._last = items[end:]

    def append(self, item: _Item) -> None:
        """One more."""
        self._last.append(item)
        if len(self._last) == _CHUNK:
            self._full.append(self._last)
            self._last = []

    def extend(self, items: Iterable[_Item]) -> None:
        """Some more."""
        for item in items:
            self.append(item)

    def fork(self, length: int | None = None) -> "SharedList[_Item]":
        """A list of the first items, or of all."""
        num_full, rest = divmod(len(self) if length is None else length, _CHUNK)
        fork = SharedList[_Item]()
        fork._full = self._full[:num_full]
        fork._last = (self._full[num_full] if num_full < len(self._full) else self._last)[:rest]
        return fork

    def appended(self, item: _Item) -> "SharedList[_Item]":
        """A list with one more, which leaves this one as it is."""
        fork = self.fork()
        fork.append(item)
        return fork

    def __len__(self) -> int:
        return len(self._full) * _CHUNK + len(self._last)

    def __iter__(self) -> Iterator[_Item]:
        return chain.from_iterable([*self._full, self._last])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as of a list

    @overload
    def __getitem__(self, index: int) -> _Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[_Item]: ...
    def __getitem__(self, index: int | slice) -> _Item | list[_Item]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return list(self)[index]
            first = start // _CHUNK
            chunks = [*self._full[first : -(-stop // _CHUNK)], self._last]
            begin = first * _CHUNK
            return list(chain.from_iterable(chunks))[start - begin : max(start, stop) - begin]
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(index)
        chunk = place // _CHUNK
        return self._full[chunk][place % _CHUNK] if chunk < len(self._full) else self._last[place % _CHUNK]


Verification = Literal["match", "rejection", "typical"]

SAMPLER_ORDER = (
    *("temperature", "top_n_sigma", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_k", "top_p", "min_p", "xtc"),
    "mirostat",
)
"""The steps between the greedy choice and the draw, in the order in which they act unless a request has its own."""


@dataclass(frozen=True, slots=True)
class Breaker:
    """Token sequences over which no repetition reaches: any token of `first`, followed by exactly the tokens of `rest`.

    One string alone has thousands of spellings, but only few ends: hence this form.
    """

    first: tuple[int, ...]
    rest: tuple[int, ...] = ()
    """Often none. Then each token of `first` is a breaker by itself, and is never penalised."""


@dataclass(frozen=True, slots=True)
class Dry:
    """Do not repeat yourself: a penalty on tokens that would prolong a repetition. As in llama.cpp."""

    multiplier: float
    """Subtracted from the logit of a token that would prolong one of `allowed_length` tokens; times `base` for each
    token that the repetition is longer."""
    base: float = 1.75
    allowed_length: int = 2
    last_n: int = -1
    """How many tokens at the end of prompt and output are searched for repetitions; -1 for all."""
    breakers: tuple[Breaker, ...] = ()


@dataclass(frozen=True, slots=True)
class Xtc:
    """Exclude top choices: with this probability, only the least probable of those at or above the threshold stays.

    As in llama.cpp. Ties go by id: of equally probable tokens the higher id stays.
    """

    probability: float
    threshold: float = 0.1
    """Above 0.5 it never does anything: two tokens cannot both be so probable."""


@dataclass(frozen=True, slots=True)
class Mirostat:
    """Mirostat 2.0 (arXiv:2007.14966): keeps tokens whose surprise is at most mu, and steers mu so that the surprise of
    the tokens drawn is tau on average.
    """

    tau: float = 5.0
    """Bits."""
    eta: float = 0.1
    """How much of its error mu is corrected by with each token."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """A bound on the reasoning between two tags, `begin` and `end`, with which an output may begin."""

    max_tokens: int
    """After so many tokens of reasoning its end is forced; the end's own tokens count if they come before that."""
    begin: bytes  # as the output has it, with 0xFF, which is in no text, before each control token
    end: bytes
    is_begun: bool = False  # by the prompt


@dataclass(frozen=True, slots=True)
class Contrastive:
    """Contrastive decoding: what the model says, less what the auxiliary model, the amateur, says as well.

    A token x that has at least `alpha` times the highest probability can be chosen, by the score
    expert_weight * model(x) - amateur_weight * amateur(x) / temperature, both in logits. With the weights 1 + b and b
    this is O'Brien and Lewis (arXiv:2309.09117), with 1 and 1 Li et al. (arXiv:2210.15097), whose log-probabilities
    differ from logits by one number for all tokens.
    """

    alpha: float = 0.1
    """0 lets all tokens be chosen."""
    expert_weight: float = 1.5
    amateur_weight: float = 0.5
    temperature: float = 1.0
    """Of the amateur, above 0."""


@dataclass(frozen=True, slots=True)
class DoLa:
    """Decoding by contrasting layers (arXiv:2309.03883): what the model knows only after its last layers.

    Of the candidate layers, the one before which the model's next-token distribution differs most from the final one is
    chosen for each token anew. Scores are the log-probabilities after the last layer less those; a token can be chosen
    if it has at least `alpha` times the highest probability.
    """

    layers: Literal["low", "high"] | tuple[int, ...]
    """The candidates: every other one of the lower or the upper half, or these. 0 is what enters the first layer."""
    alpha: float = 0.1


@dataclass(frozen=True, slots=True)
class Pooling:
    """Which numbers."""

    by: Literal["last", "mean", "logits", "classes"] = "last"
    """last: the hidden state of the last token, after the model's final norm. mean: the mean of those of all tokens.
    logits: of `tokens`, after the last token. classes: what the model's classification head makes of the last token's
    hidden state."""
    dimensions: int | None = None
    """Keep so many of the first numbers; None keeps all."""
    normalizes: bool = False
    """Divide by the Euclidean length of what is kept."""
    tokens: tuple[int, ...] = ()

    @property
    def needs_every_token(self) -> bool:
        """Whether no token may be skipped because others computed it."""
        return self.by == "mean"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one choice turns logits into tokens, by fields that act in the order in which they stand here.

    The defaults change nothing: they sample the model's own distribution. Ranges are checked where a request comes in.
    """

    contrastive: Contrastive | None = None
    """Needs an auxiliary model. Keys and values are shared only among choices that have it."""
    dola: DoLa | None = None
    guidance: float | None = None
    """Scale of classifier-free guidance (arXiv:2306.17806): scores are the guide's log-probabilities, and so many times
    what the choice's own differ from them; 1 changes nothing. At most one of these three is there."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, value added to its logit) pairs."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these tokens may be chosen; None allows all."""
    thinking: Thinking | None = None  # what it forces is chosen, listed or not
    grammar: str | None = None
    """The output is one that this grammar allows, in llguidance's dialect of Lark. Tokens of `stop_token_ids` stand
    where it may end and nowhere else, and there must be some; where nothing else can follow, no ban holds for them."""
    grammar_prefix: str = ""  # with which what the grammar allows begins: it is in the prompt already
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not appear in the output: the last token is blocked where the ones before it match."""
    min_tokens: int = 0
    """While fewer tokens than this were generated, every token of `stop_token_ids` is blocked."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the choice, end-of-sequence included unless the request ignores it."""
    no_repeat_ngram_size: int = 0
    """No n-gram of this size occurs twice in prompt and output together; 0 turns it off."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output (CTRL, arXiv:1909.05858)."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time the token was generated."""
    presence_penalty: float = 0.0
    """Subtracted once if the token was generated at all."""
    dry: Dry | None = None
    exponential_decay_length_penalty: tuple[int, float] | None = None
    """(start, factor): after t > start tokens of output, the logit of each token of `stop_token_ids` grows by its
    amount times factor ** (t - start) - 1."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy: the highest logit, the lowest id among equals."""
    top_n_sigma: float = 0.0
    """Keep logits at most so many standard deviations below the highest (arXiv:2411.07641); 0 turns it off."""
    typical_p: float = 1.0
    """Locally typical sampling (arXiv:2202.00666): the mass kept; 1 turns it off."""
    epsilon_cutoff: float = 0.0
    """Keep tokens of at least this probability (arXiv:2210.15191); 0 turns it off."""
    eta_cutoff: float = 0.0
    """The same, with a bound that falls as the entropy rises (arXiv:2210.15191); 0 turns it off."""
    top_k: int = 0
    """Keep the k highest logits, and all that tie with the last; 0 turns it off."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens with at least this mass; 1 turns it off."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the highest probability; 0 turns it off."""
    penalty_alpha: float = 0.0
    """Above 0: contrastive search (arXiv:2202.06417) decides instead of the fields from temperature on, among the
    `top_k` most probable tokens, at least 1. Such a choice has temperature 0 and does not speculate."""
    xtc: Xtc | None = None
    mirostat: Mirostat | None = None
    sampler_order: tuple[str, ...] = SAMPLER_ORDER
    """The steps from `temperature` on by name, for those that are to act in another order. Names all that are used."""
    seed: int = 0
    """64-bit unsigned. Noise depends on (seed, choice, output position, stream, token id) and on nothing else."""
    choice: int = 0
    """Index of this choice among the request's n."""
    logprobs: int | None = None
    """Report the chosen token's logprob and this many alternatives; None reports nothing."""
    logprob_token_ids: tuple[int, ...] = ()
    """Report these tokens in place of alternatives. Not for beam search."""
    prompt_logprobs: int | None = None
    """The same for every prompt token but the first."""
    beam_candidates: int = 0
    """For beam search: draw nothing, but offer so many of the most probable next tokens, in the result's field of this
    name. What stands before `temperature` acts on log-probabilities then, as in transformers; the rest does not."""

    pooling: Pooling | None = None
    """Numbers are asked for, in place of tokens: nothing is drawn, and of the other fields none means anything."""

    @property
    def num_candidates(self) -> int:
        """How many tokens contrastive search compares at every place; 0 without it."""
        return self.top_k if self.penalty_alpha > 0 else 0

    @property
    def least_share(self) -> float:
        """Of the highest probability: what a token needs that `contrastive` or `dola` may choose; 0 without them.

        It counts by the model's own probabilities, among the tokens that the settings down to the n-grams leave.
        """
        mixed = self.contrastive or self.dola
        return 0.0 if mixed is None else mixed.alpha


@dataclass(frozen=True, slots=True)
class Speculation:
    """How a choice's next tokens are guessed, to be verified several at a time."""

    method: str
    """Name of a proposer that the runner has (`speculation_methods` of its info)."""
    num_tokens: int | None = None
    """Verify so many draft tokens in every step, where there are as many and there is room for them. None leaves the
    number to the budget, which may choose none."""
    verify: Verification = "match"
    """match: the target draws its own token at every place, and a draft stands if it is that token: the output is the
    same as without speculation. rejection: the textbook's test, the same distribution but other tokens. typical:
    Medusa's acceptance, another distribution."""
    prediction: tuple[int, ...] = ()
    """What the client expects the output to be, for the method `prediction`."""


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A choice that the runner sees for the first time, or again after preemption."""

    key: str
    tokens: tuple[int, ...] | SharedList[int]
    """The prompt, then the output so far. Those of beams are shared, and not to be changed."""
    num_prompt: int
    """How many of `tokens` are the prompt."""
    num_computed: int
    """How many leading tokens already have their KV in the blocks (prefix cache or fork); below len(tokens)."""
    blocks: tuple[int, ...]
    """Block table at admission, before the `new_blocks` of the same step."""
    sampling: SamplingParams
    speculation: Speculation | None = None
    """None decodes one token at a time."""
    guides: str | None = None
    """Key of the choice that this one is the guide of. A guide draws nothing, and its `sampling` is not used: it has
    another prompt and the same output. The last known tokens of both are always computed in the same step, with as many
    drafts."""
    cache_salt: str = ""
    """What is learnt from a choice's output guesses only for choices of the same salt."""
    learn: bool = True
    """Whether heads may be trained on what the target computes for it. One with a salt is never learnt from."""
    sampler_state: float | None = None
    """What the choice's last result said, if it has output."""
    forked_from: str | None = None
    """Key of a choice that runs, with the same prompt, the same settings but for `choice` and `prompt_logprobs`, and an
    output that begins with this one's but for its last token: what was counted there need not be counted again."""


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """The share of one choice in a step."""

    key: str
    num_tokens: int
    """Committed tokens to compute now: a prompt chunk, or 1."""
    new_blocks: tuple[int, ...]
    """Appended to the choice's block table before the step."""
    num_draft: int = 0
    """For how many draft tokens beyond these there is room; at most what the choice's last result offered."""
    num_candidates: int = 0
    """How many candidates contrastive search compares: all that the choice's last result had."""
    chosen: int | None = None
    """The beam candidate of the choice's last result that it goes on with: the last of its known tokens from now on."""

    @property
    def num_rows(self) -> int:
        """All that the step computes for the choice."""
        return self.num_tokens + self.num_draft + self.num_candidates


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. The runner applies the fields in this order."""

    released: tuple[str, ...]
    """Choices that finished, were aborted or preempted since the last plan: forget them."""
    copies: tuple[tuple[int, int], ...]
    """(source, destination) blocks to copy before anything is written: copy-on-write of forks."""
    admitted: tuple[AdmittedRequest, ...]
    scheduled: tuple[ScheduledRequest, ...]

    @property
    def keys(self) -> list[str]:
        """Of the choices that are scheduled."""
        return [entry.key for entry in self.scheduled]

    def fresh_blocks(self, block_size: int) -> list[int]:
        """Blocks whose content is nobody's: all that the plan hands out but shared ones and the targets of copies."""
        return self._blocks_from(lambda num_computed: -(-num_computed // block_size))

    def written_blocks(self, block_size: int) -> list[int]:
        """Blocks that are to be written to: all that the plan hands out but shared ones, as these are full."""
        return self._blocks_from(lambda num_computed: num_computed // block_size)

    def _blocks_from(self, first: Callable[[int], int]) -> list[int]:
        """Those added to running choices, and those of admitted ones from the `first` on, by what is computed there."""
        blocks = [block for entry in self.scheduled for block in entry.new_blocks]
        for admitted in self.admitted:
            blocks += admitted.blocks[first(admitted.num_computed) :]
        return blocks


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token's log-probability, its rank in the vocabulary (1 is the most probable) and the top alternatives."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]
    """The most probable (token id, logprob), best first, lower id first among equals; as many as were asked for. Or
    those of `logprob_token_ids`, in their order."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that may come next."""

    token_id: int
    logprob: float
    """After bans and penalties, which are not made up for: the probabilities of all tokens need not sum to 1."""
    report: TokenLogprobs | None = None
    """If the choice asked for logprobs."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a choice cannot go on."""

    message: str
    by_request: bool = False
    """Whether the request's own settings are to blame, and not the model or this server."""


@dataclass(slots=True)
class ChoiceResult:
    """What a step brought one scheduled choice. Not frozen, though nobody changes it: one is made for every token.

    Contrastive search takes two looks at a place: the logits of the last known token name the candidates, which the
    next step computes beside that token, again. So the first step that computes the last known token, after admission,
    brings no tokens, but offers candidates; and that token counts as not computed. Every step with candidates brings
    one token, and offers those of the next place.
    """

    key: str
    tokens: tuple[int, ...]
    """Newly committed tokens; empty until the last known token has been computed, and in a contrastive search's step
    without candidates. All known tokens but the last have their KV."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `tokens`, if the choice asked for them."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """If asked for: one for each prompt token whose predecessor was computed in this step, in order."""
    num_draft: int = 0
    """How many draft tokens the runner would like to verify in the choice's next step."""
    num_accepted: int = 0
    """Draft tokens verified in this step that became output, and ..."""
    num_rejected: int = 0
    """... those that did not."""
    num_candidates: int = 0
    """How many candidates contrastive search has to compare in the choice's next step."""
    method: str = ""
    """Of speculation, that made the drafts; empty without any."""
    error: Failure | None = None
    """Set if this choice cannot go on; the others are not affected."""
    beam_candidates: tuple[Candidate, ...] = ()
    """In place of `tokens` if the choice asks for them: the best first, the lower id first among equals. Fewer
    than asked for where no more are possible."""
    sampler_state: float | None = None
    """With `tokens`: what the sampler must be told, besides them, if the choice is admitted again. Only mirostat has a
    state that the tokens do not tell."""
    pooled: bytes = b""
    """In place of `tokens` if the choice asks for numbers: these, as float32 in the order of little-endian bytes."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought."""

    choices: tuple[ChoiceResult, ...]
    """One entry for each scheduled choice, in the plan's order. None if memory ran out."""
    out_of_memory: str = ""
    """What device or host said if memory ran out. Then the plan's releases, copies, admissions and blocks stand, but
    nothing was computed for anybody, and what the scheduled choices had offered to verify or to compare is lost."""


def blamed(sampling: SamplingParams) -> str:
    """The fields that may have barred tokens, or made some impossible, by their names in requests."""
    used = {
        "logit_bias": sampling.logit_bias,
        "allowed_token_ids": sampling.allowed_token_ids is not None,
        "thinking_token_budget": sampling.thinking,
        "grammar": sampling.grammar,
        "stop_token_ids": sampling.grammar and len(sampling.stop_token_ids) > 1,  # they are no text then
        "bad_words": sampling.bad_words,
        "min_tokens": sampling.min_tokens,
        "no_repeat_ngram_size": sampling.no_repeat_ngram_size,
        "repetition_penalty": sampling.repetition_penalty != 1,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "dry_multiplier": sampling.dry,
        "exponential_decay_length_penalty": sampling.exponential_decay_length_penalty,
    }
    return ", ".join(name for name, value in used.items() if value)


def no_token_left(sampling: SamplingParams) -> Failure:
    """The end of a choice for which no token can be drawn."""
    return Failure(f"no token can be chosen with these settings: {blamed(sampling)}", by_request=True)
