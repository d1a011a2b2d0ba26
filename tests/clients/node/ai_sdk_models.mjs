// The models of Vercel's AI SDK, by their providers and APIs.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { address } from "./conversation.mjs";

const of = { baseURL: `${address}/v1`, apiKey: "none" };
const compatible = createOpenAICompatible({ ...of, name: "samewise", supportsStructuredOutputs: true, includeUsage: true });

export const MODELS = {
  chat: compatible("tiny"),
  "openai chat": createOpenAI(of).chat("tiny"),
  responses: createOpenAI(of)("tiny"),
  messages: createAnthropic(of)("tiny"),
};
