"""KV reuse: finds blocks in the prefix cache or in a sibling's prompt, so that a choice need not compute them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from scheduler.prefix_cache import CacheLog, Lookup, PrefixCache
from scheduler.request import Request

_MOST_REMEMBERED: Final = 2
"""One for the choice at the head of the queue and one for its guide."""


@dataclass(frozen=True, slots=True)
class ReusedKV:
    """The KV a choice reuses when it is admitted."""

    num_computed: int = 0
    shared: tuple[int, ...] = ()
    """Full blocks shared with other choices. They are never written again."""
    copied: int | None = None
    """Block whose copy follows the shared ones. A running sibling holds it."""
    num_cached: int = 0
    """Number of prompt tokens to report as cached."""
    num_looked_up: int = 0
    """Number of prompt tokens that were looked up in the prefix cache."""
    forked_from: str | None = None
    """Key of the running choice whose runner state is copied, as in AdmittedRequest."""


class KVSharing:
    """Finds reusable KV for new choices, and publishes the KV of running ones."""

    def __init__(self, cache: PrefixCache, block_size: int, prefix_caching: bool) -> None:
        self._cache = cache
        self._block_size = block_size
        self._prefix_caching = prefix_caching
        self._remembered: list[tuple[Request, Lookup]] = []
        """The latest lookups, because the head of the queue repeats its lookup in every step."""

    def find_reusable(self, request: Request, siblings: Sequence[Request]) -> ReusedKV | None:
        """Returns the longer reuse of prefix cache and running siblings, or None to wait for a sibling's prompt.

        Only the prompt without its last token is taken from a sibling: each choice computes that token to sample its
        first.
        """
        if request.needs_every_position:
            return ReusedKV()
        cached = self._from_cache(request)
        forkable = request.num_prompt - 1
        if not siblings or cached.num_computed > forkable:
            return cached
        for sibling in siblings:
            if sibling.num_computed >= sibling.num_prompt:
                reuse = self._fork_of(sibling, sibling.num_prompt - 1)
                return reuse if request.num_output <= 1 else replace(reuse, forked_from=None)
        return cached if cached.num_computed == forkable else None

    def publish(self, requests: Sequence[Request]) -> None:
        """Make newly filled blocks of these requests available in the prefix cache."""
        for request in requests:
            num_full = request.num_computed // self._block_size
            if not self._prefix_caching or num_full == request.num_published:
                continue
            log = self._cache.log if request.chain.is_plain else None
            for index, name in enumerate(self._names(request, request.num_published, num_full), request.num_published):
                if not self._cache.insert(name, request.blocks[index]):
                    continue
                if index < (request.num_prompt - 1) // self._block_size:
                    num_new = request.num_prompt - (request.num_cached or 0)  # more would be evicted blocks, once more
                    request.num_written = min(request.num_written + self._block_size, num_new)
                if log is not None:
                    self._note(log, request, index)
            request.num_published = num_full

    def unpublish(self, requests: Sequence[Request]) -> None:
        """Remove all blocks of these requests from the prefix cache."""
        for request in requests:
            for block in request.blocks:
                self._cache.forget(block)

    def _note(self, log: CacheLog, request: Request, index: int) -> None:
        """Log a stored block."""
        start = index * self._block_size
        *before, name = self._names(request, max(0, index - 1), index + 1)
        log.note_stored(name, before[0] if before else None, tuple(request.tokens[start : start + self._block_size]))

    def _names(self, request: Request, start: int, stop: int) -> list[bytes]:
        return request.chain.names(request.tokens, start, stop)

    def _from_cache(self, request: Request) -> ReusedKV:
        """All full blocks that are cached. The last token is never reused: it must be computed to sample the next."""
        if not self._prefix_caching:
            return ReusedKV()
        num_full = (len(request.tokens) - 1) // self._block_size
        shared = self._lookup(request, num_full).blocks
        num_computed = len(shared) * self._block_size
        return ReusedKV(
            num_computed=num_computed,
            shared=shared,
            num_cached=min(num_computed, request.num_prompt),
            num_looked_up=request.num_prompt,
        )

    def _lookup(self, request: Request, num_full: int) -> Lookup:
        """The cached prefix of the request's first `num_full` blocks, from memory unless the cache changed there."""
        for asking, lookup in self._remembered:
            if asking is request and lookup.is_current and lookup.num_names == num_full:
                return lookup
        names = self._names(request, 0, num_full)
        lookup = Lookup(names, self._cache.lookup(names))
        others = [one for one in self._remembered if one[0] is not request]
        self._remembered = [*others, (request, lookup)][-_MOST_REMEMBERED:]
        self._cache.followed = [lookup for _, lookup in self._remembered]
        return lookup

    def fork(self, request: Request) -> ReusedKV | None:
        """The KV that a forked request reuses from its parent, or None if the request is not a fork."""
        parent = request.forked_from
        return None if parent is None else self._fork_of(parent, request.num_computed)

    def _fork_of(self, request: Request, num_computed: int) -> ReusedKV:
        """The KV that a choice reuses from a running one with which it shares `num_computed` tokens.

        The block that the next token falls into is copied, because both choices continue to write to it
        (copy-on-write). It cannot be released before the step copies it: admission preempts nothing, and a group is
        preempted as a whole.
        """
        num_full, is_split = divmod(num_computed, self._block_size)
        return ReusedKV(
            num_computed=num_computed,
            shared=tuple(request.blocks[:num_full]),
            copied=request.blocks[num_full] if is_split else None,
            num_cached=request.num_cached or 0,
            forked_from=request.key,
        )
