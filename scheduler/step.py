"""The plan of a step while it is made."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from model_runner.contract import AdmittedRequest, ScheduledRequest
from model_runner.shared_list import SharedList
from scheduler.idle_room import OthersLoad
from scheduler.request import Request


@dataclass(slots=True)
class Step:
    """A plan in the making."""

    budget: int
    """Tokens that can still be scheduled."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    admitted: list[AdmittedRequest] = field(default_factory=list)
    shares: dict[str, ScheduledRequest] = field(default_factory=dict)

    def give(self, request: Request, num_tokens: int, new_blocks: tuple[int, ...] = ()) -> None:
        """Have the request compute so many tokens, and its candidates, for which the blocks have room as well."""
        share = ScheduledRequest(
            key=request.key,
            num_tokens=num_tokens,
            new_blocks=new_blocks,
            num_candidates=request.num_candidates,
            chosen=request.take_chosen(),
        )
        self.shares[request.key] = share
        self.budget -= share.num_rows

    def give_decode(self, request: Request) -> None:
        """Have a request that `only_decodes` do so, within the blocks that it has."""
        self.shares[request.key] = request.decode_share
        self.budget -= 1

    def give_drafts(self, request: Request, num_draft: int, new_blocks: tuple[int, ...]) -> None:
        """Give it room for so many drafts as well."""
        share = self.shares[request.key]
        new_blocks = share.new_blocks + new_blocks
        self.shares[request.key] = replace(share, num_draft=num_draft, new_blocks=new_blocks)
        self.budget -= num_draft

    def admit(self, request: Request, num_tokens: int, forked_from: str | None) -> None:
        """Begin with a request that has its blocks; it may have to wait for its first share."""
        request.chosen = None
        self.admitted.append(
            AdmittedRequest(
                key=request.key,
                tokens=request.tokens.fork() if isinstance(request.tokens, SharedList) else tuple(request.tokens),
                num_prompt=request.num_prompt,
                num_computed=request.num_computed,
                blocks=tuple(request.blocks),
                sampling=request.sampling,
                speculation=request.speculation,
                guides=request.guides,
                cache_salt=request.cache_salt,
                learn=request.learn,
                sampler_state=request.sampler_state,
                forked_from=forked_from,
            )
        )
        if num_tokens:
            self.give(request, num_tokens)

    def load(self) -> OthersLoad:
        """What it computes so far."""
        shares = self.shares.values()
        only_decodes = not self.admitted and all(share.num_tokens == 1 for share in shares)
        return OthersLoad(sum(share.num_rows for share in shares), only_decodes)

    def take_back(self, requests: Sequence[Request]) -> set[str]:
        """Leave preempted requests out, before their blocks are given back.

        Returns:
            The keys of those that only this plan would have admitted: the runner does not hear of them.
        """
        keys = {request.key for request in requests}
        blocks = {block for request in requests for block in request.blocks}
        for key in keys & self.shares.keys():
            self.budget += self.shares.pop(key).num_rows
        unheard_of = {admitted.key for admitted in self.admitted if admitted.key in keys}
        self.admitted = [admitted for admitted in self.admitted if admitted.key not in keys]
        self.copies = [copy for copy in self.copies if copy[1] not in blocks]
        return unheard_of
