"""The learner's process for tests: it learns quickly, at once, and on a busy machine, too."""

import os

from model_runner.learning import process

prepare = process.prepare_torch


def prepare_quickly(threads: int) -> None:
    assert os.sched_getscheduler(0) == os.SCHED_IDLE
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    prepare(threads)
    from model_runner.learning import learner  # noqa: PLC0415

    learner.LEARNING_RATE, learner.BATCH_ROWS, learner.PUBLISH_EVERY_S = 5e-3, 128, 0.0


if __name__ == "__main__":
    process.prepare_torch = prepare_quickly
    process.main()
