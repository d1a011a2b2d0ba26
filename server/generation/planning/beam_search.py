"""What a request's beam search means for the engine."""

from scheduler.interface import BeamSearch
from server.generation.field_table import filled
from server.generation.settings import DecodingSettings


def choose_beam_search(decoding: DecodingSettings, stop: tuple[str, ...]) -> BeamSearch | None:
    """The search that a request asks for, which ends at the strings `stop`.

    None: it asks for none, or for one beam, which is greedy decoding.
    """
    if decoding.beam_search is None or decoding.beam_search.width == 1:
        return None
    full = filled(decoding.beam_search, {})
    return BeamSearch(
        width=full.width,
        length_penalty=1.0 if full.length_penalty is None else full.length_penalty,
        early_stopping=full.early_stopping or False,
        groups=full.groups or 1,
        diversity_penalty=full.diversity_penalty or 0.0,
        stop=stop,
        skip_special_tokens=decoding.skip_special_tokens is not False,
    )
