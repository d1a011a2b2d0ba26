"""The prompt for a query and a document, as the model was trained to get it."""

from collections.abc import Callable

from server.errors import ContextLengthError, InvalidRequestError, shorten
from server.generation.pooling.abilities import Scoring
from server.generation.pooling.request import Pair, Score
from server.generation.prompt import render
from server.generation.request import Conversation, TokenPrompt
from server.text.chat_template import ChatTemplate, ChatTemplateError
from server.text.tokenizer import Tokenizer

_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
"""What Qwen3-Reranker is told, as its authors publish it, and ..."""
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""... asked, if nothing else is."""


class PairPrompts:
    """Of one model. Its chat template decides: it may know the roles `query` and `document`. If not, a model that
    scores by a classification head gets the two texts as its tokenizer joins them, and one that says yes or no gets a
    question, in the form that Qwen3-Reranker was trained with.
    """

    def __init__(self, tokenizer: Tokenizer, form: Scoring, encode: Callable[[str, str], list[int]]) -> None:
        """`encode` makes tokens of a text with all its special tokens, and names the path if they are too many."""
        self._tokenizer = tokenizer
        self._form = form
        self._encode = encode

    def of(self, pair: Pair, asks: Score) -> TokenPrompt:
        """The prompt. Raises InvalidRequestError if it is too long or the model has no template for it."""
        document = pair.document
        if asks.max_document_tokens is not None:
            document = self._tokenizer.beginning(document, asks.max_document_tokens)
        try:
            return TokenPrompt(self._tokens(pair.query, document, asks.instruction, pair.path), pair.path)
        except ContextLengthError:
            self._encode(pair.query, pair.query_path)  # which is to blame if it is too long by itself
            raise

    def _tokens(self, query: str, document: str, asked: str | None, path: str) -> list[int]:
        template = self._tokenizer.chat_template
        if template is not None and template.knows_pairs:
            return self._encode(self._rendered(template, query, document, asked, path), path)
        if self._form.by == "classes":
            if asked is not None:
                raise _no_instruction()
            self._encode(query + document, path)  # which refuses what is far too long
            return self._tokenizer.encode_pair(query, document)
        question = (
            f"<Instruct>: {asked or self._form.instruction or _INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        )
        messages = [{"role": "system", "content": _JUDGE}, {"role": "user", "content": question}]
        text, _ = render(template, Conversation(messages, thinks=False))
        return self._encode(text, path)

    def _rendered(self, template: ChatTemplate, query: str, document: str, asked: str | None, path: str) -> str:
        pair = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        opens_turn, instruction = self._form.opens_turn, asked or self._form.instruction
        try:
            plain = template.render(pair, add_generation_prompt=opens_turn, variables={})
            if instruction is None:
                return plain
            told = [{"role": "system", "content": instruction}, *pair]
            text = template.render(told, add_generation_prompt=opens_turn, variables={})
        except ChatTemplateError as error:
            message = f"The model's chat template does not accept this pair: {shorten(str(error), 200)}"
            raise InvalidRequestError(message, param=path, code="invalid_value") from error
        if asked is not None and text == plain:
            raise _no_instruction()
        return text


def _no_instruction() -> InvalidRequestError:
    message = "Unsupported parameter: 'instruction'. This model gets a query and a document, and nothing else."
    return InvalidRequestError(message, param="instruction", code="unsupported_parameter")
