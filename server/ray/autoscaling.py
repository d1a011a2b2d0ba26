"""Autoscaling policy: the number of replicas by load. Ray pickles this module by value for its controller."""

# Short: Ray pickles the whole module, so it contains nothing else.

import math
from typing import Any


class LoadPolicy:
    """Scales so that the replicas' mean load is the target.

    A replica's load is its running and waiting choices, divided by max_num_seqs. Ray applies the minimum, the maximum
    and the delays.
    """

    def __init__(self, target_load: float) -> None:
        self._target_load = target_load

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The desired number of replicas for Ray's AutoscalingContext, and an empty state."""
        loads = context.aggregated_metrics.get("load", {})
        known = [loads[replica] for replica in context.running_replicas if replica in loads]
        if not known:
            return context.target_num_replicas, {}  # no replica has reported its load yet
        return max(1, math.ceil(round(sum(known) / self._target_load, 6))), {}
