// Ollama's own package: chats with tools, whole and streamed, a schema, vectors, and errors.
import assert from "node:assert/strict";
import { Ollama } from "ollama";
import { AGAIN, DESCRIPTION, FIRST, PARAMETERS, SAID, SECOND, THIRD, WORD, WORD_SCHEMA, address, readFile } from "./conversation.mjs";

const client = new Ollama({ host: address });
const model = "tiny";
const tools = [{ type: "function", function: { name: "read_file", description: DESCRIPTION, parameters: PARAMETERS } }];

async function streamed(request) {
  const message = { role: "assistant", content: "", tool_calls: [] };
  for await (const part of await client.chat({ ...request, stream: true })) {
    message.content += part.message.content;
    message.tool_calls.push(...(part.message.tool_calls ?? []));
  }
  return message;
}

async function conversation(ask) {
  const messages = [{ role: "user", content: FIRST }];
  const called = await ask({ model, messages, tools, options: { num_ctx: 4096 } });
  const [call] = called.tool_calls;
  messages.push(called, { role: "tool", tool_name: call.function.name, content: readFile(call.function.arguments) });
  const answer = await ask({ model, messages, tools });
  assert.equal(answer.content, SAID);
  messages.push(answer, { role: "user", content: SECOND });
  assert.equal((await ask({ model, messages })).content, AGAIN);
  messages.push({ role: "user", content: THIRD });
  assert.deepEqual(JSON.parse((await ask({ model, messages, format: WORD_SCHEMA })).content), WORD);
}

await conversation(async (request) => (await client.chat(request)).message);
await conversation(streamed);
assert.deepEqual((await client.list()).models.map((one) => one.name), ["tiny:latest"]);
assert.equal((await client.embed({ model, input: ["a", "b"] })).embeddings.length, 2);
await assert.rejects(client.show({ model: "phi" }), /model 'phi' not found/);
await assert.rejects(client.chat({ model, messages: [], temprature: 1 }), /Did you mean|Unknown parameter/);
