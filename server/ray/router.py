"""Tells Ray which replica gets a request. Ray pickles this module as it is, for the processes that route."""

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from server.ray.placement import OngoingRequests, Place, by_preference


class PromptStartRouter(RequestRouter):
    """Keeps requests of the same session together; the option `session_id` of a handle names it."""

    def initialize_state(self, **_: Any) -> None:
        """See RequestRouter."""
        self._ongoing = OngoingRequests()

    async def choose_replicas(
        self, candidate_replicas: Sequence[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All replicas, the best first: the next one is asked only where the one before takes nothing."""
        session = ""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # before all are asked again
            session = pending_request.metadata.session_id
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        ranked = by_preference(session, self._places(candidate_replicas))
        if pending_request is not None and ranked:
            self._ongoing.choose(pending_request.metadata.internal_request_id, ranked[0].name)
        return [[replicas[place.name]] for place in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """See RequestRouter."""
        self._ongoing.send(pending_request.metadata.internal_request_id, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """See RequestRouter."""
        self._ongoing.end(internal_request_id)

    def _places(self, replicas: Sequence[RunningReplica]) -> list[Place]:
        """The replicas with their numbers of requests, as known here and as they report them."""
        counts = self._ongoing.counts()
        return [
            Place(
                name=replica.replica_id.unique_id,
                num_ongoing=max(
                    counts[replica.replica_id.unique_id], self.replica_queue_len_cache.get(replica.replica_id) or 0
                ),
                is_ready=replica.routing_stats.get("is_ready", True),
            )
            for replica in replicas
        ]
