"""Training data for heads: answers to many prompts, from an engine in this process."""

import logging
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

from model_runner.training.examples import AnsweredPrompt, Question
from model_runner.training.prompts import Prompt
from scheduler.interface import EngineRequest
from server.engine.loop import Engine
from server.generation.served_model import ServedModel
from server.text.chat_template import ChatTemplateError
from server.text.template_sandbox import TemplateWorkError
from server.text.tokenizer import Tokenizer

logger = logging.getLogger("samewise.training")


@dataclass(slots=True)
class _Running:
    """A question in the engine, and its tokens so far."""

    prompt: tuple[int, ...]
    temperature: float
    output: list[int] = field(default_factory=list)


class OfflineAnswerer:
    """Keeps an engine full of questions."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, model: ServedModel, *, in_flight: int = 64) -> None:
        """At most `in_flight` questions are in the engine."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._stops = model.defaults.eos_token_ids
        self._in_flight = in_flight
        self.max_prompt = 512
        """Tokens of the longest prompt that is answered."""

    def answers(self, questions: Iterator[Question]) -> Generator[tuple[int, AnsweredPrompt]]:
        """Yield each question's number and answer. Raises RuntimeError if the engine fails on a question."""
        numbered = enumerate(questions)
        running: dict[str, _Running] = {}
        try:
            while True:
                for number, question in islice(numbered, self._in_flight - len(running)):
                    prompt = self.encode(question.prompt)
                    if not 0 < len(prompt) <= self.max_prompt:
                        yield number, AnsweredPrompt((), 0, question.sampling.temperature)
                    else:
                        running[str(number)] = self._submit(number, prompt, question)
                if not running:
                    return
                yield from self._step(running)
        finally:
            for request_id in running:
                self._engine.abort(request_id)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Tokens of a prompt, by the chat template if the model has one. Without one, there is no opening."""
        template = self._tokenizer.chat_template
        if prompt.kind == "plain" or template is None:
            return tuple(self._tokenizer.encode(prompt.text, add_special_tokens=True)) if prompt.text else ()
        message: Mapping[str, str] = {"role": "user", "content": prompt.text}
        try:
            if prompt.kind == "opening":
                text = template.render_open([message], variables={})
            else:
                text = template.render([message], add_generation_prompt=True, variables={})
        except (ChatTemplateError, TemplateWorkError) as error:
            logger.warning("the chat template cannot make a prompt: %s", error)
            return ()
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _submit(self, number: int, prompt: tuple[int, ...], question: Question) -> _Running:
        sampling = replace(question.sampling, stop_token_ids=self._stops)
        self._engine.add(EngineRequest(str(number), prompt, sampling, question.max_tokens))
        return _Running(prompt, sampling.temperature)

    def _step(self, running: dict[str, _Running]) -> Iterator[tuple[int, AnsweredPrompt]]:
        for output in self._engine.step():
            if output.error is not None:
                raise RuntimeError(f"the model failed to answer: {output.error.message}")
            one = running[output.request_id]
            one.output += output.tokens
            if output.finish_reason is not None:
                del running[output.request_id]
                yield (
                    int(output.request_id),
                    AnsweredPrompt((*one.prompt, *one.output), len(one.prompt), one.temperature),
                )
