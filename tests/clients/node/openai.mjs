// OpenAI's own package: chat completions and responses, whole, streamed, parsed, with tools.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { AGAIN, DESCRIPTION, FIRST, PARAMETERS, SAID, SECOND, THIRD, WORD, WORD_SCHEMA, address, readFile } from "./conversation.mjs";

const client = new OpenAI({ baseURL: `${address}/v1`, apiKey: "none", maxRetries: 0 });
const model = "tiny";

async function chat() {
  const functionTool = {
    type: "function",
    function: { name: "read_file", description: DESCRIPTION, parameters: PARAMETERS, parse: JSON.parse, function: readFile },
  };
  for (const stream of [false, true]) {
    const runner = client.chat.completions.runTools({ model, stream, tools: [functionTool], messages: [{ role: "user", content: FIRST }] });
    assert.equal(await runner.finalContent(), SAID);
    const messages = [...runner.messages, { role: "user", content: SECOND }];
    const answer = await client.chat.completions.create({ model, messages });
    assert.equal(answer.choices[0].message.content, AGAIN);
  }
  const streamed = client.chat.completions.stream({
    model,
    messages: [{ role: "user", content: `word-heliotrope ${THIRD}` }],
    response_format: { type: "json_schema", json_schema: { name: "word", strict: true, schema: WORD_SCHEMA } },
  });
  assert.deepEqual(JSON.parse((await streamed.finalChatCompletion()).choices[0].message.content), WORD);
  await assert.rejects(client.chat.completions.create({ model, messages: [], temprature: 1 }), OpenAI.BadRequestError);
}

const tool = { type: "function", name: "read_file", description: DESCRIPTION, parameters: PARAMETERS, strict: true };

async function responses(ask) {
  const first = await ask({ model, tools: [tool], input: FIRST });
  const call = first.output.find((item) => item.type === "function_call");
  const output = { type: "function_call_output", call_id: call.call_id, output: readFile(JSON.parse(call.arguments)) };
  const second = await ask({ model, tools: [tool], previous_response_id: first.id, input: [output] });
  assert.equal(second.output_text, SAID);
  const third = await ask({
    model,
    tools: [tool],
    store: false,
    input: [{ role: "user", content: FIRST }, ...first.output, output, ...second.output, { role: "user", content: SECOND }],
  });
  assert.equal(third.output_text, AGAIN);
  const format = { type: "json_schema", name: "word", strict: true, schema: WORD_SCHEMA };
  const fourth = await ask({ model, previous_response_id: second.id, input: THIRD, text: { format } });
  assert.deepEqual(JSON.parse(fourth.output_text), WORD);
}

await chat();
await responses((body) => client.responses.create(body));
await responses((body) => client.responses.stream(body).finalResponse());
await assert.rejects(client.responses.create({ model, input: "hi", temprature: 1 }), OpenAI.BadRequestError);
