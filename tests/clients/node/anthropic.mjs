// Anthropic's own package: messages, whole, streamed, with tools, and its loop of them.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { AGAIN, DESCRIPTION, FIRST, PARAMETERS, SAID, SECOND, address, readFile } from "./conversation.mjs";

const client = new Anthropic({ baseURL: address, apiKey: "none", maxRetries: 0 });
const shared = { model: "tiny", max_tokens: 500, tools: [{ name: "read_file", description: DESCRIPTION, input_schema: PARAMETERS }] };

function textOf(message) {
  return message.content.filter((block) => block.type === "text").map((block) => block.text).join("");
}

async function conversation(ask) {
  const messages = [{ role: "user", content: FIRST }];
  const first = await ask({ ...shared, messages });
  assert.equal(first.stop_reason, "tool_use");
  const call = first.content.find((block) => block.type === "tool_use");
  messages.push({ role: "assistant", content: first.content });
  messages.push({ role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: readFile(call.input) }] });
  const second = await ask({ ...shared, messages });
  assert.equal(textOf(second), SAID);
  messages.push({ role: "assistant", content: second.content }, { role: "user", content: [{ type: "text", text: SECOND }] });
  assert.equal(textOf(await ask({ ...shared, messages })), AGAIN);
  assert.ok((await client.messages.countTokens({ model: shared.model, messages })).input_tokens > 0);
}

await conversation((body) => client.messages.create(body));
await conversation((body) => client.messages.stream(body).finalMessage());
const runnable = { ...shared.tools[0], run: readFile, parse: (input) => input };
const messages = [{ role: "user", content: FIRST }];
const runner = client.beta.messages.toolRunner({ ...shared, tools: [runnable], messages });
assert.equal(textOf(await runner), SAID);
await assert.rejects(client.messages.create({ ...shared, messages: [], temprature: 1 }), Anthropic.BadRequestError);
