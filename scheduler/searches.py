"""The beam searches that live."""

from collections.abc import Mapping, Sequence

from model_runner.contract import ChoiceResult, Failure
from scheduler.groups import BeamMembers
from scheduler.interface import RequestOutput
from scheduler.request import Request
from scheduler.roster import Roster
from scheduler.sharing import KVSharing


class Searches:
    """Has beam searches go on when all of their members have caught up, and takes them off the roster in the end."""

    def __init__(self, roster: Roster, sharing: KVSharing) -> None:
        self._roster = roster
        self._sharing = sharing
        self._searches: dict[str, BeamMembers] = {}  # by request id

    def __len__(self) -> int:
        return len(self._searches)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._searches

    @property
    def members(self) -> list[Sequence[Request]]:
        """Of each search."""
        return [search.members for search in self._searches.values()]

    def add(self, search: BeamMembers) -> None:
        """Follow a search whose first member was lined up."""
        self._searches[search.request_id] = search

    def abort(self, request_id: str, choice: int | None) -> None:
        """Want one choice no longer, or all; what is unknown or has ended is left alone."""
        search = self._searches.get(request_id)
        if search is not None:
            search.open = [index for index in search.open if choice not in (None, index)]
            if not search.open:
                self._end(search)

    def advance(self, results: Mapping[str, ChoiceResult]) -> list[RequestOutput]:
        """Go on with what a step brought members, by their keys; that these were computed is booked already."""
        return [output for search in list(self._searches.values()) for output in self._advance(search, results)]

    def fail(self, member: Request, error: Failure) -> list[RequestOutput]:
        """End a search whose computation went wrong, and let nobody find its blocks: they may be the cause."""
        search = self._searches[member.request_id]
        self._sharing.withdraw(search.members)
        self._end(search)
        return search.fail(error)

    def _advance(self, search: BeamMembers, results: Mapping[str, ChoiceResult]) -> list[RequestOutput]:
        of_search = [results[member.key] for member in search.members if member.key in results]
        error = next((result.error for result in of_search if result.error is not None), None)
        if error is not None:
            return self.fail(search.members[0], error)
        self._sharing.publish(search.members)
        if any(member.remaining for member in search.members):
            return []
        advance = search.advance([result.beam_candidates for result in of_search])
        for member in advance.dropped:
            self._roster.stop(member)
        if not search.members:
            del self._searches[search.request_id]
        return advance.outputs

    def _end(self, search: BeamMembers) -> None:
        self._roster.end(search.members)
        del self._searches[search.request_id]
