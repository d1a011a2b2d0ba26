"""Multi-token prediction by the modules of tiny checkpoints: the tokens and logprobs of no speculation."""

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.speculation_matrix import FEATURES, Feature
from bench.tiny_models import write_tiny_model
from model_runner.config import Quantization, RunnerConfig
from model_runner.contract import SamplingParams, Speculation
from model_runner.draft_tree import ROOT, DraftTree
from model_runner.platforms.cpu import CpuPlatform
from model_runner.runner import ModelRunner
from model_runner.speculative.heads import RecurrentProposer
from model_runner.speculative.proposer import TargetStep
from scheduler.interface import EngineRequest
from tests.engine.conftest import Harness
from tests.model_runner.heads.checkpoints import Tensors
from tests.model_runner.heads.mtp_modules import LAYERS, NextN, Qwen

GREEDY = SamplingParams(temperature=0.0, logprobs=1)
SHARPER = 20
"""Factor on heads, so that some tokens are much more probable than others, and are guessed."""


def add(folder: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """Change the weights of a model."""
    weights = folder / "model.safetensors"
    save_file(change(load_file(weights)), weights, {"format": "pt"})
    return folder


def write_nextn(folder: Path) -> Path:
    """A random model of DeepSeek-V3's kind with its module, in the names of the published checkpoint."""
    truth = NextN()
    torch.manual_seed(2)
    AutoModelForCausalLM.from_config(truth.config).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    module = {name: tensor for name, tensor in truth.tensors().items() if name.startswith(f"model.layers.{LAYERS}.")}
    return add(folder, lambda tensors: tensors | module | {"lm_head.weight": tensors["lm_head.weight"] * SHARPER})


def write_qwen(folder: Path, kind: str = "qwen3_5_text") -> Path:
    """A random model with recurrent layers and its module."""
    write_tiny_model(kind, folder)
    module = Qwen(kind).tensors()
    return add(folder, lambda tensors: tensors | module | {"lm_head.weight": tensors["lm_head.weight"] * SHARPER})


def load(folder: Path, quantization: Quantization = "auto") -> Harness:
    config = RunnerConfig(folder, quantization=quantization, heads=(folder,), kv_cache_gib=0.08, max_num_seqs=34)
    return Harness(ModelRunner.load(config))


MODULES = [write_nextn, write_qwen]
CASES = [
    (write, name)
    for which, write in enumerate(MODULES)
    for index, (name, feature) in enumerate(FEATURES.items())
    if index % 2 == which or replace(feature, sampling=SamplingParams()) != Feature(SamplingParams())
]
"""Each module with each feature of the engine, and one of them with each feature of sampling alone."""


@pytest.fixture(scope="module")
def harness(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    harness = load(request.param(tmp_path_factory.mktemp("model")))
    yield harness
    harness.forget()


@pytest.mark.parametrize(("harness", "feature"), CASES, indirect=["harness"])
def test_equal_to_no_speculation(harness: Harness, feature: str) -> None:
    cell = harness.matrix().cell("mtp", feature)
    assert cell.is_equal
    assert cell.num_drafted > 0
    assert cell.num_preempted > 0 or not FEATURES[feature].is_short_of_blocks


def following_tokens_only(tensors: Tensors) -> Tensors:
    """A target that predicts from the last token alone, and a module that predicts from the next one just as it does.

    Neither has layers that add anything, so only the norms and the projection of the embedding are left.
    """
    ends = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")
    changed = {name: tensor * 0 if name.endswith(ends) else tensor for name, tensor in tensors.items()}
    hidden = len(tensors["mtp.norm.weight"])
    changed["model.norm.weight"] = torch.linspace(-0.5, 0.5, hidden)
    changed["mtp.norm.weight"] = torch.linspace(-0.5, 0.5, hidden)
    changed["mtp.pre_fc_norm_embedding.weight"] = torch.zeros(hidden)
    changed["lm_head.weight"] = tensors["lm_head.weight"] * SHARPER  # so that drafts are chains
    changed["mtp.fc.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    return changed


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_next"])
def test_a_module_that_knows_the_target_is_right(kind: str, tmp_path: Path) -> None:
    harness = load(add(write_qwen(tmp_path / kind, kind), following_tokens_only))
    prompts = [tuple(range(start, start + 27 + 5 * start)) for start in (3, 4, 5, 6)]
    requests = [EngineRequest(str(len(prompt)), prompt, GREEDY, 80) for prompt in prompts]
    alone = harness.run(harness.engine(), requests)
    drafting = [replace(request, speculation=Speculation("mtp", 4)) for request in requests]
    answers = harness.run(harness.engine(), drafting)
    assert all((one.tokens, one.logprobs) == (alone[key].tokens, alone[key].logprobs) for key, one in answers.items())
    num_accepted, num_rejected = (
        sum(getattr(one, name) for one in answers.values()) for name in ("num_accepted", "num_rejected")
    )
    assert num_accepted > 0.6 * sum(len(one.tokens) for one in answers.values())
    assert num_rejected < 0.1 * num_accepted


def test_first_drafts_are_those_of_the_formulas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over prompt and answer, the module's truth and transformers' hidden states give the best guess at each place."""
    monkeypatch.setattr(CpuPlatform, "prepare_heads", lambda *_: None)  # which would round the module's weights
    folder = write_qwen(tmp_path / "model")
    harness = load(folder, "none")
    proposer = harness.runner._speculator._proposers["mtp"]
    assert isinstance(proposer, RecurrentProposer)
    guesses: dict[int, int] = {}  # by the number of tokens so far
    propose = proposer.propose

    def watched(step: TargetStep) -> list[DraftTree]:
        trees = propose(step)
        for choice, tree in zip(step.choices, trees, strict=True):
            if ROOT in tree.parents:
                guesses[len(choice.tokens)] = tree.tokens[tree.parents.index(ROOT)]
        return trees

    proposer.propose = watched  # type: ignore[method-assign]
    prompt = tuple((3 + 7 * index * index) % 300 + 3 for index in range(50))
    request = EngineRequest("a", prompt, GREEDY, 60, speculation=Speculation("mtp", 3))
    (answer,) = harness.run(harness.engine(chunk=24), [request]).values()
    (alone,) = harness.run(harness.engine(), [replace(request, speculation=None)]).values()
    assert (answer.tokens, answer.logprobs) == (alone.tokens, alone.logprobs)
    expected = best_guesses(folder, torch.tensor([*prompt, *answer.tokens]))
    right = [expected[num] == token for num, token in guesses.items()]
    assert len(right) > 20
    assert all(right)


def test_a_start_says_what_a_model_comes_with(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "samewise.runner")
    folder = write_qwen(tmp_path / "model")
    hint = f"multi-token prediction drafts with --heads {folder}"
    for config in (RunnerConfig(folder, heads=(folder,)), RunnerConfig(folder, speculation="off")):
        ModelRunner.load(replace(config, kv_cache_gib=0.02))
        assert hint not in caplog.text
    ModelRunner.load(RunnerConfig(folder, kv_cache_gib=0.02))
    assert hint in caplog.text


@torch.no_grad()
def best_guesses(folder: Path, tokens: Tensor) -> dict[int, int]:
    """The guess of the token after the next, after so many known tokens: the last of them is the next."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    hidden = model.model(tokens[None, :-1]).last_hidden_state[0]
    embedded = model.get_input_embeddings()(tokens[1:])
    module = Qwen()
    logits = module.logits(module.states(embedded, hidden), model.lm_head.weight)
    return {place + 2: int(row.argmax()) for place, row in enumerate(logits)}
