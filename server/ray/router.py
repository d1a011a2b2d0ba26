"""Tells Ray which replica gets a request. Ray pickles this module as it is, for the processes that route."""

from collections.abc import Sequence

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from server.ray.placement import Place, by_preference


class PromptStartRouter(RequestRouter):
    """Keeps requests of the same session together; the option `session_id` of a handle names it."""

    async def choose_replicas(
        self, candidate_replicas: Sequence[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All replicas, the best first: the next one is asked only where the one before takes nothing."""
        session = ""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # before all are asked again
            session = pending_request.metadata.session_id
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        places = [self._place(replica) for replica in candidate_replicas]
        return [[replicas[place.name]] for place in by_preference(session, places)]

    def _place(self, replica: RunningReplica) -> Place:
        num_ongoing = self.replica_queue_len_cache.get(replica.replica_id) or 0  # not known: not asked for long
        return Place(replica.replica_id.unique_id, num_ongoing, replica.routing_stats.get("is_ready", True))
