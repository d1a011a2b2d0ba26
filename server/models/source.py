"""Engines of one model in processes of their own, planned and started by a process that waits."""

from collections.abc import Callable
from dataclasses import replace

from model_runner.model_needs import ModelNeeds
from model_runner.runner_interface import RunnerInfo
from server.engine.messages import EngineConfig, Plan
from server.engine.process import EngineProcess
from server.engine.step_log import StepLog
from server.engine.supervisor import EngineLimits, EngineSupervisor
from server.models.ledger import Ledger, Ledgers
from server.models.spare import SpareWorker


class ProcessSource:
    """A ModelSource. Its plan fixes the size of the cache, so that no limit depends on what else is loaded."""

    def __init__(
        self,
        config: EngineConfig,
        limits: EngineLimits,
        spare: SpareWorker,
        ledgers: Ledgers,
        cache_share: float | None,
        publish: Callable[[bytes], None] | None = None,
    ) -> None:
        """`cache_share` goes into the `Plan`; `publish` receives KV events."""
        self._config = config
        self._limits = limits
        self._spare = spare
        self._ledgers = ledgers
        self._cache_share = cache_share
        self._ledger: Ledger | None = None
        self._publish = publish
        self.needs: ModelNeeds | None = None
        """The memory that an engine takes, once it is planned."""
        self._planned: RunnerInfo | None = None

    @property
    def ledger(self) -> Ledger:
        assert self._ledger is not None, "it is planned first"
        return self._ledger

    @property
    def planned(self) -> RunnerInfo | None:
        return self._planned

    async def plan(self) -> int:
        self.needs = await self._spare.plan(Plan(self._config, self._ledgers.budgets, self._cache_share))
        self._planned = _planned(self.needs)
        self._ledger = self._ledgers.of(self.needs)
        return self.needs.reserved_bytes

    def make_engine(self, steps: StepLog) -> EngineSupervisor:
        assert self.needs is not None, "it is planned first"
        runner = replace(self._config.runner, kv_cache_gib=self.needs.kv_cache_gib)
        config = replace(self._config, runner=runner)
        return EngineProcess(config, self._limits, self._publish, self._spare.take, steps)


def _planned(needs: ModelNeeds) -> RunnerInfo:
    """The facts of a plan. No types and no kernels are known before an engine has a runner."""
    return RunnerInfo(
        vocab_size=needs.vocab_size,
        max_model_len=needs.max_model_len,
        num_blocks=needs.num_tokens,
        block_size=1,
        max_num_seqs=1,
        max_num_batched_tokens=1,
        device=needs.device,
        dtype="",
        kv_dtype="",
        kernels="",
        takes_images=needs.image_bytes > 0,
    )
