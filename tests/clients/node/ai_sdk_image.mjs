// Vercel's AI SDK sends an image through one of its providers, whole and streamed.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { generateText, streamText } from "ai";
import { MODELS } from "./ai_sdk_models.mjs";

const [api, asked, said] = process.argv.slice(3);
const content = [
  { type: "text", text: asked },
  { type: "file", data: readFileSync("picture.png"), mediaType: "image/png" },
];
const request = { model: MODELS[api], maxRetries: 0, messages: [{ role: "user", content }] };
assert.equal((await generateText(request)).text, said);
assert.equal(await streamText(request).text, said);
