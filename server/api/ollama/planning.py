"""Plans the bodies of Ollama's requests: the served model's name and defaults, and `num_ctx` as a cap."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from server.api.body_worker import BodyContext
from server.api.dialect import GenerationApi, PlannedRequest, refused_constraints
from server.api.ollama.answer import OllamaReports
from server.api.ollama.options import OllamaOptions
from server.api.ollama.schema import OllamaChatRequest, OllamaFields, OllamaGenerateRequest, for_model
from server.api.ollama.served import name_for
from server.errors import ContextLengthError
from server.generation.notices import Notice, to_report
from server.models.residence import StayBounds

_NUM_CTX = "options.num_ctx"


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A request that only asks for the model to be loaded or unloaded."""

    model: str
    """The model's name, as the client wrote it."""
    notices: Sequence[Notice]
    keep_s: float | None
    """For how many seconds the model shall stay loaded."""


def read_unload(context: BodyContext, body: bytes, schema: type[OllamaFields]) -> LoadRequest | None:
    """The request of a body that only asks for the model to be unloaded; None for other bodies. Raises ApiError."""
    asked = context.validated(schema, body)
    if not asked.only_loads or asked.keep_s != 0:
        return None
    return LoadRequest(asked.model, to_report(asked.ignored(), strict=context.settings.strict), 0.0)


def plan_ollama(
    context: BodyContext, body: bytes, api: GenerationApi, bounds: StayBounds
) -> PlannedRequest | LoadRequest:
    """Validate a body of POST /api/chat or /api/generate and plan its request. Raises ApiError."""
    asked: OllamaFields = context.validated(api.schema, body)  # type: ignore[assignment]
    if isinstance(asked, OllamaGenerateRequest) and context.tokenizer.chat_template is None:
        asked, dropped = asked.without_template()
    else:
        dropped = ()
    capped, notices = capped_context(context, asked.set_options)
    notices = [*asked.kept(bounds), *dropped, *notices]
    if asked.only_loads:
        name_for(context.model, asked.model)
        all_notices = to_report([*asked.ignored(), *notices], strict=context.settings.strict)
        return LoadRequest(asked.model, all_notices, asked.keep_s)
    with refused_constraints(), explained_cap(context, capped):
        request = for_model(api.intent(asked), context.model, context.tokenizer)
        plan = capped.planner().plan(replace(request, notices=(*request.notices, *notices)))
    is_chat = isinstance(asked, OllamaChatRequest)
    return PlannedRequest(plan, OllamaReports(asked.model, bool(asked.logprobs), is_chat, asked.keep_s))


def capped_context(context: BodyContext, options: OllamaOptions) -> tuple[BodyContext, Sequence[Notice]]:
    """The context with the model's length capped by `num_ctx`, and a notice if that differs from the loaded length."""
    loaded = context.info.max_model_len
    wanted = options.num_ctx
    if wanted is None or wanted == loaded:
        return context, ()
    if wanted > loaded:
        return context, [Notice(_NUM_CTX, f"The model is loaded with a context of {loaded} tokens, and stays so.")]
    reason = f"Caps this request at {wanted} tokens; the model stays loaded with {loaded}."
    return replace(context, engine=replace(context.info, max_model_len=wanted)), [Notice(_NUM_CTX, reason)]


@contextmanager
def explained_cap(context: BodyContext, capped: BodyContext) -> Iterator[None]:
    """Context in which errors about the length name `num_ctx` if the loaded model would allow more."""
    try:
        yield
    except ContextLengthError as error:
        loaded, cap = context.info.max_model_len, capped.info.max_model_len
        if cap == loaded:
            raise
        message = f"{error.message} '{_NUM_CTX}' caps this request at {cap} tokens; the model itself takes {loaded}."
        raise ContextLengthError(
            message, param=error.param, num_tokens=error.num_tokens, max_tokens=error.max_tokens, capacity=cap
        ) from error
