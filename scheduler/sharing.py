"""What a choice need not compute because somebody already did: the prefix cache's blocks or a sibling's prompt."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from scheduler.prefix_cache import CacheLog, Lookup, PrefixCache
from scheduler.request import Request

_MOST_REMEMBERED: Final = 2
"""A choice at the head of the queue, and its guide."""


@dataclass(frozen=True, slots=True)
class Start:
    """Where a choice begins to compute at its admission."""

    num_computed: int = 0
    shared: tuple[int, ...] = ()
    """Full blocks, held together with others and never written again."""
    copied: int | None = None
    """Block whose copy follows the shared ones; held by a running sibling."""
    num_cached: int = 0
    """Prompt tokens to report as found in the prefix cache."""
    num_looked_up: int = 0
    """Prompt tokens that the prefix cache was asked for."""
    forked_from: str | None = None
    """See AdmittedRequest."""


class KVSharing:
    """Finds KV for new choices and makes that of running ones findable."""

    def __init__(self, cache: PrefixCache, block_size: int, prefix_caching: bool) -> None:
        self._cache = cache
        self._block_size = block_size
        self._prefix_caching = prefix_caching
        self._remembered: list[tuple[Request, Lookup]] = []
        """Of those asked for last: the head of the queue waits for many steps, each of which asks again."""

    def find_start(self, request: Request, siblings: Sequence[Request]) -> Start | None:
        """The better of the prefix cache and the running siblings; None to wait for a sibling's prompt.

        Of a sibling a choice takes the prompt but its last token, which every choice computes for itself to sample its
        own first token.
        """
        if request.needs_every_position:
            return Start()
        cached = self._from_cache(request)
        forkable = request.num_prompt - 1
        if not siblings or cached.num_computed > forkable:
            return cached
        for sibling in siblings:
            if sibling.num_computed >= sibling.num_prompt:
                start = self._fork_of(sibling, sibling.num_prompt - 1)
                return start if request.num_output <= 1 else replace(start, forked_from=None)
        return cached if cached.num_computed == forkable else None

    def publish(self, requests: Sequence[Request]) -> None:
        """Let others find the blocks of these that the last step filled."""
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

    def withdraw(self, requests: Sequence[Request]) -> None:
        """Let nobody find the blocks of these any more."""
        for request in requests:
            for block in request.blocks:
                self._cache.forget(block)

    def _note(self, log: CacheLog, request: Request, index: int) -> None:
        """Tell the log of a block that was stored."""
        start = index * self._block_size
        *before, name = self._names(request, max(0, index - 1), index + 1)
        log.note_stored(name, before[0] if before else None, tuple(request.tokens[start : start + self._block_size]))

    def _names(self, request: Request, start: int, stop: int) -> list[bytes]:
        return request.chain.names(request.tokens, start, stop)

    def _from_cache(self, request: Request) -> Start:
        """All full blocks that are known, but never the last token: it must be computed to sample the next."""
        if not self._prefix_caching:
            return Start()
        num_full = (len(request.tokens) - 1) // self._block_size
        shared = self._lookup(request, num_full).blocks
        num_computed = len(shared) * self._block_size
        return Start(
            num_computed=num_computed,
            shared=shared,
            num_cached=min(num_computed, request.num_prompt),
            num_looked_up=request.num_prompt,
        )

    def _lookup(self, request: Request, num_full: int) -> Lookup:
        """What is known of its first blocks. Nothing is looked up anew unless the cache has changed just there."""
        for asking, lookup in self._remembered:
            if asking is request and lookup.is_current and lookup.num_names == num_full:
                return lookup
        names = self._names(request, 0, num_full)
        lookup = Lookup(names, self._cache.lookup(names))
        others = [one for one in self._remembered if one[0] is not request]
        self._remembered = [*others, (request, lookup)][-_MOST_REMEMBERED:]
        self._cache.followed = [lookup for _, lookup in self._remembered]
        return lookup

    def fork(self, request: Request) -> Start | None:
        """Where a request begins that is to be forked from a running one; None if it is not."""
        parent = request.forked_from
        return None if parent is None else self._fork_of(parent, request.num_computed)

    def _fork_of(self, request: Request, num_computed: int) -> Start:
        """What a choice takes over from a running one with which it shares so many computed tokens.

        The block into which the next token falls is copied (copy-on-write), as both choices go on to write to it. It
        stays until the step has copied it: admission preempts nobody, and a group is preempted as a whole.
        """
        num_full, is_split = divmod(num_computed, self._block_size)
        return Start(
            num_computed=num_computed,
            shared=tuple(request.blocks[:num_full]),
            copied=request.blocks[num_full] if is_split else None,
            num_cached=request.num_cached or 0,
            forked_from=request.key,
        )
