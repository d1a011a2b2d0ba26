// Ollama's own package with two models that have the same weights, of which the second is loaded on demand.
import assert from "node:assert/strict";
import { Ollama } from "ollama";

const [address, ...models] = process.argv.slice(2);
const client = new Ollama({ host: address });
const messages = [{ role: "user", content: "What is rain?" }];
const options = { num_predict: 12, seed: 3, temperature: 0.7 };

async function running() {
  return (await client.ps()).models.map((one) => one.name.split(":")[0]);
}

assert.deepEqual((await client.list()).models.map((one) => one.name), models.map((one) => `${one}:latest`));
assert.deepEqual(await running(), models.slice(0, 1));
const answers = [];
for (const model of models) {
  let streamed = "";
  for await (const part of await client.chat({ model, messages, options, stream: true })) streamed += part.message.content;
  answers.push(streamed, (await client.chat({ model, messages, options })).message.content);
}
assert.equal(new Set(answers).size, 1);
assert.ok(answers[0]);
assert.deepEqual(await running(), models);
const ended = await client.generate({ model: models[1], prompt: "", keep_alive: 0 });
assert.equal(ended.done_reason, "unload");
assert.deepEqual(await running(), models.slice(0, 1));
