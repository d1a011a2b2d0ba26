"""An engine with a scheduler of its own and no model, for what its prefix cache holds; it breaks where told to."""

from model_runner.runner_interface import RunnerInfo
from scheduler.engine import Engine
from scheduler.interface import SchedulerConfig
from scheduler.prefix_cache import CacheLog
from scheduler.scheduler import Scheduler
from server.engine.loop import LoadedEngine
from server.engine.messages import EngineConfig
from tests.scheduler.simulated_runner import VOCAB, SimulatedRunner

BLOCK_SIZE = 4
NUM_BLOCKS = 24
CRASH = VOCAB
"""In a prompt, this token breaks the engine that computes it."""


class BreakableRunner(SimulatedRunner):
    def execute(self, plan):
        if any(CRASH in admitted.tokens for admitted in plan.admitted):
            raise RuntimeError("told to raise")
        return super().execute(plan)


def load(config: EngineConfig) -> LoadedEngine:
    cache_log = CacheLog() if config.kv_events else None
    limits = SchedulerConfig(BLOCK_SIZE, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=64)
    scheduler = Scheduler(limits, NUM_BLOCKS, cache_log=cache_log)
    info = RunnerInfo(
        vocab_size=VOCAB,
        max_model_len=limits.max_model_len,
        block_size=limits.block_size,
        num_blocks=NUM_BLOCKS,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        device="cpu",
        dtype="float32",
        kv_dtype="float32",
        kernels="none",
    )
    engine = Engine(scheduler, BreakableRunner(NUM_BLOCKS, BLOCK_SIZE))
    return LoadedEngine(engine, info, cache_log=cache_log)
