"""The planned memory of windows."""  # Short: the plan itself has its own tests

import torch

from bench.cache_memory import FORMS, STEP_TOKENS, planned_mib
from model_runner.kv_cache import KVShape

LENGTH = 4096
BLOCK = 32


def test_full_layers_keep_every_token_and_windows_two_each() -> None:
    full = KVShape(1, 64, 64)
    window = KVShape(1, 64, 64, window=BLOCK)
    mib_of_token = 2 * 64 * 2 / (1 << 20)
    assert planned_mib([full, full], LENGTH, 3, torch.bfloat16) == 2 * 3 * LENGTH * mib_of_token
    in_windows = 2 * 3 * (BLOCK + BLOCK) + STEP_TOKENS
    assert planned_mib([full, window], LENGTH, 3, torch.bfloat16) == (3 * LENGTH + in_windows) * mib_of_token


def test_forms_have_the_layers_of_the_models() -> None:
    assert [sum(shape.window is None for shape in FORMS[name]) for name in ("Gemma 3 4B", "gpt-oss-20b")] == [5, 12]
