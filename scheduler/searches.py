"""The beam searches that live."""

from collections.abc import Mapping, Sequence

from model_runner.contract import ChoiceResult, Failure
from scheduler.groups import BeamMembers
from scheduler.history import ChoiceHistory
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

    def abort(self, request_id: str, choice: int | None, now: float) -> list[ChoiceHistory]:
        """Want one choice no longer, or all; what is unknown or has ended is left alone."""
        search = self._searches.get(request_id)
        if search is None:
            return []
        aborted = [index for index in search.open if choice in (None, index)]
        search.open = [index for index in search.open if index not in aborted]
        if not search.open:
            self._end(search)
        return [search.history(index, now, has_ended=True) for index in aborted]

    def explain(self, request_id: str, now: float) -> list[ChoiceHistory]:
        """Of the choices that are still wanted."""
        search = self._searches.get(request_id)
        return [] if search is None else [search.history(index, now) for index in search.open]

    def advance(self, results: Mapping[str, ChoiceResult], now: float) -> list[RequestOutput]:
        """Go on with what a step brought members, by their keys; that these were computed is booked already."""
        return [output for search in list(self._searches.values()) for output in self._advance(search, results, now)]

    def fail(self, member: Request, error: Failure, now: float) -> list[RequestOutput]:
        """End a search whose computation went wrong, and let nobody find its blocks: they may be the cause."""
        search = self._searches[member.request_id]
        self._sharing.withdraw(search.members)
        self._end(search)
        return search.fail(error, now)

    def _advance(self, search: BeamMembers, results: Mapping[str, ChoiceResult], now: float) -> list[RequestOutput]:
        of_search = [results[member.key] for member in search.members if member.key in results]
        error = next((result.error for result in of_search if result.error is not None), None)
        if error is not None:
            return self.fail(search.members[0], error, now)
        self._sharing.publish(search.members)
        if any(member.remaining for member in search.members):
            return []
        advance = search.advance([result.beam_candidates for result in of_search], now)
        for member in advance.dropped:
            self._roster.stop(member)
        if not search.members:
            del self._searches[search.request_id]
        return advance.outputs

    def _end(self, search: BeamMembers) -> None:
        self._roster.end(search.members)
        del self._searches[search.request_id]
