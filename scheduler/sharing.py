"""KV reuse: finds blocks in the prefix cache or in a sibling's prompt, so that a choice need not compute them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from scheduler.block_groups import BlockGroups, PageBlocks, ReusedKV
from scheduler.prefix_cache import CacheLog, Lookup
from scheduler.request import Request

_MOST_REMEMBERED: Final = 2
"""One for the choice at the head of the queue and one for its guide."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A lookup of the first blocks of a request, and its result."""

    request: Request
    num_full: int
    """Number of blocks that were looked up."""
    reuse: ReusedKV
    lookups: tuple[Lookup, ...]
    """One for each cache."""


class KVSharing:
    """Finds reusable KV for new choices, and publishes the KV of running ones."""

    def __init__(self, blocks: BlockGroups, block_size: int, prefix_caching: bool) -> None:
        self._blocks = blocks
        self._cache = blocks.cache
        self._block_size = block_size
        self._prefix_caching = prefix_caching
        self._remembered: list[_Found] = []
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
                if reuse is None:
                    return cached  # the sibling has gone on and given back what a fork needs
                return reuse if request.num_output <= 1 else replace(reuse, forked_from=None)
        return cached if cached.num_computed == forkable else None

    def publish(self, requests: Sequence[Request]) -> None:
        """Make newly filled blocks of these requests available in the prefix cache."""
        for request in requests:
            num_full = request.num_computed // self._block_size
            if not self._prefix_caching:
                continue
            if request.group_blocks:
                self._publish_groups(request, num_full)
            if num_full == request.num_published:
                continue
            log = self._cache.log
            for index, name in enumerate(self._names(request, request.num_published, num_full), request.num_published):
                if not self._cache.insert(name, request.blocks[index]):
                    continue
                if index < (request.num_prompt - 1) // self._block_size:
                    num_new = request.num_prompt - (request.num_cached or 0)  # more would be evicted blocks, once more
                    request.num_written = min(request.num_written + self._block_size, num_new)
                if log is not None and request.chain.depends_on_tokens_alone(index):
                    self._note(log, request, index)
            request.num_published = num_full

    def unpublish(self, requests: Sequence[Request]) -> None:
        """Remove all blocks of these requests from the prefix cache, also those that they gave back."""
        for request in requests:
            for block in request.blocks:
                self._cache.forget(block)
            names = self._names(request, 0, request.num_computed // self._block_size)
            for group in self._blocks.groups:
                for name in filter(group.cache.has, names):
                    group.pool.forget(group.cache.block_of(name))

    def _publish_groups(self, request: Request, num_full: int) -> None:
        """Publish blocks of cache groups before the next positions make them superfluous."""
        for group, held in zip(self._blocks.groups, request.group_blocks, strict=True):
            if isinstance(group, PageBlocks):
                new_pages = range(request.num_pages_published, request.num_state_blocks)
                indices: Sequence[int] = [index for index in held if index in new_pages]
            elif group.before(num_full):
                indices = [index for index in range(request.num_published, num_full) if index in held]
            else:
                continue  # nobody begins with rows
            for index in indices:
                if held[index] not in group.cache:
                    group.cache.insert(self._names(request, index, index + 1)[0], held[index])
        request.num_pages_published = request.num_state_blocks

    def _note(self, log: CacheLog, request: Request, index: int) -> None:
        """Log a stored block."""
        start = index * self._block_size
        *before, name = self._names(request, max(0, index - 1), index + 1)
        log.note_stored(name, before[0] if before else None, tuple(request.tokens[start : start + self._block_size]))

    def _names(self, request: Request, start: int, stop: int) -> list[bytes]:
        return request.chain.names(request.tokens, start, stop)

    def _from_cache(self, request: Request) -> ReusedKV:
        """The longest cached prefix that all cache groups can follow, remembered until a cache changes there.

        The last token is never reused: it must be computed to sample the next.
        """
        if not self._prefix_caching:
            return ReusedKV()
        num_full = self._uncut(request, (len(request.tokens) - 1) // self._block_size)
        for one in self._remembered:
            if one.request is request and one.num_full == num_full and all(lookup.is_current for lookup in one.lookups):
                return one.reuse
        names = self._names(request, 0, num_full)
        reuse, lookups = self._look_up(request, names)
        while (num_uncut := self._uncut(request, len(reuse.shared))) < len(reuse.shared):
            reuse, lookups = self._look_up(request, names[:num_uncut])
        others = [one for one in self._remembered if one.request is not request]
        self._remembered = [*others, _Found(request, num_full, reuse, lookups)][-_MOST_REMEMBERED:]
        for number, cache in enumerate([self._cache, *(group.cache for group in self._blocks.groups)]):
            cache.followed = [found.lookups[number] for found in self._remembered]
        return reuse

    def _uncut(self, request: Request, boundary: int) -> int:
        """The last boundary up to this one at which no span is cut."""
        while request.is_cut(boundary * self._block_size):
            boundary -= 1
        return boundary

    def _look_up(self, request: Request, names: Sequence[bytes]) -> tuple[ReusedKV, tuple[Lookup, ...]]:
        own = self._cache.lookup(names)
        known, boundary = names[: len(own)], len(own)
        if self._blocks.groups:
            servable = zip(*(group.servable(known) for group in self._blocks.groups), strict=True)
            boundary = max(at for at, of_groups in enumerate(servable) if all(of_groups))
        in_groups, lookups = [], [Lookup(own[:boundary], names[len(own) : len(own) + 1])]
        for group in self._blocks.groups:
            shared = {index: group.cache.block_of(known[index]) for index in group.before(boundary)}
            in_groups.append(shared)
            lookups.append(Lookup(shared.values(), [name for name in known if not group.cache.has(name)]))
        num_computed = boundary * self._block_size
        reuse = ReusedKV(
            num_computed=num_computed,
            num_state_blocks=boundary,
            shared=tuple(own[:boundary]),
            in_groups=tuple(in_groups),
            num_cached=min(num_computed, request.num_prompt),
            num_looked_up=request.num_prompt,
            cached_blocks_at_admission=len(own),
        )
        return reuse, tuple(lookups)

    def fork(self, request: Request) -> ReusedKV | None:
        """The KV that a forked request reuses from its parent, or None if the request is not a fork."""
        parent = request.forked_from
        if parent is None:
            return None
        reuse = self._fork_of(parent, request.num_computed)
        assert reuse is not None, "a parent has what its own next position needs"
        return reuse

    def _fork_of(self, request: Request, num_computed: int) -> ReusedKV | None:
        """The KV that a choice reuses from a running one with which it shares `num_computed` tokens.

        The blocks that the next token falls into are copied, because both choices continue to write to them
        (copy-on-write). They cannot be released before the step copies them: admission preempts nothing, and a group is
        preempted as a whole.

        Returns:
            None if the running choice has given back some of it.
        """
        num_full, is_split = divmod(num_computed, self._block_size)
        num_state_blocks = min(request.num_state_blocks, num_full)
        in_groups = []
        for group, held in zip(self._blocks.groups, request.group_blocks, strict=True):
            wanted = group.wanted_by_fork(num_computed, num_state_blocks)
            if any(index not in held for index in wanted):
                return None
            in_groups.append({index: held[index] for index in wanted})
        return ReusedKV(
            num_computed=num_computed,
            num_state_blocks=num_state_blocks,
            shared=tuple(request.blocks[:num_full]),
            copied=request.blocks[num_full] if is_split else None,
            in_groups=tuple(in_groups),
            num_cached=request.num_cached or 0,
            cached_blocks_at_admission=request.cached_blocks_at_admission,
            forked_from=request.key,
        )
