"""How many replicas there should be. Ray pickles this module as it is, for its controller."""

# Short: Ray pickles it by its name.

import math
from typing import Any


class LoadPolicy:
    """As many that their mean load is the target. A replica's load is the share of its places that are wanted: choices
    that run and wait, in multiples of how many it computes at the same time.

    Ray keeps to the least and the largest number, and waits for its delays before it follows.
    """

    def __init__(self, target_load: float) -> None:
        self._target_load = target_load

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The number, given Ray's AutoscalingContext; and nothing to remember."""
        loads = context.aggregated_metrics.get("load", {})
        known = [loads[replica] for replica in context.running_replicas if replica in loads]
        if not known:
            return context.target_num_replicas, {}  # nobody has told anything yet
        return max(1, math.ceil(round(sum(known) / self._target_load, 6))), {}
