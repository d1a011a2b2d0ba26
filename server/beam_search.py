"""What a request's beam search means for the engine."""

from scheduler.interface import BeamSearch
from server.openai.protocol.beam_search import BeamSearchOptions
from server.openai.protocol.common import SamplingFields


def choose_beam_search(fields: SamplingFields) -> BeamSearch | None:
    """The search that a request asks for. None: it asks for none, or for one beam, which is greedy decoding."""
    asked = _asked(fields)
    if asked is None or asked.width == 1:
        return None
    return BeamSearch(
        width=asked.width,
        length_penalty=1.0 if asked.length_penalty is None else asked.length_penalty,
        early_stopping=asked.early_stopping or False,
        groups=asked.groups or 1,
        diversity_penalty=asked.diversity_penalty or 0.0,
        stop=fields.stop_strings,
        skip_special_tokens=fields.skip_special_tokens is not False,
    )


def is_asked_for(fields: SamplingFields) -> bool:
    """Whether the request wants the most probable output."""
    return _asked(fields) is not None


def num_choices(fields: SamplingFields) -> int:
    """How many answers there are for each prompt."""
    asked = _asked(fields)
    return (fields.n if asked is None else asked.num_return) or 1


def _asked(fields: SamplingFields) -> BeamSearchOptions | None:
    if not fields.use_beam_search:
        return fields.beam_search
    width = fields.n or 1
    penalty, early = fields.length_penalty, fields.early_stopping
    return BeamSearchOptions.model_construct(
        width=width, num_return=width, length_penalty=penalty, early_stopping=early, groups=None, diversity_penalty=None
    )
