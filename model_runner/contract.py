"""Data exchanged between scheduler and runner. This module imports no torch.

A *key* names one choice of one request for as long as it runs. The scheduler deals in counts and block ids; tokens,
logits and probabilities stay in the runner until it commits them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from model_runner.image import Image
from model_runner.shared_list import SharedList

Verification = Literal["match", "rejection", "typical"]

SAMPLER_ORDER = (
    *("temperature", "top_n_sigma", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_k", "top_p", "min_p", "xtc"),
    "mirostat",
)
"""The sampling steps after the greedy choice, in the order in which they act unless a request sets its own."""


@dataclass(frozen=True, slots=True)
class Breaker:
    """Token sequences that end a repetition: any token of `first`, followed by exactly the tokens of `rest`.

    One string has thousands of spellings in tokens, but they share few endings; this form keeps them compact.
    """

    first: tuple[int, ...]
    rest: tuple[int, ...] = ()
    """Often empty. Then each token of `first` is a breaker by itself, and is never penalised."""


@dataclass(frozen=True, slots=True)
class Dry:
    """DRY ("don't repeat yourself"): a penalty on tokens that would extend a repetition, as in llama.cpp."""

    multiplier: float
    """Subtracted from the logit of a token that would extend a repetition of `allowed_length` tokens; multiplied by
    `base` for each further token of the repetition."""
    base: float = 1.75
    allowed_length: int = 2
    last_n: int = -1
    """How many tokens at the end of prompt and output are searched for repetitions; -1 searches all."""
    breakers: tuple[Breaker, ...] = ()


@dataclass(frozen=True, slots=True)
class Xtc:
    """Exclude top choices: with this probability, only the least probable of the tokens at or above the threshold
    stays.

    As in llama.cpp. Ties are broken by id: of equally probable tokens the higher id stays.
    """

    probability: float
    threshold: float = 0.1
    """Has no effect above 0.5: two tokens cannot both be that probable."""


@dataclass(frozen=True, slots=True)
class Mirostat:
    """Mirostat 2.0 (arXiv:2007.14966): keeps tokens whose surprise is at most mu.

    After each token, mu is adjusted so that the drawn tokens' average surprise approaches tau.
    """

    tau: float = 5.0
    """Target surprise in bits."""
    eta: float = 0.1
    """Learning rate: the share of its error by which mu is corrected after each token."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """A limit on reasoning, which is enclosed by the tags `begin` and `end`; an output may start with it."""

    max_tokens: int
    """The end tag is forced after this many tokens of reasoning. If the model starts the end tag earlier, its tokens
    count."""
    begin: bytes  # as it appears in the output, with 0xFF, which no text contains, before each control token
    end: bytes
    is_begun: bool = False  # whether the prompt already contains `begin`


@dataclass(frozen=True, slots=True)
class Contrastive:
    """Contrastive decoding: the model's logits minus the logits of a weaker auxiliary model, the amateur.

    A token x that has at least `alpha` times the highest probability can be chosen, by the score
    expert_weight * model(x) - amateur_weight * amateur(x) / temperature, both in logits. Weights 1 + b and b give
    O'Brien and Lewis (arXiv:2309.09117). Weights 1 and 1 give Li et al. (arXiv:2210.15097), whose log-probabilities
    differ from logits only by a constant.
    """

    alpha: float = 0.1
    """0 allows all tokens."""
    expert_weight: float = 1.5
    amateur_weight: float = 0.5
    temperature: float = 1.0
    """Temperature of the amateur, above 0."""


@dataclass(frozen=True, slots=True)
class DoLa:
    """DoLa, decoding by contrasting layers (arXiv:2309.03883): favours what the model knows only after its last layers.

    For each token, the candidate layer is chosen whose next-token distribution differs most from the final one. Scores
    are the final log-probabilities minus the log-probabilities at that layer. A token can be chosen if it has at least
    `alpha` times the highest probability.
    """

    layers: Literal["low", "high"] | tuple[int, ...]
    """The candidate layers: these, or every other one of the lower or the upper half. 0 is the input of the first
    layer."""
    alpha: float = 0.1


@dataclass(frozen=True, slots=True)
class Pooling:
    """Which numbers a pooling request (embedding, score, classification) returns."""

    by: Literal["last", "mean", "logits", "classes", "modules"] = "last"
    """last: the hidden state of the last token, after the model's final norm. mean: the mean hidden state of all
    tokens. logits: the logits of `tokens`, after the last token. classes: the output of the model's classification
    head. modules: the output of an encoder's sentence-transformers modules."""
    dimensions: int | None = None
    """Keep only the first numbers, this many; None keeps all."""
    normalizes: bool = False
    """Divide the result by its Euclidean norm."""
    tokens: tuple[int, ...] = ()
    num_first: int | None = None
    """For encoders: tokens of the first text of a pair, with the special tokens around it. The others get token type 1,
    if the model has types. None: one text."""

    @property
    def needs_every_token(self) -> bool:
        """Whether every token must be computed, even if its KV is cached."""
        return self.by == "mean"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one choice turns logits into tokens. The fields act in the order in which they are declared.

    The defaults change nothing: they sample the model's own distribution. The API layer checks ranges.
    """

    contrastive: Contrastive | None = None
    """Needs an auxiliary model. Its cached KV blocks are shared only with other choices that use `contrastive`."""
    dola: DoLa | None = None
    guidance: float | None = None
    """Scale of classifier-free guidance (arXiv:2306.17806): scores are the guide's log-probabilities, plus this many
    times the difference between the choice's own and the guide's. 1 changes nothing. At most one of `contrastive`,
    `dola` and `guidance` is set."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, value added to its logit) pairs."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these tokens can be chosen; None allows all."""
    thinking: Thinking | None = None  # forces its tokens even if `allowed_token_ids` lacks them
    grammar: str | None = None
    """The output must match this grammar, in llguidance's dialect of Lark. Tokens of `stop_token_ids`, which must not
    be empty, appear exactly where the grammar may end. Where only they can follow, no ban applies to them."""
    grammar_prefix: str = ""  # the start of the grammar's text that the prompt already contains
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not appear in the output: the last token is blocked where the previous ones match."""
    min_tokens: int = 0
    """Until this many tokens were generated, every token of `stop_token_ids` is blocked."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the choice; they include end-of-sequence unless the request ignores it."""
    no_repeat_ngram_size: int = 0
    """No n-gram of this size occurs twice in prompt and output; 0 turns it off."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output (CTRL, arXiv:1909.05858)."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time the token was generated."""
    presence_penalty: float = 0.0
    """Subtracted once if the token was generated before."""
    dry: Dry | None = None
    exponential_decay_length_penalty: tuple[int, float] | None = None
    """(start, factor): after t > start output tokens, the logit of each token of `stop_token_ids` increases by its
    magnitude times factor ** (t - start) - 1."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy: the highest logit wins, and the lowest id among equals."""
    top_n_sigma: float = 0.0
    """Keep logits at most this many standard deviations below the highest (arXiv:2411.07641); 0 turns it off."""
    typical_p: float = 1.0
    """Locally typical sampling (arXiv:2202.00666): the probability mass to keep; 1 turns it off."""
    epsilon_cutoff: float = 0.0
    """Keep tokens of at least this probability (arXiv:2210.15191); 0 turns it off."""
    eta_cutoff: float = 0.0
    """Like `epsilon_cutoff`, with a threshold that falls as the entropy rises (arXiv:2210.15191); 0 turns it off."""
    top_k: int = 0
    """Keep the k highest logits, and all that tie with the k-th; 0 turns it off."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens with at least this probability mass; 1 turns it off."""
    min_p: float = 0.0
    """Keep tokens with at least this fraction of the highest probability; 0 turns it off."""
    penalty_alpha: float = 0.0
    """Above 0: contrastive search (arXiv:2202.06417) replaces the fields from `temperature` on. It chooses among the
    `top_k` most probable tokens, at least 1. It requires temperature 0 and does not speculate."""
    xtc: Xtc | None = None
    mirostat: Mirostat | None = None
    sampler_order: tuple[str, ...] = SAMPLER_ORDER
    """The sampling steps from `temperature` on, in the order in which they act. Names all steps that are used."""
    seed: int = 0
    """64-bit unsigned. Noise depends only on (seed, choice, output position, stream, token id)."""
    choice: int = 0
    """Index of this choice among the request's n."""
    logprobs: int | None = None
    """Report the chosen token's logprob and this many alternatives; None reports nothing."""
    logprob_token_ids: tuple[int, ...] = ()
    """Report these tokens in place of alternatives. Not for beam search."""
    prompt_logprobs: int | None = None
    """Like `logprobs`, for every prompt token except the first."""
    beam_candidates: int = 0
    """For beam search: draw nothing, and return this many of the most probable next tokens in the result's
    `beam_candidates`. Fields before `temperature` then act on log-probabilities, as in transformers; the others are
    ignored."""

    pooling: Pooling | None = None
    """Return numbers instead of tokens: nothing is drawn, and all other fields are ignored."""

    @property
    def num_candidates(self) -> int:
        """How many tokens contrastive search compares at each position; 0 without it."""
        return self.top_k if self.penalty_alpha > 0 else 0

    @property
    def needs_scoring(self) -> bool:
        """Whether its result takes more than the model's logits and the sampler (`scoring/`)."""
        transform = self.contrastive is not None or self.dola is not None or self.guidance is not None
        return transform or self.penalty_alpha > 0 or self.pooling is not None

    @property
    def least_share(self) -> float:
        """The fraction of the highest probability that a token needs to be chosen by `contrastive` or `dola`; 0 without
        them.

        Probabilities are the model's own, over the tokens that the fields up to `no_repeat_ngram_size` allow.
        """
        mixed = self.contrastive or self.dola
        return 0.0 if mixed is None else mixed.alpha


@dataclass(frozen=True, slots=True)
class Speculation:
    """How a choice's next tokens are guessed, to be verified several at a time."""

    method: str
    """Name of one of the runner's proposers (`RunnerInfo.speculation_methods`)."""
    num_tokens: int | None = None
    """Verify this many draft tokens in every step, as far as drafts and blocks allow. None leaves the number to the
    controller, which may choose 0."""
    verify: Verification = "match"
    """match: the target draws its own token at each position, and a draft is accepted if it equals that token. The
    output is the same as without speculation. rejection: standard rejection sampling: the same distribution, but other
    tokens. typical: Medusa's typical acceptance: another distribution."""
    prediction: tuple[int, ...] = ()
    """The output that the client expects, for the method `prediction`."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Blocks that some layers need in addition to a choice's own blocks, which every choice has for all its positions.

    Every block covers the same positions as the choice's own block of that index.

    window  keys and values of layers whose queries see only the last `window` positions. Earlier blocks are given back.
    rows    what recurrent layers keep of each position since the newest page. Earlier blocks are given back.
    page    the states of recurrent layers after a block. A choice needs the newest; it begins with zeros.
    """

    kind: Literal["window", "rows", "page"]
    num_blocks: int
    """Block ids of the group are 0 to `num_blocks` - 1."""
    window: int = 0
    """Positions that a query sees, including its own."""

    def most_held(
        self, *, width: int, length: int, budget: int, block_size: int, extra: int = 0, snapshot_every: int = 0
    ) -> int:
        """The most blocks that sequences hold that run alone.

        Args:
            width: number of sequences.
            length: positions of each.
            budget: positions that all of them together compute in a step.
            block_size: positions of a block.
            extra: rows that each computes beyond its known positions.
            snapshot_every: positions between pages of long prompts; 0 for none.
        """
        in_step, of_length, of_extra = (-(-count // block_size) for count in (budget, length, extra))
        if self.kind == "page":
            return 2 * width + 2 + (budget // snapshot_every if snapshot_every else 0)
        if self.kind == "rows":
            return width * (2 + of_extra)
        return min(width * (-(-self.window // block_size) + 1) + in_step, width * (of_length + of_extra))


def state_blocks_after(before: int, known: int, block_size: int, *, keeps_last: bool) -> int:
    """Leading blocks that are folded into a choice's recurrent states once its first `known` tokens are computed.

    A state cannot be taken back. So a block is folded as soon as all its tokens are known and computed, except where
    the last one is computed again, as in contrastive search (`ChoiceResult`): its block then stays in rows, although it
    may be full. Accepted drafts are folded by the next step, when they are known tokens: the count never falls behind
    `before`. In a step's plan the scheduler gives the choice a page for the last of these blocks, the step writes it,
    and the choice's next step begins there.

    Args:
        before: blocks that are folded before the step.
        known: tokens that are computed after it, without drafts and candidates.
        block_size: tokens in a block.
        keeps_last: whether the last of these tokens is kept in rows.
    """
    return max(before, (known - keeps_last) // block_size)


def smallest_group(num_blocks: int, groups: Sequence[CacheGroup]) -> int:
    """How many blocks every layer has, if choices have `num_blocks` of their own."""
    return min([num_blocks, *(group.num_blocks for group in groups if group.kind != "page")])


class PlacedBlock(NamedTuple):
    """A block of a cache group that now belongs to a choice."""

    group: int
    """Index of the group, from 1: group 0 are the choice's own blocks, `blocks` and `new_blocks`."""
    at: int
    """Which of the choice's blocks it covers."""
    block: int


class BlockCopy(NamedTuple):
    """A block that is copied before anything is written."""

    source: int
    destination: int
    group: int = 0


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A choice that is new to the runner, or returns after preemption."""

    key: str
    tokens: tuple[int, ...] | SharedList[int]
    """The prompt, then the output so far. Beams share these lists: do not modify them."""
    num_prompt: int
    """How many of `tokens` are the prompt."""
    num_computed: int
    """How many leading tokens already have their KV in the blocks (prefix cache or fork); less than len(tokens)."""
    blocks: tuple[int, ...]
    """Block table at admission, before the `new_blocks` of the same step."""
    sampling: SamplingParams
    speculation: Speculation | None = None
    """None decodes one token at a time."""
    guides: str | None = None
    """Key of the choice that this one guides. A guide draws nothing and its `sampling` is ignored: it has another
    prompt and the guided choice's output. Both compute their last known token in the same step, with equally many
    drafts."""
    cache_salt: str = ""
    """Drafts learned from a choice's output are used only for choices with the same salt."""
    learn: bool = True
    """Whether heads may be trained on this choice. A choice with a salt is never used for training."""
    sampler_state: float | None = None
    """The `sampler_state` of the choice's last result, if it has output."""
    forked_from: str | None = None
    """Key of a running choice with the same prompt and the same settings except `choice` and `prompt_logprobs`. Its
    output starts with this one's output without the last token. Its token counts are copied instead of counted
    again."""
    placed: tuple[PlacedBlock, ...] = ()
    """Its blocks of the cache groups, before the `placed` of the same step."""
    images: tuple[Image, ...] = ()
    """The prompt's images. Features of rows from `num_computed` on are held for `key` until they are computed."""


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One choice's share of a step."""

    key: str
    num_tokens: int
    """Committed tokens to compute now: a prompt chunk, or 1."""
    new_blocks: tuple[int, ...]
    """Appended to the choice's block table before the step."""
    num_draft: int = 0
    """How many draft tokens to verify in addition; at most the number that the choice's last result offered."""
    num_candidates: int = 0
    """How many candidates contrastive search compares: all that the choice's last result offered."""
    chosen: int | None = None
    """The beam candidate of the choice's last result that was chosen: it becomes the last known token."""
    placed: tuple[PlacedBlock, ...] = ()
    """New blocks of the cache groups. A page that the committed tokens of the step complete is written in the step."""

    @property
    def num_rows(self) -> int:
        """How many rows the step computes for the choice."""
        return self.num_tokens + self.num_draft + self.num_candidates


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. The runner applies the fields in this order."""

    released: tuple[str, ...]
    """Choices to forget, which finished, were aborted or were preempted since the last plan."""
    copies: tuple[BlockCopy, ...]
    """Blocks to copy before anything is written: copy-on-write of forks."""
    admitted: tuple[AdmittedRequest, ...]
    scheduled: tuple[ScheduledRequest, ...]

    @property
    def keys(self) -> list[str]:
        """Keys of the scheduled choices."""
        return [entry.key for entry in self.scheduled]

    def written_blocks(self, block_size: int) -> list[int]:
        """Blocks that will be written to: all blocks that the plan hands out, except shared ones, which are full."""
        blocks = [block for entry in self.scheduled for block in entry.new_blocks]
        for admitted in self.admitted:
            blocks += admitted.blocks[admitted.num_computed // block_size :]
        return blocks


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token's log-probability, its rank in the vocabulary (1 is the most probable) and the top alternatives."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]
    """The most probable (token id, logprob), best first, lower id first among equals, as many as requested. Otherwise
    the tokens of `logprob_token_ids`, in their order."""


@dataclass(frozen=True, slots=True)
class BeamCandidate:
    """A possible next token of a beam."""

    token_id: int
    logprob: float
    """After bans and penalties, without renormalisation: the probabilities of all tokens need not sum to 1."""
    report: TokenLogprobs | None = None
    """Set if the request asks for logprobs."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a choice failed."""

    message: str
    by_request: bool = False
    """Whether the request's own settings are the cause, rather than the model or the server."""


@dataclass(slots=True)
class ChoiceResult:
    """The result of a step for one scheduled choice. Treat as immutable: it is not frozen only because one is built per
    token.

    Contrastive search needs two steps for each position. The logits of the last known token yield the candidates; the
    next step computes them together with that token, again. So after admission, the first step that computes the last
    known token returns candidates and no tokens, and that token counts as not computed. Every step with candidates
    returns one token, and the candidates of the next position.
    """

    key: str
    tokens: tuple[int, ...]
    """Newly committed tokens. Empty until the last known token is computed, and in a contrastive search's step without
    candidates. All known tokens except the last have their KV."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry for each of `tokens`, if the request asks for logprobs."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry for each prompt token whose predecessor was computed in this step, in order, if the request asks for
    them."""
    num_draft: int = 0
    """How many draft tokens the runner wants to verify in the choice's next step."""
    num_accepted: int = 0
    """Draft tokens of this step that were accepted."""
    num_rejected: int = 0
    """Draft tokens of this step that were rejected."""
    num_candidates: int = 0
    """How many candidates contrastive search will compare in the choice's next step."""
    method: str = ""
    """The speculation method that made the drafts; empty without drafts."""
    error: Failure | None = None
    """Set if this choice failed; other choices are not affected."""
    beam_candidates: tuple[BeamCandidate, ...] = ()
    """Replaces `tokens` in beam search: the most probable first, the lower id first among equals. Fewer than requested
    if fewer are possible."""
    sampler_state: float | None = None
    """Set with `tokens`: state that must be passed back if the choice is admitted again. Only mirostat has state that
    does not follow from the tokens."""
    pooled: bytes = b""
    """Replaces `tokens` for pooling requests: the numbers as little-endian float32."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step for all scheduled choices."""

    choices: tuple[ChoiceResult, ...]
    """One entry for each scheduled choice, in the plan's order. Empty if memory ran out."""
    out_of_memory: str = ""
    """The error of device or host if memory ran out. The plan's releases, copies, admissions and blocks remain applied,
    but nothing was computed, and the drafts and candidates of the scheduled choices are lost."""


def excluding_fields(sampling: SamplingParams) -> str:
    """The request fields that may have excluded tokens, by their names in the API."""
    used = {
        "logit_bias": sampling.logit_bias,
        "allowed_token_ids": sampling.allowed_token_ids is not None,
        "thinking_token_budget": sampling.thinking,
        "grammar": sampling.grammar,
        "stop_token_ids": sampling.grammar and len(sampling.stop_token_ids) > 1,  # then stop tokens cannot be text
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
    """The failure of a choice for which no token can be drawn."""
    return Failure(f"no token can be chosen with these settings: {excluding_fields(sampling)}", by_request=True)
