// OpenAI's client for Node.js asks for vectors: as numbers, as base64 (its default), shortened.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { join } from "node:path";

const find = createRequire(join(process.env.PAGEMILL_NODE_MODULES, "index.js"));
const OpenAI = find("openai").default;
const client = new OpenAI({ maxRetries: 0 });
const model = process.env.PAGEMILL_MODEL;
const input = ["A cat sleeps.", "Interest rates rose."];

const plain = await client.embeddings.create({ model, input });
const numbers = await client.embeddings.create({ model, input, encoding_format: "float" });
assert.equal(plain.data.length, 2);
plain.data.forEach(({ embedding }, at) => {
  assert.ok(Math.abs(Math.hypot(...embedding) - 1) < 1e-3);
  embedding.forEach((value, place) => assert.ok(Math.abs(value - numbers.data[at].embedding[place]) < 1e-6));
});
const shorter = await client.embeddings.create({ model, input: input[0], dimensions: 64 });
assert.equal(shorter.data[0].embedding.length, 64);
assert.ok(shorter.usage.total_tokens > 0);
