"""Request router for Ray that keeps a session's requests on one replica. Ray pickles this module by value."""

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from server.ray.placement import OngoingRequests, ReplicaState, ranked_replicas


class PromptStartRouter(RequestRouter):
    """Routes requests of the same session to the same replica; the handle's option `session_id` names the session."""

    queue_len_response_deadline_s = 1.0
    """Time for a replica to accept a request, before the next one is asked. With Ray's default of 0.1 s, sessions leave
    their cached prefixes when the machine is busy."""

    def initialize_state(self, **_: Any) -> None:
        self._ongoing = OngoingRequests()

    async def choose_replicas(
        self, candidate_replicas: Sequence[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Rank all replicas, best first. Ray tries the next one only if the previous one does not accept."""
        session = ""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # before all replicas are tried again
            session = pending_request.metadata.session_id
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        ranked = ranked_replicas(session, self._states(candidate_replicas))
        if pending_request is not None and ranked:
            self._ongoing.choose(pending_request.metadata.internal_request_id, ranked[0].name)
        return [[replicas[state.name]] for state in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        self._ongoing.send(pending_request.metadata.internal_request_id, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._ongoing.end(internal_request_id)

    def _states(self, replicas: Sequence[RunningReplica]) -> list[ReplicaState]:
        """The replicas' states. The number of requests is the larger of our count and the replica's report."""
        counts = self._ongoing.counts()
        return [
            ReplicaState(
                name=replica.replica_id.unique_id,
                num_ongoing=max(
                    counts[replica.replica_id.unique_id], self.replica_queue_len_cache.get(replica.replica_id) or 0
                ),
                is_ready=replica.routing_stats.get("is_ready", True),
            )
            for replica in replicas
        ]
