// What all clients are put through: the texts of tests/clients/scripted_model.py, the tool, and what must come back.
import assert from "node:assert/strict";

export const [address] = process.argv.slice(2);
export const FIRST = "Read secret.txt and tell me the word in it.";
export const SECOND = "Once more: which word was it?";
export const THIRD = "Now as JSON.";
export const SAID = "It says word-heliotrope.";
export const AGAIN = "Again: word-heliotrope.";
export const WORD = { word: "word-heliotrope" };
export const DESCRIPTION = "Reads a file.";
export const PARAMETERS = {
  type: "object",
  properties: { path: { type: "string" } },
  required: ["path"],
  additionalProperties: false,
};
export const WORD_SCHEMA = {
  type: "object",
  properties: { word: { type: "string" } },
  required: ["word"],
  additionalProperties: false,
};

export function readFile({ path }) {
  assert.equal(path, "secret.txt");
  return "word-heliotrope\n";
}
