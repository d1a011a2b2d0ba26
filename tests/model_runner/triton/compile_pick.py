"""Compiles the kernels that pick tokens, for vocabularies of one chunk and of many; see `hopper`."""

import torch

from model_runner.kernels.triton.pick import pick

from .hopper import report

VOCABULARIES = (320, 50_257, 262_144)


def launch() -> None:
    keys, temperatures = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.float64)
    for size in VOCABULARIES:
        pick(torch.zeros(2, size), keys, temperatures)


if __name__ == "__main__":
    report(launch)
