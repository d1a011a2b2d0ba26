"""A runner without a model: tokens are a pure function of their history, and the KV cache is checked, not used.

Every slot of a block holds what its KV depends on: the salt and a hash of all tokens up to that position. After each
step the whole block table of every choice must hold exactly the choice's own history, which catches wrong sharing,
missing copies, stale blocks and writes into blocks that others read.
"""

from collections import Counter
from dataclasses import dataclass, replace

from model_runner.contract import (
    BeamCandidate,
    ChoiceResult,
    Failure,
    SamplingParams,
    StepResult,
    TokenLogprobs,
)
from model_runner.runner_interface import Runner

VOCAB = 50
POISON = VOCAB - 1  # a choice that would sample this token fails instead


class KVMismatchError(Exception):
    """A choice would have attended to something that is not its own history."""


def extend_hash(history, token):
    return hash((history, token))  # of integers only, so the same in every process


def contents(tokens, images):
    """The input of the model at each place: a token, or a row of an image, which equals no token."""
    seen = list(tokens)
    for image in images:
        for place, row, length in image.runs:
            seen[place : place + length] = [1000 + image.digest[(row + i) % 32] for i in range(length)]
    return seen


def next_token(history, sampling):
    return hash((history, sampling.seed, sampling.choice)) % VOCAB


def token_logprobs(history, token):
    return TokenLogprobs(token, -(history % 1000) / 100, 1, ())


def offers(history, sampling):
    """Candidates for the beams: different tokens, best first."""
    best = sorted(range(VOCAB), key=lambda token: (hash((history, token)) % 1000, token))[: sampling.beam_candidates]
    reports = [None if sampling.logprobs is None else token_logprobs(history, token) for token in best]
    values = [-(hash((history, token)) % 1000) / 100 for token in best]
    return tuple(map(BeamCandidate, best, values, reports))


def salt_of(key):
    """By convention of these tests a request's id starts with its salt and a colon."""
    return key.split(":")[0]


@dataclass
class Live:
    tokens: list
    num_prompt: int
    num_computed: int
    blocks: list
    sampling: SamplingParams
    hashes: list
    num_offered: int = 0
    num_candidates: int = 0
    guides: str | None = None
    groups: list = ()
    """For each cache group, blocks by index, as far as the next positions need them."""
    num_state_blocks: int = 0
    images: tuple = ()


class SimulatedRunner(Runner):
    """Offers up to `num_draft` drafts for each step, of which as many turn out right as the history says.

    A choice that searches gets candidates instead, all or none of which it must be given room for.
    """

    def __init__(self, num_blocks, block_size, num_draft=0, groups=()):
        self.num_draft = num_draft
        self.most_tokens = None
        """In a step; memory runs out in larger ones."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.groups = groups
        self.sees_images = False
        sizes = [num_blocks, *(group.num_blocks for group in groups)]
        self.kvs = [[[None] * block_size for _ in range(size)] for size in sizes]
        """The content of the blocks of each group; a page has one item."""
        self.kv = self.kvs[0]
        self.live = {}
        self.ended = set()
        """Keys of choices whose release has not got here yet: a step that was planned ahead may use their blocks."""

    def execute(self, plan):
        for key in plan.released:
            del self.live[key]
            self.ended.discard(key)
        sources = [list(self.kvs[copy.group][copy.source]) for copy in plan.copies]
        for copy, content in zip(plan.copies, sources, strict=True):
            self.kvs[copy.group][copy.destination] = content
        for admitted in plan.admitted:
            self._check_fork(admitted)
            self._admit(admitted)
        for share in plan.scheduled:
            self.live[share.key].blocks += share.new_blocks
            self._place(share.key, share.placed)
            if share.chosen is not None:
                self.live[share.key].tokens.append(share.chosen)
        self._forget_unneeded()
        self._check_writes(plan)
        num_rows = sum(share.num_rows for share in plan.scheduled)
        if self.most_tokens is not None and num_rows > self.most_tokens:
            return self._run_out_of_memory(plan)
        holders = self._holders_in_groups()
        for share in plan.scheduled:
            self._hash(self.live[share.key])
            self._check_groups(share.key)
            self._write_groups(share, holders)
            self._write(share)
        for share in plan.scheduled:
            self._check_kv(share.key)
        drafts = {share.key: share.num_draft for share in plan.scheduled}
        results = {}
        for share in plan.scheduled:
            guided = self.live[share.key].guides
            results[share.key] = (
                self._result(share) if guided is None else self._follow(share, results.get(guided), drafts)
            )
        return StepResult(tuple(results.values()))

    def _admit(self, admitted):
        self.live[admitted.key] = Live(
            tokens=list(admitted.tokens),
            num_prompt=admitted.num_prompt,
            num_computed=admitted.num_computed,
            blocks=list(admitted.blocks),
            sampling=admitted.sampling,
            hashes=[],
            guides=admitted.guides,
            groups=[{} for _ in self.groups],
            num_state_blocks=admitted.num_computed // self.block_size,
            images=admitted.images,
        )
        self._place(admitted.key, admitted.placed)

    def _place(self, key, placed):
        for group, index, block in placed:
            self.live[key].groups[group - 1][index] = block

    def _pages_to_write(self, live, known):
        """Indices of the pages that a step to `known` completes."""
        return [
            index
            for held, group in zip(live.groups, self.groups, strict=True)
            if group.kind == "page"
            for index in held
            if live.num_state_blocks <= index < known // self.block_size
        ]

    def _forget_unneeded(self):
        """Blocks that no further position can see were given back, and may be anybody's by now."""
        for live in self.live.values():
            folded = live.num_state_blocks
            for held, group in zip(live.groups, self.groups, strict=True):
                first = {"window": (live.num_computed - group.window + 1) // self.block_size, "rows": folded}
                for index in [index for index in held if index < first.get(group.kind, folded - 1)]:
                    del held[index]

    def _holders_in_groups(self):
        return Counter(
            (number, block)
            for key, live in self.live.items()
            if key not in self.ended
            for number, held in enumerate(live.groups, 1)
            for block in held.values()
        )

    def _check_groups(self, key):
        """Before the step: all that it reads is the choice's own history."""
        live, size = self.live[key], self.block_size
        folded = live.num_state_blocks
        if self.groups and folded * size > live.num_computed:
            raise KVMismatchError(f"{key} has positions in its states that it computes again")
        for number, (held, group) in enumerate(zip(live.groups, self.groups, strict=True), 1):
            if group.kind == "page":
                if folded and self.kvs[number][held[folded - 1]][0] != (salt_of(key), live.hashes[folded * size - 1]):
                    raise KVMismatchError(f"{key} begins with a state that is not its own")
                continue
            first = folded * size if group.kind == "rows" else max(0, live.num_computed - group.window + 1)
            for position in range(first, live.num_computed):
                block, offset = divmod(position, size)
                content = (salt_of(key), live.hashes[position])
                if block not in held or self.kvs[number][held[block]][offset] != content:
                    raise KVMismatchError(f"{key} reads a {group.kind} that is not its own at position {position}")

    def _write_groups(self, share, holders):
        live, size = self.live[share.key], self.block_size
        known, end = live.num_computed + share.num_tokens, live.num_computed + share.num_rows
        written = self._pages_to_write(live, known)
        kept_from = max([live.num_state_blocks, *(i + 1 for i in written)]) * size
        for number, (held, group) in enumerate(zip(live.groups, self.groups, strict=True), 1):
            if group.kind == "page":
                places = [((i, 0), (i + 1) * size - 1) for i in written]
            else:
                first = max(live.num_computed, kept_from if group.kind == "rows" else 0)
                places = [(divmod(position, size), position) for position in range(first, end)]
            for (index, offset), position in places:
                if index not in held:
                    raise KVMismatchError(f"{share.key} has no {group.kind} for position {position}")
                if holders[number, held[index]] > 1:
                    raise KVMismatchError(f"{share.key} writes to a {group.kind} that others hold as well")
                content = (salt_of(share.key), live.hashes[position]) if position < known else "a rejected draft"
                self.kvs[number][held[index]][offset] = content
        live.num_state_blocks = kept_from // size

    def _keep_in_groups(self, live, key, position):
        """An accepted draft has what is kept of it at its own place."""
        block, offset = divmod(position, self.block_size)
        for number, (held, group) in enumerate(zip(live.groups, self.groups, strict=True), 1):
            if group.kind != "page":
                self.kvs[number][held[block]][offset] = (salt_of(key), live.hashes[position])

    def _check_fork(self, admitted):
        """Who is forked from is here, with the same settings and all of the fork's tokens but the last."""
        assert admitted.key not in self.live, "admitted twice"
        assert 0 <= admitted.num_computed < len(admitted.tokens)
        if admitted.forked_from is None:
            return
        parent = self.live[admitted.forked_from]
        num_shared = max(len(admitted.tokens) - 1, admitted.num_prompt)
        assert parent.num_prompt == admitted.num_prompt
        assert parent.tokens[:num_shared] == list(admitted.tokens[:num_shared])
        settings = [replace(one, choice=0, prompt_logprobs=None) for one in (parent.sampling, admitted.sampling)]
        assert settings[0] == settings[1]

    def _run_out_of_memory(self, plan):
        """Nothing is computed, but anything may have been written where the step would have written."""
        for share in plan.scheduled:
            live = self.live[share.key]
            for position in range(live.num_computed, live.num_computed + share.num_rows):
                block, offset = divmod(position, self.block_size)
                self.kv[live.blocks[block]][offset] = "what a failed step wrote"
                for number, (held, group) in enumerate(zip(live.groups, self.groups, strict=True), 1):
                    if block in held and (group.kind != "page" or offset == self.block_size - 1):
                        self.kvs[number][held[block]][0 if group.kind == "page" else offset] = (
                            "what a failed step wrote"
                        )
            live.num_offered = live.num_candidates = 0
        return StepResult((), out_of_memory="tried to allocate more than there is")

    def _follow(self, share, result, drafts):
        """The result of a guide, which gets the tokens of the choice that it guides."""
        live = self.live[share.key]
        is_ready = live.num_computed == len(live.tokens)
        assert is_ready == (result is not None and bool(result.tokens or result.error)), "a guide out of step"
        if not is_ready or result.error:
            return ChoiceResult(share.key, ())
        assert share.num_draft == drafts[live.guides], "a guide without its drafts"
        live.tokens += result.tokens
        self._keep_drafts(live, share.key, result.tokens)
        return ChoiceResult(share.key, result.tokens)

    def _check_writes(self, plan):
        holders = Counter(block for key, live in self.live.items() if key not in self.ended for block in live.blocks)
        for share in plan.scheduled:
            live = self.live[share.key]
            start, stop = live.num_computed, live.num_computed + share.num_tokens
            assert start < stop <= len(live.tokens)
            is_alone = not share.num_draft and not share.num_candidates
            assert is_alone or stop == len(live.tokens), "drafts before the known tokens"
            offered = self.live[live.guides or share.key].num_offered
            assert share.num_draft <= offered, "more drafts than were offered"
            assert share.num_candidates == live.num_candidates, "not all candidates"
            for position in range(start, start + share.num_rows):
                block = live.blocks[position // self.block_size]
                if holders[block] > 1:
                    raise KVMismatchError(f"{share.key} writes to block {block}, which others hold as well")

    def _hash(self, live):
        seen = contents(live.tokens, live.images) if live.images else live.tokens
        while len(live.hashes) < len(live.tokens):
            live.hashes.append(extend_hash(live.hashes[-1] if live.hashes else 0, seen[len(live.hashes)]))

    def _write(self, share):
        live = self.live[share.key]
        self._check_features(share, live)
        for position in range(live.num_computed, live.num_computed + share.num_tokens):
            block, offset = divmod(position, self.block_size)
            self.kv[live.blocks[block]][offset] = (salt_of(share.key), live.hashes[position])
        live.num_computed += share.num_tokens
        for position in range(live.num_computed, live.num_computed + share.num_draft + share.num_candidates):
            block, offset = divmod(position, self.block_size)
            self.kv[live.blocks[block]][offset] = "a rejected draft"

    def _check_features(self, share, live):
        """The features of all rows that the step computes are there."""
        for image in live.images:
            for run in image.within(live.num_computed, live.num_computed + share.num_tokens):
                rows = self.images.rows(salt_of(share.key), image)
                assert rows == [1000 + image.digest[row % 32] for row in range(image.num_rows)], run
                assert not self.sees_images or run.length == image.num_rows, "rows that see each other are cut"

    def _keep_drafts(self, live, key, tokens):
        """Accepted drafts have their KV at their own places: all tokens but the last."""
        for token in tokens[:-1]:
            live.hashes.append(extend_hash(live.hashes[-1], token))
            block, offset = divmod(live.num_computed, self.block_size)
            self.kv[live.blocks[block]][offset] = (salt_of(key), live.hashes[-1])
            self._keep_in_groups(live, key, live.num_computed)
            live.num_computed += 1

    def _check_kv(self, key):
        live = self.live[key]
        for position in range(live.num_computed):
            block, offset = divmod(position, self.block_size)
            if self.kv[live.blocks[block]][offset] != (salt_of(key), live.hashes[position]):
                raise KVMismatchError(f"{key} reads a KV that is not its own at position {position}")

    def _result(self, share):
        live = self.live[share.key]
        prompt_logprobs = ()
        if live.sampling.prompt_logprobs is not None:
            predecessors = range(live.num_computed - share.num_tokens, min(live.num_computed, live.num_prompt - 1))
            prompt_logprobs = tuple(token_logprobs(live.hashes[i], live.tokens[i + 1]) for i in predecessors)
        if live.num_computed < len(live.tokens):
            return ChoiceResult(share.key, (), prompt_logprobs=prompt_logprobs)
        tokens, logprobs, history = [], [], live.hashes[-1]
        if live.sampling.beam_candidates:
            found = offers(history, live.sampling)
            return ChoiceResult(share.key, (), prompt_logprobs=prompt_logprobs, beam_candidates=found)
        most = live.sampling.num_candidates
        if most and not share.num_candidates and next_token(history, live.sampling) != POISON:
            live.num_computed -= 1
            live.num_candidates = 1 + history % most
            return ChoiceResult(share.key, (), prompt_logprobs=prompt_logprobs, num_candidates=live.num_candidates)
        num_right = history // VOCAB % (share.num_draft + 1)
        while len(tokens) <= num_right and (token := next_token(history, live.sampling)) != POISON:
            tokens.append(token)
            logprobs.append(token_logprobs(history, token))
            history = extend_hash(history, token)
        if not tokens:
            live.tokens.append(POISON)  # what a step that is planned already goes on with
            return ChoiceResult(share.key, (), error=Failure("the logits are not finite"))
        live.tokens += tokens
        self._keep_drafts(live, share.key, tokens)
        live.num_offered = 0 if most else history // VOCAB // 7 % (self.num_draft + 1)
        live.num_candidates = 1 + history % most if most else 0
        wanted = () if live.sampling.logprobs is None else tuple(logprobs)
        accepted = len(tokens) - 1
        counts = (live.num_offered, accepted, share.num_draft - accepted, live.num_candidates)
        return ChoiceResult(share.key, tuple(tokens), wanted, prompt_logprobs, *counts)
