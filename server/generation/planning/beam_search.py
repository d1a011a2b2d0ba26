"""What a request's beam search means for the engine."""

from scheduler.interface import BeamSearch
from server.api.fields.sampling import SamplingFields


def choose_beam_search(fields: SamplingFields, stop: tuple[str, ...]) -> BeamSearch | None:
    """The search that a request asks for, which ends at the strings `stop`.

    None: it asks for none, or for one beam, which is greedy decoding.
    """
    asked = fields.beams
    if asked is None or asked.width == 1:
        return None
    return BeamSearch(
        width=asked.width,
        length_penalty=1.0 if asked.length_penalty is None else asked.length_penalty,
        early_stopping=asked.early_stopping or False,
        groups=asked.groups or 1,
        diversity_penalty=asked.diversity_penalty or 0.0,
        stop=stop,
        skip_special_tokens=fields.skip_special_tokens is not False,
    )
