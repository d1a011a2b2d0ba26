"""The pages of the API's reference: which endpoints each has, its purpose, and requests that can be pasted."""

from collections.abc import Mapping
from dataclasses import dataclass

from server.api.fields import generation, messages
from server.api.fields.decoding import DecodingFields
from server.api.fields.foreign import ForeignFields, ForeignHints, ForeignSettings
from server.api.fields.openai import AccountFields, SamplingFields
from server.api.fields.rules import RequestModel
from server.api.fields.structured import StructuredFields
from server.api.fields.tools import ToolFields
from server.api.llama_cpp.schema import LlamaFields
from server.api.messages.schema import MessagesFields
from server.api.ollama.schema import KeptFields, NamedFields, OllamaFields
from server.api.pooling.schema import PoolingFields, ScoringFields, TeiFields, TextFields
from server.api.responses.schema import HistoryFields, InputFields


@dataclass(frozen=True, slots=True)
class ApiPage:
    """One page of docs/reference/api."""

    name: str
    """The file's name, without `.md`."""
    title: str
    purpose: str
    paths: tuple[str, ...]
    """Endpoints whose path is one of these, or begins with one that ends with `*`."""
    is_written: bool = False
    """Whether people write the page and its endpoints come below."""


PAGES = (
    ApiPage(
        "chat-completions", "Chat completions",
        "Answers a conversation, as OpenAI's API does. Use it for chats, tools and structured output.",
        ("/v1/chat/completions",),
    ),
    ApiPage(
        "completions", "Completions",
        "Continues one or several prompts, without a chat template. Use it for base models, evaluations and "
        "log-probabilities of a given text.",
        ("/v1/completions",),
    ),
    ApiPage("responses", "Responses", "", ("/v1/responses*",), is_written=True),
    ApiPage(
        "conversations", "Conversations",
        "Stores the items of a conversation on the server, so that a [response](responses.md) needs to send only what "
        "is new.",
        ("/v1/conversations*",),
    ),
    ApiPage("messages", "Messages", "", ("/v1/messages*",), is_written=True),
    ApiPage(
        "llama-cpp", "llama.cpp's API", "", ("/completion", "/infill", "/apply-template", "/props", "/slots"),
        is_written=True,
    ),
    ApiPage("ollama", "Ollama's API", "", ("/", "/api/*"), is_written=True),
    ApiPage(
        "embeddings", "Embeddings, scores and classes", "",
        ("/v1/embeddings", "/embed", "/v1/score", "/v1/rerank", "/v2/rerank", "/v1/classify"), is_written=True,
    ),
    ApiPage(
        "tokens", "Tokens",
        "Turns text into tokens and back, as the loaded model does. Use it to count tokens before a request.",
        ("/tokenize", "/detokenize", "/tokenizer_info"),
    ),
    ApiPage(
        "files", "Files",
        "Stores files for [batches](../../how-to/batches.md). The server needs `--data-dir`.",
        ("/v1/files*",),
    ),
    ApiPage(
        "batches", "Batches",
        "Answers all requests of a file in the room that other requests leave. "
        "[Files and batches](../../how-to/batches.md) shows the whole way from the file to its answers.",
        ("/v1/batches*",),
    ),
    ApiPage("requests", "Requests", "", ("/v1/requests*",), is_written=True),
    ApiPage(
        "server", "Models, load and health",
        "Describes the server: its model, what that can do, what it is doing, and whether it is ready.",
        ("/v1/models*", "/v1/capabilities", "/v1/usage", "/v1/steps", "/health", "/ready", "/metrics", "/load",
         "/version", "/invocations", "/ping"),
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FieldGroup:
    """Fields that several requests share: described once, with a link from each of them."""

    title: str
    model: type[RequestModel]
    """The model that has them, itself or by its bases."""
    purpose: str


GROUPS = (
    FieldGroup("Every request that generates", generation.GenerationFields, "Which model, how it is seeded and sent."),
    FieldGroup("Sampling and stopping", DecodingFields, "How the next token is chosen, and when the output ends."),
    FieldGroup(
        "Structured output", StructuredFields,
        "A form that the text must have, enforced at every token. What cannot be enforced is refused, or reported for "
        "schemas that are not `strict`.",
    ),
    FieldGroup("Completions and chat completions", SamplingFields, "How many answers, and what they report."),
    FieldGroup("One answer per request", generation.OneAnswerFields, "Fields of the APIs that return a single answer."),
    FieldGroup("Chat template", generation.ConversationFields, "Settings of the model's chat template."),
    FieldGroup(
        "Conversation as input", messages.ConversationFields, "Messages that the chat template turns into a prompt."
    ),
    FieldGroup("Tools", ToolFields, "Functions and custom tools that the model may call: [tools](tools.md)."),
    FieldGroup("Account", AccountFields, "Fields of OpenAI's API about the account and its cache."),
    FieldGroup(
        "Fields of other servers", ForeignFields,
        "Fields of vLLM, SGLang, llama.cpp, Ollama and OpenRouter that have no equivalent here.",
    ),
    FieldGroup(
        "Samplers and settings of other servers", ForeignSettings,
        "Names of llama.cpp, Ollama and vLLM that every API for text takes; in Ollama's, they are `options`. Samplers "
        "that this server does not have, and settings that belong to the server, are ignored and reported.",
    ),
    FieldGroup("Hints of other servers", ForeignHints, "Fields of other servers that every request takes."),
    FieldGroup("Conversation or its next part", HistoryFields, "Fields of all requests with a response's input."),
    FieldGroup("Input and form of a response", InputFields, "Fields of requests that create or count a response."),
    FieldGroup("Every message", MessagesFields, "Fields that messages and their token counts share."),
    FieldGroup("Every llama.cpp completion", LlamaFields, "Fields that `/completion` and `/infill` share."),
    FieldGroup("Every Ollama request", KeptFields, "Fields that all requests to Ollama's paths for a model share."),
    FieldGroup("Every name for Ollama", NamedFields, "Fields of requests that load no model."),
    FieldGroup("Every Ollama answer", OllamaFields, "Fields that `/api/chat` and `/api/generate` share."),
    FieldGroup("Every request for numbers", PoolingFields, "Fields of embeddings, scores, rankings and classes."),
    FieldGroup("Numbers of single texts", TextFields, "Fields that embeddings and classes share."),
    FieldGroup("TEI's requests", TeiFields, "Fields that rankings and `/embed` share."),
    FieldGroup("Every score and ranking", ScoringFields, "Fields that scores and rankings share."),
)  # fmt: skip


def _post(path: str, body: str, *flags: str) -> str:
    options = " ".join(("-H 'Content-Type: application/json'", *flags))
    return f"curl http://127.0.0.1:8000{path} {options} -d '{body}'"


EXAMPLES: Mapping[str, str] = {
    "POST /v1/chat/completions": _post("/v1/chat/completions", """{
  "messages": [{"role": "user", "content": "Name three primes."}],
  "max_tokens": 50,
  "temperature": 0.7,
  "seed": 7
}"""),
    "POST /v1/completions": _post("/v1/completions", """{
  "prompt": "The capital of France is",
  "max_tokens": 8,
  "temperature": 0,
  "logprobs": 3
}"""),
    "POST /v1/responses": _post("/v1/responses", """{
  "input": "Name three primes.",
  "max_output_tokens": 50
}"""),
    "POST /v1/responses/input_tokens": _post("/v1/responses/input_tokens", """{"input": "Name three primes."}"""),
    "GET /v1/responses/{response_id}": "curl http://127.0.0.1:8000/v1/responses/$ID",
    "POST /v1/conversations": _post("/v1/conversations", """{
  "items": [{"role": "user", "content": "My name is Ada."}]
}"""),
    "POST /v1/conversations/{conversation_id}/items": _post("/v1/conversations/$ID/items", """{
  "items": [{"role": "user", "content": "What is my name?"}]
}"""),
    "POST /v1/messages": _post("/v1/messages", """{
  "max_tokens": 50,
  "messages": [{"role": "user", "content": "Name three primes."}]
}"""),
    "POST /v1/messages/count_tokens": _post("/v1/messages/count_tokens", """{
  "messages": [{"role": "user", "content": "Name three primes."}]
}"""),
    "POST /completion": _post("/completion", """{"prompt": "The capital of France is", "n_predict": 8}"""),
    "POST /infill": _post("/infill", """{
  "input_prefix": "def add(a, b):\\n    return ",
  "input_suffix": "\\n\\nprint(add(1, 2))",
  "n_predict": 16
}"""),
    "POST /apply-template": _post("/apply-template", """{"messages": [{"role": "user", "content": "Hello"}]}"""),
    "GET /props": "curl http://127.0.0.1:8000/props",
    "GET /slots": "curl http://127.0.0.1:8000/slots",
    "POST /api/chat": _post("/api/chat", """{
  "model": "SmolLM2-135M-Instruct",
  "messages": [{"role": "user", "content": "Name three primes."}],
  "stream": false,
  "options": {"num_predict": 50, "seed": 7}
}"""),
    "POST /api/generate": _post("/api/generate", """{
  "model": "SmolLM2-135M-Instruct",
  "prompt": "Name three primes.",
  "options": {"num_predict": 50}
}"""),
    "POST /api/embed": _post("/api/embed", """{
  "model": "SmolLM2-135M-Instruct",
  "input": ["one text", "another text"]
}"""),
    "POST /api/embeddings": _post("/api/embeddings", """{"model": "SmolLM2-135M-Instruct", "prompt": "one text"}"""),
    "POST /api/show": _post("/api/show", """{"model": "SmolLM2-135M-Instruct"}"""),
    "GET /api/tags": "curl http://127.0.0.1:8000/api/tags",
    "GET /api/ps": "curl http://127.0.0.1:8000/api/ps",
    "POST /v1/embeddings": _post("/v1/embeddings", """{"input": ["one text", "another text"]}"""),
    "POST /embed": _post("/embed", """{"inputs": ["one text", "another text"]}"""),
    "POST /v1/score": _post("/v1/score", """{
  "queries": "What is a panda?",
  "documents": ["A bear of China.", "A city in France."]
}"""),
    "POST /v1/rerank": _post("/v1/rerank", """{
  "query": "What is a panda?",
  "documents": ["A bear of China.", "A city in France."]
}"""),
    "POST /v1/classify": _post("/v1/classify", """{"input": ["I like it.", "Never again."]}"""),
    "POST /tokenize": _post("/tokenize", """{"prompt": "The capital of France is"}"""),
    "POST /detokenize": _post("/detokenize", """{"tokens": [84, 104, 101]}"""),
    "POST /v1/files": "curl http://127.0.0.1:8000/v1/files -F purpose=batch -F file=@requests.jsonl",
    "GET /v1/files/{file_id}/content": "curl http://127.0.0.1:8000/v1/files/$ID/content",
    "POST /v1/batches": _post("/v1/batches", """{
  "input_file_id": "$ID",
  "endpoint": "/v1/chat/completions",
  "completion_window": "24h"
}"""),
    "GET /v1/batches/{batch_id}": "curl http://127.0.0.1:8000/v1/batches/$ID",
    "GET /v1/requests": "curl 'http://127.0.0.1:8000/v1/requests?limit=5'",
    "GET /v1/models": "curl http://127.0.0.1:8000/v1/models",
    "GET /v1/capabilities": "curl http://127.0.0.1:8000/v1/capabilities",
    "GET /v1/usage": "curl 'http://127.0.0.1:8000/v1/usage'",
    "GET /v1/steps": "curl 'http://127.0.0.1:8000/v1/steps?limit=10'",
    "GET /ready": "curl http://127.0.0.1:8000/ready",
    "GET /metrics": "curl http://127.0.0.1:8000/metrics",
}  # fmt: skip
"""By endpoint. `$ID` stands for the `id` in the answer to the example before. A test sends them all."""
