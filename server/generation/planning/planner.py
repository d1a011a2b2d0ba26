"""The planner: validates a request against the model, and makes the engine's requests."""

import secrets
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from types import MappingProxyType

from model_runner.contract import SamplingParams, Speculation
from model_runner.image import Image
from model_runner.runner_interface import RunnerInfo
from scheduler.interface import ChoiceState, EngineRequest
from server.config import Settings
from server.errors import InvalidRequestError
from server.generation.constraints.check import grammar_of
from server.generation.notices import Notice, to_report
from server.generation.planning.decoding_rules import (
    SamplingRules,
    ScoringRules,
    SpeculationRules,
    check_tokens,
    choose_beam_search,
)
from server.generation.planning.image_prompts import ImagePrompts, ReadImages
from server.generation.planning.limits import RequestLimits, TokenBudget, bound_answer, without_oldest
from server.generation.planning.output_constraints import ConstraintRules, OutputConstraints
from server.generation.planning.plan import OutputOptions, Plan
from server.generation.prompt import encode, encode_fill_in, encode_pieces, read_prompt
from server.generation.request import (
    Conversation,
    FillIn,
    GenerationRequest,
    MixedPrompt,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from server.generation.sent_images import UploadedFile
from server.generation.served_model import ServedModel
from server.text.chat_template import Clock
from server.text.image_marks import without_marks
from server.text.tokenizer import Tokenizer


def ignored_learn(request: GenerationRequest, *, learns: bool) -> Iterator[Notice]:
    """A notice if the request allows learning, but nothing will be learnt. `learns`: whether this server learns."""
    decoding = request.decoding
    if not request.learn:
        return
    if not learns:
        yield Notice("learn", "This server does not learn.")
    elif request.cache_salt:
        yield Notice("learn", "Requests with a 'cache_salt' are not learnt from.")
    elif decoding.beam_search is not None or decoding.penalty_alpha:
        yield Notice("learn", "Beam search and contrastive search are not learnt from.")


NEGATIVE_PROMPT = "guidance.negative_prompt"
"""Path of the field in a request."""
_SEED_BITS = 53
"""Bits of a drawn seed; every JSON reader keeps integers of this size exactly."""


@dataclass(frozen=True, slots=True)
class _Encoded:
    """An encoded prompt."""

    tokens: Sequence[int]
    path: str
    text: str = ""
    """The prompt's text, if it came as text."""
    num_first: int | None = None
    """Tokens of the first text of a pair, for an encoder."""
    images: tuple[Image, ...] = ()


def _anywhere() -> None:
    """Allows any work."""


def _date_shown(prompt: Prompt) -> str | None:
    return prompt.clock.shown if isinstance(prompt, Conversation) else None


class Planner:
    """Plans requests for one model on one engine. Cheap to make. A plan takes as long as encoding its texts."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        model: ServedModel,
        info: RunnerInfo,
        settings: Settings,
        weigh_image: Callable[[], None] = _anywhere,
        files: Mapping[str, UploadedFile] = MappingProxyType({}),
    ) -> None:
        """`weigh_image` is called before each image is decoded, and raises if this is no place for that. `files` are
        uploaded images that a request may name.
        """
        self._tokenizer = tokenizer
        self._model = model
        self._info = info
        self._settings = settings
        self._rules = SamplingRules(tokenizer, model, info)
        self._images = ImagePrompts(tokenizer, model.images, info, settings, weigh_image, files)
        self._limits = RequestLimits(
            info,
            max_waiting=settings.max_waiting,
            clamps=not settings.strict,
            max_logprobs=settings.max_logprobs,
            shortens=settings.max_model_len is not None,
        )

    @property
    def speculation(self) -> SpeculationRules:
        """Rules for speculation."""
        return SpeculationRules(self._info.speculation_methods, self._settings.speculation)

    @property
    def scoring(self) -> ScoringRules:
        """Rules for decoding methods that combine scores."""
        return ScoringRules(self._model.aux_model, self._info.num_early_exits)

    @property
    def takes_images(self) -> bool:
        """Whether prompts may have images."""
        return self._images.layout is not None

    @property
    def unsupported(self) -> frozenset[str]:
        """Fields that the loaded models do not support."""
        return self.scoring.unsupported | (frozenset({"suffix"}) if self._tokenizer.fill_in is None else frozenset())

    def plan(self, request: GenerationRequest) -> Plan:
        """The plan for a request.

        Raises NotFoundError for another model, and InvalidRequestError for fields that do not fit the model, the engine
        or each other.
        """
        notices = list(request.notices)
        name = self._named(request, notices)
        if request.pooling is None:
            self._model.abilities.check_generates(name)
            self._limits.check_queue(request)
            self._limits.check_logprobs(request)
        if self._settings.template_date is not None:
            request = replace(request, prompts=tuple(map(self._dated, request.prompts)))
        encoded = [self._encoded(prompt, request, notices) for prompt in request.prompts]
        negative_prompt = self._negative_prompt(request)
        constraints = self._constraints(request, encoded[0].text, notices)
        notices += ignored_learn(request, learns=self._settings.learn)
        options = replace(self._options(request, notices), parser=constraints.parser)
        of_all = self._of_all_prompts(request, options, constraints)
        seed_drawn = request.seed is None
        seed = secrets.randbits(_SEED_BITS) if request.seed is None else request.seed
        answer_id = request.id or f"{request.id_prefix}{request.own_id or uuid.uuid4().hex}"
        engine_id = answer_id if request.own_id is None else f"{answer_id}-{uuid.uuid4().hex}"
        requests = []
        for index, prompt in enumerate(encoded):
            sampling = replace(of_all.sampling, seed=(seed + index if seed_drawn else seed) & (2**64 - 1))
            one = replace(of_all, request_id=f"{engine_id}-{index}", sampling=sampling)
            requests.append(self._with_prompt(one, prompt, negative_prompt, request, notices))
        requests = [*bound_answer(requests, request, self._tokenizer, notices)]
        self._limits.check_min_tokens(options.min_tokens, min(one.max_tokens for one in requests))
        return Plan(
            id=answer_id,
            model=name,
            requests=tuple(requests),
            options=options,
            n=request.num_choices,
            seed=seed,
            seed_drawn=seed_drawn,
            stream=request.stream,
            at_a_time=None if request.pooling is None else self._info.max_num_seqs,
            is_bounded=request.max_tokens is not None or self._default_max_tokens(request) is not None,
            opening=self._opening(request, encoded[0].text),
            template_date=_date_shown(request.prompts[0]),
            notices=to_report(notices, strict=self._settings.strict),
        )

    def rendered(self, conversation: Conversation) -> tuple[str, str | None, Sequence[Notice]]:
        """The text of a conversation without images for a later completion, the date in it, and notices.

        It lacks the special tokens that begin every completion.
        """
        dated = self._dated(conversation)
        assert isinstance(dated, Conversation), "it was one"
        text, notices = read_prompt(self._tokenizer, dated)
        return self._tokenizer.without_beginning(text), dated.clock.shown, notices

    def _dated(self, prompt: Prompt) -> Prompt:
        """The prompt with the date that the settings fix for chat templates."""
        fixed = self._settings.template_date
        if fixed is None or not isinstance(prompt, Conversation):
            return prompt
        return replace(prompt, clock=Clock(datetime.fromisoformat(fixed)))

    def count(self, request: GenerationRequest) -> tuple[int, Sequence[Notice]]:
        """Count the tokens of a request's only prompt, as `tokenize` returns them."""
        tokens, _, notices = self.tokenize(request)
        return len(tokens), notices

    def tokenize(self, request: GenerationRequest) -> tuple[Sequence[int], Sequence[Image], Sequence[Notice]]:
        """The tokens and images of a request's only prompt, after truncation, even if they do not fit, and notices.

        Raises the same errors as `plan` for such a prompt.
        """
        notices = list(request.notices)
        self._named(request, notices)
        prompt = self._dated(request.prompts[0])
        assert isinstance(prompt, TextPrompt | Conversation), "only these prompts are counted"
        encoded = self._tokens(prompt, request, notices, is_cut=True)
        room = TokenBudget(self._limits, self._limits.capacity(), request, self._default_max_tokens(request), notices)
        return room.cut(encoded.tokens), encoded.images, to_report(notices, strict=self._settings.strict)

    def _named(self, request: GenerationRequest, notices: list[Notice]) -> str:
        """The model's name in the answer. Raises the errors of `ServedModel.named`."""
        if request.model is None and request.may_omit_model:
            return self._model.name
        return self._model.named(request.model, notices, needs_name=self._settings.strict)

    def _of_all_prompts(
        self, request: GenerationRequest, options: OutputOptions, constraints: OutputConstraints
    ) -> EngineRequest:
        """The engine request without its prompt, its seed, and the limits that follow from the prompt's length."""
        prediction = self._prediction(request)
        beams = choose_beam_search(request.decoding, options.stop)
        sampling = self._sampling(request, constraints)
        self._check_priority(request.priority)
        self._limits.check_beams(beams, request)
        self._limits.check_step(sampling)
        return EngineRequest(
            request_id="",
            prompt=(),
            sampling=sampling,
            max_tokens=0,
            choices=tuple(ChoiceState(choice) for choice in range(request.num_choices)),
            priority=request.priority,
            cache_salt=request.cache_salt,
            learn=request.learn is not False,
            speculation=self._speculation(request, prediction),
            beam_search=beams,
        )

    def _encoded(self, prompt: Prompt, request: GenerationRequest, notices: list[Notice]) -> _Encoded:
        """The tokens of a prompt. Adds notices of ignored parts."""
        if isinstance(prompt, TokenPrompt):
            check_tokens(prompt.tokens, prompt.path, self._info.vocab_size)
            return _Encoded(prompt.tokens, prompt.path, num_first=prompt.num_first)
        if isinstance(prompt, MixedPrompt | FillIn):
            return _Encoded(self._in_parts(prompt), prompt.path)
        return self._tokens(prompt, request, notices, is_cut=request.truncate_prompt is not None)

    def _tokens(
        self, prompt: TextPrompt | Conversation, request: GenerationRequest, notices: list[Notice], *, is_cut: bool
    ) -> _Encoded:
        """The tokens of a text or a conversation with its images. They need not fit if they are cut later."""
        images = self._images.read(prompt, notices) if isinstance(prompt, Conversation) else {}
        text = self._text(prompt, request, notices)
        if isinstance(prompt, Conversation) and prompt.drops_oldest:
            text = self._fitting(prompt, request, images, notices)
        path = (prompt.path if isinstance(prompt, TextPrompt) else None) or request.path("prompt")
        plain = without_marks(text)
        if plain == text:
            return _Encoded(self.encode(text, path, prompt, is_cut=is_cut), path, text)
        num_rows = sum(image.arrangement.num_rows for mark, image in images.items() if mark in text)
        at_least = num_rows + self._tokenizer.fewest_tokens(plain)
        if not is_cut and at_least > self._limits.capacity():
            raise self._limits.too_long(at_least, path, at_least=True)
        tokens, placed = self._with_images(text, prompt, images)
        if not is_cut and len(tokens) > self._limits.capacity():
            raise self._limits.too_long(len(tokens), path)
        self._images.check_memory(placed, path)
        return _Encoded(self._known(tokens, path), path, plain, images=placed)

    def _with_images(
        self, text: str, prompt: TextPrompt | Conversation, images: ReadImages
    ) -> tuple[list[int], tuple[Image, ...]]:
        return self._images.encode(text, images, self._tokenizer.beginning_ids if prompt.adds_special else ())

    def _text(self, prompt: TextPrompt | Conversation, request: GenerationRequest, notices: list[Notice]) -> str:
        """The text of a prompt. Adds notices of ignored parts, under the names of the request's API."""
        text, left_out = read_prompt(self._tokenizer, prompt, request.path("prompt"), self._images.texts)
        notices += [replace(notice, path=request.path(notice.path)) for notice in left_out]
        return text

    def _fitting(
        self, conversation: Conversation, request: GenerationRequest, images: ReadImages, notices: list[Notice]
    ) -> str:
        """The text of the conversation, without old messages if they leave no room for the output.

        At most half of the context is kept free for the output.
        """
        path = request.path("prompt")
        room = self._limits.capacity() - min(request.max_tokens or 1, self._limits.capacity() // 2)

        def text_of(part: Conversation) -> str:
            return read_prompt(self._tokenizer, part, path, self._images.texts)[0]

        def fits(part: Conversation) -> bool:
            text = text_of(part)
            if self._tokenizer.fewest_tokens(text) > room:
                return False
            if without_marks(text) == text:
                return len(encode(self._tokenizer, text, part)) <= room
            return len(self._with_images(text, part, images)[0]) <= room

        shorter = without_oldest(conversation, fits)
        dropped = len(conversation.messages) - len(shorter.messages)
        if dropped:
            notices.append(Notice(path, f"Too long for the context: the {dropped} oldest messages were dropped."))
        return text_of(shorter)

    def _negative_prompt(self, request: GenerationRequest) -> Sequence[int] | None:
        """The tokens of the negative prompt. None: each prompt's last token."""
        guidance = request.decoding.guidance
        if guidance is None or guidance.negative_prompt is None:
            return None
        opposed = request.prompts[0].opposed(guidance.negative_prompt)
        if isinstance(opposed, Conversation) and opposed.images:
            message = f"Setting '{NEGATIVE_PROMPT}' in a request with images is not supported."
            raise InvalidRequestError(message, param=NEGATIVE_PROMPT, code="invalid_parameter_combination")
        if isinstance(opposed, FillIn):
            return self._in_parts(opposed)
        text, _ = read_prompt(self._tokenizer, opposed)
        return self.encode(text, NEGATIVE_PROMPT, opposed)

    def _prediction(self, request: GenerationRequest) -> Sequence[int] | None:
        """The tokens of the predicted output, which may be as long as an answer."""
        if request.prediction is None:
            return None
        return self.encode(request.prediction, request.path("prediction"))

    def encode(
        self, text: str, path: str, prompt: TextPrompt | Conversation | None = None, *, is_cut: bool = False
    ) -> list[int]:
        """The tokens of a text, which need not fit if it is cut later (`is_cut`).

        Refuses a text that is too long, without encoding it if it is far too long. Refuses tokens that the tokenizer
        has and the model does not.
        """
        at_least = self._tokenizer.fewest_tokens(text)
        if not is_cut and at_least > self._limits.capacity():
            raise self._limits.too_long(at_least, path, at_least=True)
        tokens = encode(self._tokenizer, text, prompt)
        if not is_cut and len(tokens) > self._limits.capacity():
            raise self._limits.too_long(len(tokens), path)
        return self._known(tokens, path)

    @property
    def capacity(self) -> int:
        """The most tokens of a prompt without output."""
        return self._limits.capacity()

    def encode_beginning(self, text: str, path: str, num_tokens: int) -> list[int]:
        """The beginning of a text with the special tokens around it, at most `num_tokens` together; -1: as many as fit.

        Raises InvalidRequestError if `num_tokens` leaves no room for the text.
        """
        added = self._tokenizer.num_added
        if 0 <= num_tokens <= added:
            message = (
                f"Invalid 'truncate_prompt_tokens': integer below minimum value. Expected a value >= {added + 1}, "
                f"because this model has {added} special tokens around each text, but got {num_tokens} instead."
            )
            raise InvalidRequestError(message, param="truncate_prompt_tokens", code="integer_below_min_value")
        most = self._limits.capacity() if num_tokens == -1 else num_tokens
        return self._known(self._tokenizer.encode_beginning(text, most), path)

    def _in_parts(self, prompt: MixedPrompt | FillIn) -> list[int]:
        """The tokens of a prompt whose parts are encoded separately."""
        parts = prompt.pieces if isinstance(prompt, MixedPrompt) else prompt.parts
        given = [part for part in parts if isinstance(part, int)]
        check_tokens(given, prompt.path, self._info.vocab_size)
        at_least = len(given) + sum(self._tokenizer.fewest_tokens(part) for part in parts if isinstance(part, str))
        if at_least > self._limits.capacity():
            raise self._limits.too_long(at_least, prompt.path, at_least=True)
        if isinstance(prompt, MixedPrompt):
            return self._known(encode_pieces(self._tokenizer, prompt.pieces), prompt.path)
        return self._known(encode_fill_in(self._tokenizer, prompt), prompt.path)

    def _known(self, tokens: list[int], path: str) -> list[int]:
        """Refuses tokens that the tokenizer has and the model does not."""
        strange = next((token for token in tokens if token >= self._info.vocab_size), None)
        if strange is not None:
            name = self._tokenizer.token_text(strange)
            message = f"Invalid '{path}': it contains the token {name!r}, which the model does not have."
            raise InvalidRequestError(message, param=path, code="invalid_value")
        return tokens

    def _sampling(self, request: GenerationRequest, constraints: OutputConstraints) -> SamplingParams:
        """The sampling parameters without the seed, which differs between prompts."""
        if request.pooling is not None:
            return SamplingParams(pooling=request.pooling)
        decoding = request.decoding
        check_tokens(request.logprob_token_ids, "logprob_token_ids", self._info.vocab_size)
        params = self._rules.params(decoding, fills_in=request.fills_in)
        return replace(
            params,
            logit_bias=(*params.logit_bias, *self._biases(request.biased_texts)),
            guidance=self.scoring.guidance(decoding.guidance),
            contrastive=self.scoring.contrastive(decoding.contrastive),
            dola=self.scoring.dola(decoding.dola),
            logprobs=request.logprobs,
            logprob_token_ids=tuple(request.logprob_token_ids),
            prompt_logprobs=request.prompt_logprobs,
            grammar=constraints.grammar,
            grammar_prefix=constraints.prefix,
            thinking=constraints.thinking,
        )

    def _biases(self, texts: Sequence[tuple[str, float]]) -> Iterator[tuple[int, float]]:
        """Biases for the tokens of these texts, without tokens that the model cannot generate."""
        for text, bias in texts:
            for token in self._tokenizer.encode_literally(text):
                if token < self._info.vocab_size:
                    yield token, bias

    def _with_prompt(
        self,
        request: EngineRequest,
        encoded: _Encoded,
        negative_prompt: Sequence[int] | None,
        asked: GenerationRequest,
        notices: list[Notice],
    ) -> EngineRequest:
        """The request with a prompt, truncated if requested, and the limits that follow from its length."""
        room = self._limits.room(request, asked, self._default_max_tokens(asked), notices)
        prompt = room.cut(encoded.tokens)
        if encoded.images:
            self._check_images(asked, is_cut=len(prompt) < len(encoded.tokens))
        max_tokens = room.max_tokens(len(prompt), encoded.path)
        guide: Sequence[int] = ()
        if request.sampling.guidance is not None:
            guide = prompt[-1:] if negative_prompt is None else negative_prompt
            max_tokens = min(max_tokens, room.max_tokens(len(guide), NEGATIVE_PROMPT))
        if encoded.num_first is not None and (pooling := request.sampling.pooling) is not None:
            sampling = replace(request.sampling, pooling=replace(pooling, num_first=encoded.num_first))
            request = replace(request, sampling=sampling)
        return replace(request, prompt=tuple(prompt), max_tokens=max_tokens, guide=tuple(guide), images=encoded.images)

    def _check_images(self, asked: GenerationRequest, *, is_cut: bool) -> None:
        """Refuse what a request with images does not support."""
        if asked.pooling is not None:
            message = f"Invalid '{asked.path('prompt')}': images are supported only by endpoints that generate text."
            raise InvalidRequestError(message, param=asked.path("prompt"), code="unsupported_value")
        if asked.decoding.contrastive is not None:
            message = "Setting 'contrastive' in a request with images is not supported: the auxiliary model has none."
            raise InvalidRequestError(message, param="contrastive", code="invalid_parameter_combination")
        if is_cut:
            name = asked.path("truncate_prompt")
            message = f"Invalid '{name}': a prompt with images cannot be cut. Send a shorter conversation."
            raise InvalidRequestError(message, param=name, code="invalid_value")

    def _default_max_tokens(self, request: GenerationRequest) -> int | None:
        of_model = self._model.defaults.max_tokens
        return request.default_max_tokens if of_model is None else of_model

    def _constraints(self, request: GenerationRequest, prompt: str, notices: list[Notice]) -> OutputConstraints:
        """How the output is constrained and parsed. `prompt` is the text of a conversation."""
        if (request.constraint or request.tools) and not self._eos_token_ids(request):
            message = "Structured output and tools need an EOS token, and this model has none."
            raise InvalidRequestError(message, code="unsupported_value")
        if isinstance(request.prompts[0], Conversation):
            return ConstraintRules(self._tokenizer, self._model.formats).of_conversation(request, prompt, notices)
        if request.constraint is None:
            return OutputConstraints()
        return OutputConstraints(grammar_of(request.constraint, request.path("constraint"), notices))

    def _opening(self, request: GenerationRequest, prompt: str) -> str:
        """The tag that begins the reasoning, if it stands in the prompt and the client wants the whole text."""
        conversation = request.prompts[0]
        if request.separates_reasoning or not isinstance(conversation, Conversation) or not conversation.open_turn:
            return ""
        return self._model.formats.opening(prompt)

    def _eos_token_ids(self, request: GenerationRequest) -> tuple[int, ...]:
        return self._rules.eos_token_ids(request.decoding, fills_in=request.fills_in)

    def _options(self, request: GenerationRequest, notices: list[Notice]) -> OutputOptions:
        decoding = request.decoding
        stop = self._model.defaults.stop if decoding.stop is None else decoding.stop
        if request.constraint is not None or (request.tools is not None and request.tools.mode == "required"):
            if decoding.stop:
                notices.append(Notice(request.path("stop"), "Ignored with structured output."))
            stop = ()
        return OutputOptions(
            stop=tuple(stop),
            include_stop=bool(decoding.include_stop_str_in_output),
            min_tokens=decoding.min_tokens or 0,
            skip_special_tokens=decoding.skip_special_tokens is not False,
            eos_token_ids=self._eos_token_ids(request),
            reports_tokens=request.reports_tokens or request.logprobs is not None,
        )

    def _speculation(self, request: GenerationRequest, prediction: Sequence[int] | None) -> Speculation | None:
        """How to speculate, or None. Beam search, contrastive search and pooling use a step's rows for other things."""
        if request.pooling or request.decoding.penalty_alpha or request.decoding.beam_search is not None:
            return None
        return self.speculation.choose(request.decoding.speculation, prediction)

    def _check_priority(self, priority: int) -> None:
        if priority and self._settings.policy != "priority":
            message = (
                f"Unsupported value: 'priority' does not support {priority} while the server's policy is "
                f"'{self._settings.policy}'. Use 0, or start the server with --policy priority."
            )
            raise InvalidRequestError(message, param="priority", code="unsupported_value")
