"""From what is asked for to a plan: how this model makes numbers of texts."""

from collections.abc import Sequence
from dataclasses import replace

from model_runner.contract import Pooling
from server.errors import InvalidRequestError, shorten
from server.generation.planning.plan import Plan
from server.generation.planning.planner import Planner
from server.generation.pooling.abilities import Embedding, unable
from server.generation.pooling.pair_prompt import PairPrompts
from server.generation.pooling.request import Embed, PoolingRequest, Score
from server.generation.request import GenerationRequest, Prompt, TextPrompt
from server.generation.served_model import ServedModel
from server.text.tokenizer import Tokenizer

MAX_TOKENS = 1 << 20
"""Of all prompts of a request together."""


class PoolingRules:
    """Of one model on one engine. Cheap to make."""

    def __init__(self, planner: Planner, tokenizer: Tokenizer, model: ServedModel, hidden_size: int) -> None:
        self._planner = planner
        self._tokenizer = tokenizer
        self._model = model
        self._hidden_size = hidden_size

    def plan(self, request: PoolingRequest) -> Plan:
        """The plan for a request. Raises what Planner.plan does, also for what the model cannot do."""
        if request.model is not None:
            self._model.check_name(request.model)
        asks = request.asks
        pooling, prompts = self._embedding(asks, request) if isinstance(asks, Embed) else self._scores(asks, request)
        asked = GenerationRequest(
            model=request.model,
            may_omit_model=request.may_omit_model,
            prompts=prompts,
            pooling=pooling,
            id_prefix=request.id_prefix,
            max_tokens=0,
            truncate_prompt=asks.truncate if isinstance(asks, Embed) else None,
            priority=request.priority,
            cache_salt=request.cache_salt,
            paths=request.paths,
            notices=request.notices,
        )
        plan = self._planner.plan(asked)
        _check_total(sum(len(one.prompt) for one in plan.requests), asked.path("prompt"))
        return plan

    def _embedding(self, asks: Embed, request: PoolingRequest) -> tuple[Pooling, Sequence[Prompt]]:
        form = self._model.abilities.embedding
        if form is None:
            raise unable(self._model.name, "embed texts", self._model.abilities.no_embedding)
        name = form.default_prompt if asks.prompt_name is None else asks.prompt_name
        if name is not None and name not in form.prompts:
            raise _unknown_prompt(name, form)
        if asks.prompt_name is not None and not all(isinstance(prompt, TextPrompt) for prompt in asks.inputs):
            message = "'prompt_name' needs texts: tokens and messages are taken as they are."
            raise InvalidRequestError(message, param="prompt_name", code="invalid_parameter_combination")
        before = "" if name is None else form.prompts[name]
        inputs = [replace(one, text=before + one.text) if isinstance(one, TextPrompt) else one for one in asks.inputs]
        normalizes = form.normalizes if asks.normalizes is None else asks.normalizes
        return Pooling(form.by, self._dimensions(asks, form), normalizes), inputs

    def _dimensions(self, asks: Embed, form: Embedding) -> int | None:
        """None for a vector of full length."""
        wanted = asks.dimensions
        if wanted is None or wanted == self._hidden_size:
            return None
        if not form.shortens:
            message = (
                f"Unsupported parameter: 'dimensions'. This model's vectors have {self._hidden_size} numbers, and "
            )
            message += "it was not trained for shorter ones."
            raise InvalidRequestError(message, param="dimensions", code="unsupported_parameter")
        if wanted > self._hidden_size or (form.dimensions and wanted not in form.dimensions):
            sizes, given = ", ".join(map(str, form.dimensions)) or f"at most {self._hidden_size}", shorten(str(wanted))
            message = f"Invalid 'dimensions': this model's vectors may have {sizes} numbers, but got {given} instead."
            raise InvalidRequestError(message, param="dimensions", code="invalid_value")
        return wanted

    def _scores(self, asks: Score, request: PoolingRequest) -> tuple[Pooling, Sequence[Prompt]]:
        form = self._model.abilities.scoring
        if form is None:
            raise unable(self._model.name, "score texts", self._model.abilities.no_scoring)
        pair_prompts = PairPrompts(self._tokenizer, form, self._planner.encode)
        prompts: list[Prompt] = []
        total = 0
        for pair in asks.pairs:  # each has the whole query, so that a short body can mean a lot
            prompt = pair_prompts.of(pair, asks)
            total += len(prompt.tokens)
            _check_total(total, request.paths["prompt"])
            prompts.append(prompt)
        return Pooling(form.by, tokens=form.tokens), prompts


def _check_total(num_tokens: int, path: str) -> None:
    if num_tokens > MAX_TOKENS:
        message = f"Invalid '{path}': all prompts together have more than {MAX_TOKENS} tokens. Send several requests."
        raise InvalidRequestError(message, param=path, code="invalid_value")


def _unknown_prompt(name: str, form: Embedding) -> InvalidRequestError:
    known = ", ".join(f"'{known}'" for known in form.prompts) or "none"
    message = f"Invalid 'prompt_name': this model's prompts are {known}, but got '{shorten(name)}' instead."
    return InvalidRequestError(message, param="prompt_name", code="invalid_value")
