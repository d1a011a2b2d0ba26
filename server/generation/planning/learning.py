"""What a request's `learn` means: a permission, of which it is told where nothing comes of it."""

from collections.abc import Iterator

from server.generation.notices import Notice
from server.generation.request import GenerationRequest


def ignored_learn(request: GenerationRequest, *, learns: bool) -> Iterator[Notice]:
    """A notice if the request says that it may be learnt from and will not be. `learns`: whether this server does."""
    decoding = request.decoding
    if not request.learn:
        return
    if not learns:
        yield Notice("learn", "This server does not learn.")
    elif request.cache_salt:
        yield Notice("learn", "Nothing is learnt from requests with a 'cache_salt'.")
    elif decoding.beam_search is not None or decoding.penalty_alpha:
        yield Notice("learn", "Nothing is learnt from beam search and contrastive search.")
