// OpenAI's client for Node.js: chat, stream, abort, logprobs, a schema, a tool that is run by the client, errors.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { join } from "node:path";

const find = createRequire(join(process.env.PAGEMILL_NODE_MODULES, "index.js"));
const OpenAI = find("openai").default;
const client = new OpenAI({ maxRetries: 0 });
const model = process.env.PAGEMILL_MODEL;
const messages = [{ role: "user", content: "Name three rivers." }];
const asked = { model, messages, temperature: 0, max_completion_tokens: 24 };

const listed = [];
for await (const each of client.models.list()) listed.push(each.id);
assert.deepEqual(listed, [model]);

const whole = await client.chat.completions.create({ ...asked, logprobs: true, top_logprobs: 2 });
const text = whole.choices[0].message.content;
assert.ok(text);
assert.equal(whole.choices[0].logprobs.content.length, whole.usage.completion_tokens);

let streamed = "", usage = null;
const stream = await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(streamed, text);
assert.equal(usage.completion_tokens, whole.usage.completion_tokens);

const leaving = await client.chat.completions.create({ ...asked, max_completion_tokens: 2000, stream: true });
for await (const chunk of leaving) {
  assert.ok(chunk.id);
  leaving.controller.abort();
  break;
}

const schema = {
  type: "object", additionalProperties: false, required: ["name", "km"],
  properties: { name: { type: "string", maxLength: 20 }, km: { type: "integer" } },
};
const shaped = await client.chat.completions.create({
  ...asked, max_completion_tokens: 200,
  response_format: { type: "json_schema", json_schema: { name: "river", strict: true, schema } },
});
assert.deepEqual(Object.keys(JSON.parse(shaped.choices[0].message.content)), ["name", "km"]);

const tools = [{ type: "function", function: { name: "length_of", parameters: schema } }];
const called = await client.chat.completions.create({
  ...asked, max_completion_tokens: 200, tools, tool_choice: "required", parallel_tool_calls: false,
});
const [call] = called.choices[0].message.tool_calls;
assert.equal(call.function.name, "length_of");
const turns = [...messages, called.choices[0].message, { role: "tool", tool_call_id: call.id, content: "1230 km" }];
assert.ok((await client.chat.completions.create({ ...asked, messages: turns })).choices[0].message.content);

const completion = await client.completions.create({ model, prompt: "One, two,", max_tokens: 4, temperature: 0 });
assert.ok(completion.choices[0].text);

await assert.rejects(client.chat.completions.create({ ...asked, temperature: 9 }), (error) => {
  assert.ok(error instanceof OpenAI.BadRequestError);
  assert.equal(error.param, "temperature");
  return true;
});
await assert.rejects(client.chat.completions.create({ ...asked, model: "another" }), OpenAI.NotFoundError);
