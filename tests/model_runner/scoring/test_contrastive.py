"""The contrast of two models' logits."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from model_runner.assemble import assemble
from model_runner.config import RunnerConfig
from model_runner.contract import Contrastive
from model_runner.scoring.transforms import contrast

LOGITS = torch.randn(4, 50, generator=torch.Generator().manual_seed(1)) * 4
AMATEUR = torch.randn(4, 50, generator=torch.Generator().manual_seed(2)) * 4
SETTINGS = [
    Contrastive(),
    Contrastive(expert_weight=1, amateur_weight=1, temperature=0.5),
    Contrastive(expert_weight=1, amateur_weight=0),
    Contrastive(expert_weight=3, amateur_weight=2, temperature=10),
]


def test_each_row_by_its_own_settings() -> None:
    scores = contrast(LOGITS, AMATEUR, SETTINGS)
    expert, amateur = LOGITS.double(), AMATEUR.double()
    expected = torch.stack(
        [
            1.5 * expert[0] - 0.5 * amateur[0],
            expert[1] - amateur[1] / 0.5,
            expert[2],
            3 * expert[3] - 2 * amateur[3] / 10,
        ]
    )
    torch.testing.assert_close(scores.double(), expected, rtol=1e-6, atol=1e-5)
    for row, one in enumerate(SETTINGS):
        assert torch.equal(contrast(LOGITS[row : row + 1], AMATEUR[row : row + 1], [one])[0], scores[row])


def test_li_is_a_difference_of_log_probabilities_but_for_one_number() -> None:
    scores = contrast(LOGITS[:1], AMATEUR[:1], SETTINGS[1:2])[0]
    difference = scores - (LOGITS[0].log_softmax(-1) - (AMATEUR[0] / 0.5).log_softmax(-1))
    assert torch.allclose(difference, difference[0].expand(50), atol=1e-4)


def test_an_amateur_that_is_the_expert_keeps_the_best_token() -> None:
    scores = contrast(LOGITS, LOGITS, [Contrastive(expert_weight=1 + beta, amateur_weight=beta) for beta in range(4)])
    assert torch.equal(scores.argmax(-1), LOGITS.argmax(-1))


@pytest.mark.parametrize(("expert", "amateur"), [(50, 40), (40, 50)])
def test_what_only_one_model_has_cannot_be_chosen(expert: int, amateur: int) -> None:
    scores = contrast(LOGITS[:, :expert], AMATEUR[:, :amateur], SETTINGS)
    assert scores.shape == (4, expert)
    assert torch.equal(scores[:, :40], contrast(LOGITS, AMATEUR, SETTINGS)[:, :40])
    assert (scores[:, 40:] == -torch.inf).all()


def test_what_goes_wrong_is_not_hidden_and_what_the_model_rules_out_stays_so() -> None:
    expert, amateur = LOGITS.clone(), AMATEUR.clone()
    expert[0, 3], amateur[1, 4] = torch.nan, torch.nan
    expert[2, 5] = amateur[2, 5] = -torch.inf
    scores = contrast(expert, amateur, SETTINGS)
    assert [bool(row.isnan().any()) for row in scores] == [True, True, False, False]
    assert scores[2, 5] == -torch.inf


def test_an_auxiliary_model_must_reach_as_far_as_the_model(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "short")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    with pytest.raises(ValueError, match="supports 64 tokens, but max_model_len is 1,024; set --max-model-len 64"):
        assemble(RunnerConfig(tiny_model("llama"), aux_model=folder, kv_cache_gib=0.02))
    assemble(RunnerConfig(tiny_model("llama"), aux_model=folder, kv_cache_gib=0.02, max_model_len=64))


def test_an_auxiliary_model_must_have_the_same_tokens(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "other")
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"the auxiliary model .*/other has another vocabulary than "):
        assemble(RunnerConfig(tiny_model("llama"), aux_model=folder, kv_cache_gib=0.02))
