"""The parts of the trainer: prompts, vocabulary, batches, loss, attention of unrolled steps."""

from collections.abc import Callable
from itertools import cycle, islice

import numpy as np
import pytest
import torch

from model_runner.heads.base import Example
from model_runner.heads.layer import Attend
from model_runner.training.eagle3 import Span, UnrolledAttention
from model_runner.training.examples import AnsweredPrompt, batches, opening_questions, own_prompts
from model_runner.training.objective import soft_cross_entropy
from model_runner.training.prompts import OWN_SHARE, TOPICS, Prompt, held_out_prompts, training_prompts
from model_runner.training.teacher import choose_draft_ids


def example(tokens: list[int], num_prompt: int) -> Example:
    return Example(np.array(tokens), num_prompt, 0.0, {})


def test_prompts_are_many_and_the_same_for_the_same_seed() -> None:
    first, again, other = (list(islice(training_prompts(seed=seed), 2000)) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert len(set(first)) > 1500
    assert any(prompt.kind == "plain" for prompt in first)


def test_own_prompts_are_mixed_in_and_used_again_when_they_run_out() -> None:
    own = [Prompt(f"question {number}") for number in range(100)]
    mixed = list(islice(training_prompts(own), 1000))
    assert mixed == list(islice(training_prompts(own), 1000))
    used = [prompt for prompt in mixed if prompt in own]
    assert used == list(islice(cycle(own), len(used)))
    assert pytest.approx(len(used), abs=50) == 1000 * OWN_SHARE


def test_own_prompts_are_those_that_ended() -> None:
    def answer(text: str) -> AnsweredPrompt:
        tokens = tuple(map(ord, text))
        return AnsweredPrompt((7, 7, *tokens), 2, 1.0)

    answers = [answer(text) for text in ("What is in a name?", " What is in a name?\n", "No.", "And so " * 20)]
    assert own_prompts(answers, lambda tokens: "".join(map(chr, tokens))) == [Prompt("What is in a name?")]
    assert len({question.sampling.seed for question in opening_questions(70)}) == 70


def test_held_out_prompts_are_kept_apart() -> None:
    held_out = [prompt for group in held_out_prompts().values() for prompt in group]
    assert len(held_out) == len(set(held_out)) > 60
    trained = set(islice(training_prompts(), 5000))
    assert not trained & set(held_out)
    texts = " ".join(prompt.text.lower() for prompt in held_out if prompt.kind == "chat")
    for topic in (*TOPICS["code_tasks"], *TOPICS["sentences"], *TOPICS["list_topics"], *TOPICS["characters"]):
        assert topic.lower() not in texts
    passages = {prompt.text[-100:] for prompt in trained}
    assert not passages & {prompt.text[-100:] for prompt in held_out}


def test_draft_vocabulary_is_what_answers_use_most() -> None:
    examples = [example([9, 9, 9, 9, 5, 3, 3, 7], 4), example([1, 7, 2, 7], 1)]
    assert choose_draft_ids(examples, 4, 12).tolist() == [2, 3, 5, 7]
    assert choose_draft_ids(examples, 6, 12).tolist() == [0, 1, 2, 3, 5, 7]
    assert choose_draft_ids(examples, 99, 12).tolist() == list(range(12))


def test_batches_pass_over_all_examples_and_can_be_taken_up_anywhere() -> None:
    examples = [example([0] * (1 + n), 1) for n in (3, 5, 8, 2, 9, 4, 7)]
    some = list(islice(batches(examples, 10, seed=1), 40))
    assert all(10 <= sum(one.num_answer for one in batch) < 10 + 9 for batch in some)
    flat = [id(one) for batch in some for one in batch]
    for start in range(0, len(flat) - 7, 7):
        assert sorted(flat[start : start + 7]) == sorted(map(id, examples))
    resumed = next(islice(batches(examples, 10, seed=1), 17, None))
    assert list(map(id, resumed)) == list(map(id, some[17]))


@pytest.mark.parametrize("rows", [1, 5, 3000])
def test_loss_and_gradient_are_those_of_torch(rows: int) -> None:
    torch.manual_seed(0)
    logits, teacher = torch.randn(rows, 700, requires_grad=True), torch.randn(rows, 700)
    weights = (torch.rand(rows) > 0.3).float()
    loss = soft_cross_entropy(logits, teacher, weights)
    (3 * loss).backward()
    mine = logits.grad.clone()
    logits.grad = None
    each = torch.nn.functional.cross_entropy(logits, teacher.softmax(1), reduction="none")
    expected = (each * weights).sum() / weights.sum().clamp_min(1)
    (3 * expected).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(mine, logits.grad)


def one_by_one(keys: list[torch.Tensor], values: list[torch.Tensor], scale: float) -> Callable[..., torch.Tensor]:
    """Attention of one query over all that the lists hold."""

    def attend(query: torch.Tensor) -> torch.Tensor:
        k = torch.stack(keys).repeat_interleave(2, dim=1)
        v = torch.stack(values).repeat_interleave(2, dim=1)
        weights = (torch.einsum("hd,shd->hs", query, k) * scale).softmax(-1)
        return torch.einsum("hs,shd->hd", weights, v)

    return attend


def test_unrolled_attention_sees_what_drafting_would() -> None:
    """Two sequences, three steps. A draft that begins at some place keeps only that place's own later keys."""
    torch.manual_seed(0)
    spans = [Span(0, 2, 7), Span(7, 8, 11)]
    attention: Attend = UnrolledAttention(spans, 0.5)
    steps = []
    for step in range(3):
        count = sum(len(range(*span.rows(step).indices(span.end))) for span in spans)
        q, k, v = torch.randn(count, 4, 6), torch.randn(count, 2, 6), torch.randn(count, 2, 6)
        steps.append((q, k, v, attention(q, k, v)))
    offset = [0, 0, 0]
    for span in spans:
        for root in range(span.first, span.end):
            keys = list(steps[0][1][span.start : root + 1])
            values = list(steps[0][2][span.start : root + 1])
            expected = one_by_one(keys, values, 0.5)(steps[0][0][root])
            torch.testing.assert_close(steps[0][3][root], expected)
            for step in (1, 2):
                row = offset[step] + root - span.first
                if root + step < span.end:
                    q, k, v, output = steps[step]
                    keys.append(k[row])
                    values.append(v[row])
                    torch.testing.assert_close(output[row], one_by_one(keys, values, 0.5)(q[row]))
        for step in (1, 2):
            offset[step] += len(range(*span.rows(step).indices(span.end)))
    assert offset[2] == len(steps[2][0])
