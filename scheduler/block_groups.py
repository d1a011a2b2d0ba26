"""The blocks of all cache groups: what a choice needs for a step, and what it can give back.

Every choice has blocks of its own for all its positions; they are group 0. Layers that look back a limited number of
positions, and recurrent layers, keep their data in further groups (`CacheGroup`). A block of any group covers the same
positions as the choice's own block with its index, so one chain of names serves all of them.

A step takes a choice from `num_computed` to the end of its committed tokens. The states of recurrent layers are folded
up to the last block boundary before that end: this page is written, and `rows` hold what is kept of later positions.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from model_runner.contract import BlockCopy, CacheGroup, PlacedBlock, state_blocks_after
from scheduler.block_pool import BlockPool, blocks_for
from scheduler.prefix_cache import CacheLog, PrefixCache
from scheduler.request import Request


@dataclass(frozen=True, slots=True)
class ReusedKV:
    """The KV a choice reuses when it is admitted."""

    num_computed: int = 0
    num_state_blocks: int = 0
    """Number of leading blocks whose effect is in the page that it begins with."""
    shared: tuple[int, ...] = ()
    """Full blocks shared with other choices. They are never written again."""
    copied: int | None = None
    """Block whose copy follows the shared ones. A running sibling holds it."""
    in_groups: tuple[Mapping[int, int], ...] = ()
    """Shared blocks of each cache group by index; and one that is copied, if the choice's next position falls into
    it. Empty if nothing is reused."""
    num_cached: int = 0
    """Number of prompt tokens to report as cached."""
    num_looked_up: int = 0
    """Number of prompt tokens that were looked up in the prefix cache."""
    cached_blocks_at_admission: int = 0
    """Number of leading blocks of the choice's own that are in the prefix cache, whether other groups can follow."""
    forked_from: str | None = None
    """Key of the running choice whose runner state is copied, as in AdmittedRequest."""


@dataclass(frozen=True, slots=True)
class Growth:
    """New blocks that a choice needs for a step."""

    num_own: int = 0
    indices: tuple[Sequence[int], ...] = ()
    """For each cache group, the indices that need a block. Empty if no group needs any."""


@dataclass(frozen=True, slots=True)
class StepSpan:
    """The positions that a step takes a choice through."""

    start: int
    """First position that is computed."""
    end: int
    """End of all rows, including drafts and candidates. Drafts may share positions, but not places."""
    num_state_blocks: int
    """Leading blocks that are folded before the step."""
    state_blocks_after: int
    """Leading blocks that are folded after it."""


class GroupBlocks(ABC):
    """The blocks of one cache group. A choice's blocks are in a dict by index."""

    def __init__(self, spec: CacheGroup, block_size: int, snapshot_every: int) -> None:
        """`snapshot_every` tokens of a prompt, a state is worth keeping; 0 for never."""
        self.cache = PrefixCache()
        self.pool = BlockPool(spec.num_blocks, self.cache)
        self.spec = spec
        self._block_size = block_size
        self._snapshot_every = snapshot_every // block_size  # in blocks

    @abstractmethod
    def before(self, boundary: int) -> range:
        """The blocks with which a choice can begin after `boundary` blocks."""

    @abstractmethod
    def needed(self, request: Request, span: StepSpan) -> Iterable[int]:
        """Ascending indices of the blocks that a step needs."""

    @abstractmethod
    def wanted_by_fork(self, num_computed: int, num_state_blocks: int) -> range:
        """The blocks with which a fork can go on from `num_computed` tokens, of which so many blocks are folded."""

    @abstractmethod
    def first_needed(self, request: Request) -> int:
        """The first block that any position from `num_computed` on needs."""

    def servable(self, names: Sequence[bytes]) -> list[bool]:
        """For each boundary from 0 to `len(names)`, whether a choice with these blocks could begin there."""
        run = 0  # known blocks that end at the boundary
        can_begin = [True]
        for boundary, name in enumerate(names, 1):
            run = run + 1 if self.cache.has(name) else 0
            can_begin.append(run >= len(self.before(boundary)))
        return can_begin

    def give_back(self, request: Request, held: dict[int, int]) -> None:
        """Release the blocks of a running choice that it does not need any more.

        Those with which another choice is likely to begin are evicted no earlier than blocks of finished choices.
        """
        first, reach = self.first_needed(request), blocks_for(self.spec.window, self._block_size)
        while held and (index := next(iter(held))) < first:
            block = held.pop(index)
            followed = range(index + 1, index + reach + 2)  # no later boundary needs it
            if any(index in self.before(boundary) for boundary in self._likely(request, followed)):
                self.pool.release([block])
            else:
                self.pool.release_spare(block)

    def _likely(self, request: Request, boundaries: range) -> Iterator[int]:
        """Select the boundaries at which another choice is likely to begin.

        They are the end of the prompt, the end of what the prefix cache knew of it, and snapshots.
        """
        end_of_prompt = (request.num_prompt - 1) // self._block_size
        wanted = {end_of_prompt, request.cached_blocks_at_admission}
        yield from (boundary for boundary in wanted if boundary in boundaries)
        if every := self._snapshot_every:
            yield from range(-(-boundaries.start // every) * every, boundaries.stop, every)


class WindowBlocks(GroupBlocks):
    """Keys and values of layers that look back a limited number of positions."""

    def before(self, boundary: int) -> range:
        return range(self._first_seen(boundary * self._block_size), boundary)

    def needed(self, request: Request, span: StepSpan) -> Iterable[int]:
        return range(self._first_seen(span.start), blocks_for(span.end, self._block_size))

    def wanted_by_fork(self, num_computed: int, num_state_blocks: int) -> range:
        return range(self._first_seen(num_computed), blocks_for(num_computed, self._block_size))

    def first_needed(self, request: Request) -> int:
        return self._first_seen(request.num_computed)

    def _first_seen(self, position: int) -> int:
        return max(0, position - self.spec.window + 1) // self._block_size


class RowsBlocks(GroupBlocks):
    """Data of recurrent layers for each position since the newest page."""

    def before(self, boundary: int) -> range:
        return range(0)

    def needed(self, request: Request, span: StepSpan) -> Iterable[int]:
        """Blocks in between are folded in the step itself."""
        begun = range(span.num_state_blocks, blocks_for(span.start, self._block_size))
        left = range(span.state_blocks_after, blocks_for(span.end, self._block_size))
        return sorted({*begun, *left})

    def wanted_by_fork(self, num_computed: int, num_state_blocks: int) -> range:
        return range(num_state_blocks, blocks_for(num_computed, self._block_size))

    def first_needed(self, request: Request) -> int:
        return request.num_state_blocks


class PageBlocks(GroupBlocks):
    """States of recurrent layers. The page with index i holds the states after block i."""

    def before(self, boundary: int) -> range:
        return range(max(boundary - 1, 0), boundary)

    def needed(self, request: Request, span: StepSpan) -> Iterable[int]:
        crossed = range(span.num_state_blocks + 1, span.state_blocks_after + 1)
        return sorted(boundary - 1 for boundary in {*self._likely(request, crossed), *crossed[-1:]})

    def wanted_by_fork(self, num_computed: int, num_state_blocks: int) -> range:
        return self.before(num_state_blocks)

    def first_needed(self, request: Request) -> int:
        return request.num_state_blocks - 1


_KINDS: Mapping[str, type[GroupBlocks]] = {"window": WindowBlocks, "rows": RowsBlocks, "page": PageBlocks}


class BlockGroups:
    """All blocks of a runner: the choices' own, and the blocks of its cache groups."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        groups: Sequence[CacheGroup] = (),
        snapshot_every: int = 0,
        log: CacheLog | None = None,
    ) -> None:
        self.cache = PrefixCache(log)
        """Names of the choices' own blocks."""
        self.own = BlockPool(num_blocks, self.cache)
        self.groups = [_KINDS[spec.kind](spec, block_size, snapshot_every) for spec in groups]
        self._block_size = block_size

    @property
    def usage(self) -> float:
        """Share of the blocks that running choices hold, in the group with the highest, 0 to 1."""
        return max(pool.num_used / pool.num_blocks for pool in self._pools())

    def state_blocks_after(self, request: Request, before: int, known: int) -> int:
        """Blocks that are folded once the tokens up to `known` are computed, of which `before` already are."""
        return state_blocks_after(before, known, self._block_size, keeps_last=request.sampling.num_candidates > 0)

    def to_continue(self, request: Request, num_tokens: int, num_draft: int = 0) -> Growth:
        """The blocks that a running choice lacks to compute its next tokens, its candidates and drafts."""
        known = request.num_computed + num_tokens
        end = known + request.num_candidates + num_draft
        num_own = max(0, blocks_for(end, self._block_size) - len(request.blocks))
        if not self.groups:
            return Growth(num_own)
        before = request.num_state_blocks
        span = StepSpan(request.num_computed, end, before, self.state_blocks_after(request, before, known))
        return Growth(num_own, self._lacking(request, span, request.group_blocks))

    def to_begin(self, request: Request, reuse: ReusedKV, num_tokens: int) -> Growth:
        """The blocks that a choice lacks to begin with reused ones and compute `num_tokens` tokens in the step.

        Its own blocks are for all its tokens.
        """
        num_all = blocks_for(len(request.tokens) + request.sampling.num_candidates, self._block_size)
        num_own = num_all - len(reuse.shared)
        if not self.groups:
            return Growth(num_own)
        known = reuse.num_computed + num_tokens
        before = reuse.num_state_blocks
        span = StepSpan(reuse.num_computed, known, before, self.state_blocks_after(request, before, known))
        return Growth(num_own, self._lacking(request, span, self._full_blocks(reuse)))

    def can_grow(self, growths: Sequence[Growth], reused: Sequence[ReusedKV] = ()) -> bool:
        """Whether there are free blocks for all of them, while the reused blocks are kept."""
        num_own = sum(growth.num_own for growth in growths)
        # The cheap bound first: counting which shared blocks are only cached looks at each of them.
        if not self.own.can_allocate(num_own):
            return False
        if reused and not self.own.can_allocate(num_own, {block for reuse in reused for block in reuse.shared}):
            return False
        for number, group in enumerate(self.groups):
            count = sum(len(growth.indices[number]) for growth in growths if growth.indices)
            kept = {block for reuse in reused if reuse.in_groups for block in reuse.in_groups[number].values()}
            if not group.pool.can_allocate(count, kept):
                return False
        return True

    def grow(self, request: Request, growth: Growth) -> tuple[tuple[int, ...], tuple[PlacedBlock, ...]]:
        """Give a choice its new blocks. Returns its own, and the blocks of cache groups."""
        new = self.own.allocate(growth.num_own)
        request.blocks += new
        placed = []
        for number, indices in enumerate(growth.indices):
            blocks = self.groups[number].pool.allocate(len(indices))
            request.group_blocks[number].update(zip(indices, blocks, strict=True))
            placed += [PlacedBlock(number + 1, index, block) for index, block in zip(indices, blocks, strict=True)]
        return tuple(new), tuple(placed)

    def begin(self, request: Request, reuse: ReusedKV, growth: Growth) -> list[BlockCopy]:
        """Give a choice the shared blocks, which it must hold already (`share`), and its new ones."""
        request.blocks = list(reuse.shared)
        request.group_blocks = [dict(blocks) for blocks in self._full_blocks(reuse)]
        new, _ = self.grow(request, growth)
        copies = [] if reuse.copied is None else [BlockCopy(reuse.copied, new[0])]
        index, is_split = divmod(reuse.num_computed, self._block_size)
        for number, blocks in enumerate(reuse.in_groups):
            if is_split and index in blocks:
                copies.append(BlockCopy(blocks[index], request.group_blocks[number][index], number + 1))
        return copies

    def share(self, reused: Iterable[ReusedKV]) -> None:
        """Keep the full blocks of these, so that they are not evicted."""
        for reuse in reused:
            self.own.share(reuse.shared)
            for group, blocks in zip(self.groups, self._full_blocks(reuse), strict=True):
                group.pool.share(blocks.values())

    def give_back(self, request: Request) -> None:
        """Release the blocks that a running choice does not need any more."""
        for group, held in zip(self.groups, request.group_blocks, strict=True):
            group.give_back(request, held)

    def release(self, request: Request) -> None:
        """Release all blocks of a choice that stops running."""
        self.own.release(request.blocks)
        for group, held in zip(self.groups, request.group_blocks, strict=True):
            group.pool.release(list(held.values()))

    def placed(self, request: Request) -> tuple[PlacedBlock, ...]:
        """All blocks of cache groups that a choice holds."""
        return tuple(
            PlacedBlock(number, index, block)
            for number, held in enumerate(request.group_blocks, 1)
            for index, block in held.items()
        )

    def check_integrity(self, running: Collection[Request]) -> None:
        """Raise IntegrityError unless every block is accounted for."""
        self.own.check_integrity([request.blocks for request in running])
        for number, group in enumerate(self.groups):
            group.pool.check_integrity([request.group_blocks[number].values() for request in running])

    def _lacking(
        self, request: Request, span: StepSpan, held: Sequence[Mapping[int, int]]
    ) -> tuple[Sequence[int], ...]:
        return tuple(
            [index for index in group.needed(request, span) if index not in blocks]
            for group, blocks in zip(self.groups, held, strict=True)
        )

    def _full_blocks(self, reuse: ReusedKV) -> list[dict[int, int]]:
        """The shared blocks of each cache group. The block that the next position falls into is copied instead."""
        if not reuse.in_groups:
            return [{} for _ in self.groups]
        num_full = reuse.num_computed // self._block_size
        return [{index: block for index, block in blocks.items() if index < num_full} for blocks in reuse.in_groups]

    def _pools(self) -> Iterator[BlockPool]:
        yield self.own
        for group in self.groups:
            yield group.pool
