"""Requests for embeddings and scores, and the plans that this model answers them with."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from model_runner.contract import Pooling
from server.errors import ContextLengthError, InvalidRequestError, shorten
from server.generation.abilities import Embedding, Scoring, unable
from server.generation.notices import Notice
from server.generation.planning.plan import Plan
from server.generation.planning.planner import Planner
from server.generation.prompt import render
from server.generation.request import Conversation, GenerationRequest, Prompt, TextPrompt, TokenPrompt
from server.generation.served_model import ServedModel
from server.text.chat_template import ChatTemplate, ChatTemplateError
from server.text.tokenizer import Tokenizer

_BYTES_EACH = 512
"""Fixed cost of a prompt, as bytes of text that take as long to process."""


_MOST_LOOKED_AT = 8
_MOST_COMPARED = 256
_FEW = 4
"""Inputs of token ids, tokens of each, and differences from the model's own tokens that mean nothing."""
_FOREIGN = (
    "These token ids look like another tokenizer's, whose vectors mean nothing here. Send texts: in LangChain's "
    "OpenAIEmbeddings, set check_embedding_ctx_length=False."
)
MAX_TOKENS = 1 << 20
"""The most tokens in all prompts of a request together."""


@dataclass(frozen=True, slots=True)
class Embed:
    """A request for a vector of each input."""

    inputs: Sequence[TextPrompt | TokenPrompt | Conversation]
    dimensions: int | None = None
    """Numbers in each vector; None: the model's size."""
    prompt_name: str | None = None
    """Name of the model's prompt that goes before each text; None: the model's default."""
    truncate: int | None = None
    """How many tokens of each input are used, at its end or, by an encoder, at its beginning; -1: as many as fit."""
    normalizes: bool | None = None
    """Whether vectors have length 1; None: the model's default."""
    keeps_beginning: bool = False
    """Whether `truncate` keeps the beginning of texts, between the special tokens, whatever the model."""

    @property
    def num_bytes(self) -> int:
        """Bytes of text that take about as long to process as all inputs."""
        return sum(_BYTES_EACH + _size(one) for one in self.inputs)


@dataclass(frozen=True, slots=True)
class Classify:
    """A request for the probabilities of each input's classes."""

    inputs: Sequence[TextPrompt | TokenPrompt]
    truncate: int | None = None
    """As in Embed."""

    @property
    def num_bytes(self) -> int:
        """Bytes of text that take about as long to process as all inputs."""
        return sum(_BYTES_EACH + _size(one) for one in self.inputs)


def _size(prompt: TextPrompt | TokenPrompt | Conversation) -> int:
    """Characters or tokens of a prompt, before the chat template adds any."""
    if isinstance(prompt, TextPrompt):
        return len(prompt.text)
    if isinstance(prompt, TokenPrompt):
        return len(prompt.tokens)
    return sum(len(message["content"]) for message in prompt.messages)


@dataclass(frozen=True, slots=True)
class Pair:
    """A query, a document that may answer it, and the paths of both in the request."""

    query: str
    document: str
    query_path: str
    path: str
    """The document's path."""


@dataclass(frozen=True, slots=True)
class Score:
    """A request for scores: how well the document of each pair answers its query."""

    pairs: Sequence[Pair]
    instruction: str | None = None
    """The question that documents are judged by; None: the model's default."""
    max_document_tokens: int | None = None
    """How many tokens at the beginning of each document are used; None: all."""
    truncate: int | None = None
    """How many tokens of each pair are used, by cutting its document; -1: as many as fit; None: all."""

    @property
    def num_bytes(self) -> int:
        """Bytes of text that take about as long to process as all pairs."""
        shared = _BYTES_EACH + len(self.instruction or "")
        return sum(shared + len(pair.query) + len(pair.document) for pair in self.pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRequest:
    """A request for embeddings, scores or classes, whichever API it came through."""

    model: str | None
    """The name that the client sent; None: none."""
    may_omit_model: bool = False
    """Whether a missing model name is usual in this API, and not reported."""
    asks: Embed | Score | Classify
    id_prefix: str
    priority: int = 0
    cache_salt: str = ""
    paths: Mapping[str, str] = field(default_factory=dict)
    """The API's names of fields that errors may name, where they differ from the names here."""
    notices: Sequence[Notice] = ()
    """Fields that the API has ignored already."""


_MOST_CUTS = 6
"""How often a document is cut before its pair fits: more than once where texts have other tokens in a prompt."""
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
"""Qwen3-Reranker's system prompt, as its authors publish it."""
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Qwen3-Reranker's default instruction."""


class PairPrompts:
    """Makes one model's prompts for a query and a document.

    A chat template that knows the roles `query` and `document` is used. Otherwise a model with a classification head
    gets the two texts as its tokenizer joins them. A model that says yes or no gets Qwen3-Reranker's question.
    """

    def __init__(
        self, tokenizer: Tokenizer, scoring: Scoring, encode: Callable[[str, str], list[int]], capacity: int
    ) -> None:
        """`encode` tokenizes a text, special tokens included; its error for too many tokens names the given path.
        `capacity` is the most tokens of a prompt.
        """
        self.cut: list[str] = []
        """Paths of the documents that were cut by `Score.truncate`."""
        self._tokenizer = tokenizer
        self._capacity = capacity
        self._scoring = scoring
        self._encode = encode

    def of(self, pair: Pair, asks: Score) -> TokenPrompt:
        """The prompt for a pair. Raises InvalidRequestError if it is too long or the model's template refuses it."""
        document = pair.document
        if asks.max_document_tokens is not None:
            document = self._tokenizer.beginning(document, asks.max_document_tokens)
        if asks.truncate is not None:
            fitting = self._fitting(replace(pair, document=document), asks, asks.truncate)
            if fitting != document:
                self.cut.append(pair.path)
            document = fitting
        try:
            tokens, num_first = self._tokens(pair.query, document, asks.instruction, pair.path)
            return TokenPrompt(tokens, pair.path, num_first)
        except ContextLengthError:
            self._encode(pair.query, pair.query_path)  # blames the query if it is too long by itself
            raise

    def _fitting(self, pair: Pair, asks: Score, num_tokens: int) -> str:
        """The beginning of the pair's document with which it has at most `num_tokens`; -1: as many as fit."""
        most = self._capacity if num_tokens == -1 else min(num_tokens, self._capacity)
        keep = most
        for _ in range(_MOST_CUTS):
            document = self._tokenizer.beginning(pair.document, keep)
            try:
                size = len(self._tokens(pair.query, document, asks.instruction, pair.path)[0])
            except ContextLengthError as error:
                size = error.num_tokens
            if size <= most or not document:
                return document
            keep = max(min(keep, len(self._tokenizer.encode(document, add_special_tokens=False))) - (size - most), 0)
        return document

    def _tokens(self, query: str, document: str, asked: str | None, path: str) -> tuple[list[int], int | None]:
        """The tokens of a pair and, if the tokenizer says so, how many belong to the query."""
        template = self._tokenizer.chat_template
        if template is not None and template.knows_pairs:
            return self._encode(self._rendered(template, query, document, asked, path), path), None
        if self._scoring.by == "classes":
            if asked is not None:
                raise _no_instruction()
            self._encode(query + document, path)  # refuses texts that are far too long
            return self._tokenizer.encode_pair(query, document)
        instruction = asked or self._scoring.instruction or _INSTRUCTION
        question = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        messages = [{"role": "system", "content": _JUDGE}, {"role": "user", "content": question}]
        text, _ = render(template, Conversation(messages, thinks=False))
        return self._encode(text, path), None

    def _rendered(self, template: ChatTemplate, query: str, document: str, asked: str | None, path: str) -> str:
        pair = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        opens_turn, instruction = self._scoring.opens_turn, asked or self._scoring.instruction
        try:
            plain = template.render(pair, add_generation_prompt=opens_turn, variables={})
            if instruction is None:
                return plain
            messages = [{"role": "system", "content": instruction}, *pair]
            text = template.render(messages, add_generation_prompt=opens_turn, variables={})
        except ChatTemplateError as error:
            message = f"The model's chat template does not accept this pair: {shorten(str(error), 200)}"
            raise InvalidRequestError(message, param=path, code="invalid_value") from error
        if asked is not None and text == plain:
            raise _no_instruction()
        return text


def _no_instruction() -> InvalidRequestError:
    message = "Unsupported parameter: 'instruction'. This model gets a query and a document, and nothing else."
    return InvalidRequestError(message, param="instruction", code="unsupported_parameter")


class PoolingRules:
    """Plans requests for embeddings, scores and classes, for one model on one engine. Cheap to make."""

    def __init__(
        self, planner: Planner, tokenizer: Tokenizer, model: ServedModel, hidden_size: int, *, auto_truncate: bool
    ) -> None:
        """With `auto_truncate`, texts that are too long are cut and reported."""
        self._auto_truncate = auto_truncate
        self._planner = planner
        self._tokenizer = tokenizer
        self._model = model
        self._hidden_size = hidden_size

    def plan(self, request: PoolingRequest) -> Plan:
        """The plan for a request. Raises what Planner.plan does, also if the model lacks the ability."""
        if request.model is not None:
            self._model.check_name(request.model)
        try:
            return self._plan(request)
        except ContextLengthError as error:
            raise _with_advice(error, request.asks) from error

    def _plan(self, request: PoolingRequest) -> Plan:
        asks, notices = request.asks, list(request.notices)
        if not isinstance(asks, Score):
            notices += self._foreign_tokens(asks.inputs)
        if isinstance(asks, Embed):
            pooling, prompts = self._embedding(asks, notices)
        elif isinstance(asks, Score):
            pooling, prompts = self._scores(asks, request.paths["prompt"], notices)
        else:
            pooling, prompts = self._classes(asks, notices)
        asked = GenerationRequest(
            model=request.model,
            may_omit_model=request.may_omit_model,
            prompts=prompts,
            pooling=pooling,
            id_prefix=request.id_prefix,
            max_tokens=0,
            truncate_prompt=None if isinstance(asks, Score) or self._keeps_beginning(asks) else asks.truncate,
            priority=request.priority,
            cache_salt=request.cache_salt,
            paths=request.paths,
            notices=notices,
        )
        plan = self._planner.plan(asked)
        _check_total(sum(len(one.prompt) for one in plan.requests), asked.path("prompt"))
        return plan

    def _cut(self, prompt: Prompt, notices: list[Notice]) -> Prompt:
        """The prompt, or with a notice its beginning if it is a text that is too long."""
        if not isinstance(prompt, TextPrompt):
            return prompt
        room = self._planner.capacity - self._tokenizer.num_added
        if self._tokenizer.beginning(prompt.text, room) == prompt.text:
            return prompt
        path = prompt.path or "input"
        notices.append(Notice(path, f"Too long for the model: only the first {room} tokens are used."))
        return TokenPrompt(self._planner.encode_beginning(prompt.text, path, -1), path)

    def _foreign_tokens(self, inputs: Sequence[Prompt]) -> Iterator[Notice]:
        """A notice for the first input of token ids that the model's own tokenizer would hardly have made."""
        for prompt in inputs[:_MOST_LOOKED_AT]:
            if isinstance(prompt, TokenPrompt) and self._looks_foreign(prompt.tokens[:_MOST_COMPARED]):
                yield Notice(prompt.path, _FOREIGN)
                return

    def _looks_foreign(self, tokens: Sequence[int]) -> bool:
        begun = self._tokenizer.beginning_ids
        if list(tokens[: len(begun)]) != begun:
            return True
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        own = Counter(self._tokenizer.encode(text, add_special_tokens=False))
        other = (Counter(tokens) - own).total() - len(begun)
        return other > max(len(tokens) // 8, _FEW)

    def _embedding(self, asks: Embed, notices: list[Notice]) -> tuple[Pooling, Sequence[Prompt]]:
        embedding = self._model.abilities.embedding
        if embedding is None:
            raise unable(self._model.name, "embed texts", self._model.abilities.no_embedding)
        name = embedding.default_prompt if asks.prompt_name is None else asks.prompt_name
        if name is not None and name not in embedding.prompts:
            raise _unknown_prompt(name, embedding)
        if asks.prompt_name is not None and not all(isinstance(prompt, TextPrompt) for prompt in asks.inputs):
            message = "'prompt_name' needs texts: tokens and messages are taken as they are."
            raise InvalidRequestError(message, param="prompt_name", code="invalid_parameter_combination")
        if self._is_encoder and any(isinstance(prompt, Conversation) for prompt in asks.inputs):
            message = "Unsupported parameter: 'messages'. This model embeds texts: use 'input'."
            raise InvalidRequestError(message, param="messages", code="unsupported_parameter")
        before = "" if name is None else embedding.prompts[name]
        inputs = [replace(one, text=before + one.text) if isinstance(one, TextPrompt) else one for one in asks.inputs]
        normalizes = embedding.normalizes if asks.normalizes is None else asks.normalizes
        pooling = Pooling(embedding.by, self._dimensions(asks, embedding), normalizes)
        return pooling, self._shortened(inputs, asks, notices)

    def _shortened(self, inputs: Sequence[Prompt], asks: Embed | Classify, notices: list[Notice]) -> Sequence[Prompt]:
        """The prompts, or their beginnings if the request truncates them so, or else the server."""
        num_tokens = asks.truncate
        if num_tokens is None and self._auto_truncate:
            return [self._cut(prompt, notices) for prompt in inputs]
        if num_tokens is None or not self._keeps_beginning(asks):
            return inputs
        return [self._beginning(prompt, num_tokens) for prompt in inputs]

    def _keeps_beginning(self, asks: Embed | Classify) -> bool:
        return self._is_encoder or (isinstance(asks, Embed) and asks.keeps_beginning)

    def _beginning(self, prompt: Prompt, num_tokens: int) -> TokenPrompt:
        if not isinstance(prompt, TextPrompt):
            message = "'truncate_prompt_tokens' needs texts: this model's tokens have special ones at their end."
            raise InvalidRequestError(message, param="truncate_prompt_tokens", code="invalid_parameter_combination")
        path = prompt.path or "input"
        return TokenPrompt(self._planner.encode_beginning(prompt.text, path, num_tokens), path)

    @property
    def _is_encoder(self) -> bool:
        return self._model.abilities.is_encoder

    def _classes(self, asks: Classify, notices: list[Notice]) -> tuple[Pooling, Sequence[Prompt]]:
        if self._model.abilities.classification is None:
            raise unable(self._model.name, "classify texts", self._model.abilities.no_classification)
        return Pooling("classes"), self._shortened(asks.inputs, asks, notices)

    def _dimensions(self, asks: Embed, embedding: Embedding) -> int | None:
        """The length to shorten vectors to; None: the full length."""
        wanted = asks.dimensions
        if wanted is None or wanted == self._hidden_size:
            return None
        if not embedding.shortens:
            message = (
                f"Unsupported parameter: 'dimensions'. This model's vectors have {self._hidden_size} numbers, and "
            )
            message += "it was not trained for shorter ones."
            raise InvalidRequestError(message, param="dimensions", code="unsupported_parameter")
        if wanted > self._hidden_size or (embedding.dimensions and wanted not in embedding.dimensions):
            sizes, given = (
                ", ".join(map(str, embedding.dimensions)) or f"at most {self._hidden_size}",
                shorten(str(wanted)),
            )
            message = f"Invalid 'dimensions': this model's vectors may have {sizes} numbers, but got {given} instead."
            raise InvalidRequestError(message, param="dimensions", code="invalid_value")
        return wanted

    def _scores(self, asks: Score, path: str, notices: list[Notice]) -> tuple[Pooling, Sequence[Prompt]]:
        scoring = self._model.abilities.scoring
        if scoring is None:
            raise unable(self._model.name, "score texts", self._model.abilities.no_scoring)
        pair_prompts = PairPrompts(self._tokenizer, scoring, self._planner.encode, self._planner.capacity)
        prompts: list[Prompt] = []
        total = 0
        is_auto = self._auto_truncate and asks.truncate is None
        if is_auto:
            asks = replace(asks, truncate=-1)
        for pair in asks.pairs:  # each prompt repeats the query, so a short body can become many tokens
            prompt = pair_prompts.of(pair, asks)
            total += len(prompt.tokens)
            _check_total(total, path)
            prompts.append(prompt)
        if is_auto:
            reason = "Too long for the model together with its query: only its beginning is used."
            notices += [Notice(at, reason) for at in pair_prompts.cut]
        return Pooling(scoring.by, tokens=scoring.tokens), prompts


def _with_advice(error: ContextLengthError, asks: Embed | Score | Classify) -> ContextLengthError:
    """The error, with the field and the setting that cut texts."""
    tei = " (in TEI's form 'truncate': true)" if isinstance(asks, Score) else ""
    how = f"send 'truncate_prompt_tokens': -1{tei}, or start the server with --auto-truncate"
    message = f"{error.message} To use only the beginning, {how}."
    return ContextLengthError(
        message, param=error.param, num_tokens=error.num_tokens, max_tokens=error.max_tokens, capacity=error.capacity
    )


def _check_total(num_tokens: int, path: str) -> None:
    if num_tokens > MAX_TOKENS:
        message = f"Invalid '{path}': all prompts together have more than {MAX_TOKENS} tokens. Send several requests."
        raise InvalidRequestError(message, param=path, code="invalid_value")


def _unknown_prompt(name: str, embedding: Embedding) -> InvalidRequestError:
    known = ", ".join(f"'{known}'" for known in embedding.prompts) or "none"
    message = f"Invalid 'prompt_name': this model's prompts are {known}, but got '{shorten(name)}' instead."
    return InvalidRequestError(message, param="prompt_name", code="invalid_value")
