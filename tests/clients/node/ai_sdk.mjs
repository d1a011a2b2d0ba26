// Vercel's AI SDK through each of its providers: a loop with a tool, a second turn, a stream, an object.
import assert from "node:assert/strict";
import { Output, generateText, isStepCount, jsonSchema, streamText, tool } from "ai";
import { AGAIN, DESCRIPTION, FIRST, PARAMETERS, SAID, SECOND, THIRD, WORD, WORD_SCHEMA, readFile } from "./conversation.mjs";
import { MODELS } from "./ai_sdk_models.mjs";

const tools = { read_file: tool({ description: DESCRIPTION, inputSchema: jsonSchema(PARAMETERS), execute: readFile }) };

for (const name of process.argv.slice(3)) {
  const shared = { model: MODELS[name], maxRetries: 0 };
  const messages = [{ role: "user", content: FIRST }];
  const first = await generateText({ ...shared, tools, messages, stopWhen: isStepCount(3) });
  assert.equal(first.text, SAID, name);
  messages.push(...first.response.messages, { role: "user", content: SECOND });
  assert.equal((await generateText({ ...shared, tools, messages })).text, AGAIN, name);

  const streamed = streamText({ ...shared, tools, prompt: FIRST, stopWhen: isStepCount(3) });
  assert.equal(await streamed.text, SAID, name);
  assert.ok((await streamed.totalUsage).outputTokens > 0, name);

  if (name === "messages") continue; // asks for an object by a forced call, which the scripted model does not make
  const output = Output.object({ schema: jsonSchema(WORD_SCHEMA) });
  const object = await generateText({ ...shared, output, prompt: `word-heliotrope ${THIRD}` });
  assert.deepEqual(object.output, WORD, name);
}
