// The chat: one conversation, streamed. Text from the model only ever becomes text nodes.
const $ = (id) => document.getElementById(id);
let messages = []; // {role, content}; another list for each chat, so that an answer cannot end in the next one
let running = null; // AbortController of the open answer

function bubble(role, text) {
  const item = document.createElement("li");
  item.className = role;
  const body = document.createElement("span");
  body.textContent = text;
  item.append(body);
  $("messages").append(item);
  $("hint").hidden = true;
  follow(true);
  return item;
}

function note(item, text) {
  const line = document.createElement("span");
  line.className = "note";
  line.textContent = text;
  item.append(line);
}

// What the model thinks before it answers, above the answer.
function think(item, text) {
  let thought = item.querySelector(".thought");
  if (!thought) {
    thought = document.createElement("span");
    thought.className = "thought";
    item.prepend(thought);
  }
  thought.textContent += text;
  follow(false);
}

// Scroll along, unless the reader has scrolled up.
function follow(always) {
  const list = $("messages");
  const near = list.scrollHeight - list.scrollTop - list.clientHeight < 80;
  if (always || near) list.scrollTop = list.scrollHeight;
}

function sampling() {
  const values = {};
  for (const input of $("sampling").elements) {
    if (input.value === "" || !input.checkValidity()) continue;
    values[input.name] = input.type === "number" ? Number(input.value) : input.value;
  }
  return values;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function answer() {
  const chat = messages;
  const system = $("system").value.trim();
  const sent = system ? [{ role: "system", content: system }, ...messages] : messages;
  const body = { messages: sent, stream: true, stream_options: { include_usage: true }, ...sampling() };
  const item = bubble("assistant", "");
  const shown = item.firstChild;
  item.classList.add("busy");
  const controller = running = new AbortController();
  buttons();
  const begun = performance.now();
  let first = 0, text = "", usage = null, reason = null;
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST", headers: { "content-type": "application/json" },
      body: JSON.stringify(body), signal: controller.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const choice = event.choices[0];
      if (!choice) continue;
      reason = choice.finish_reason ?? reason;
      if (choice.delta.reasoning_content) think(item, choice.delta.reasoning_content);
      if (!choice.delta.content) continue;
      first ||= performance.now();
      text += choice.delta.content;
      shown.textContent = text;
      follow(false);
    }
  } catch (error) {
    if (error.name === "AbortError") reason = "stopped";
    else { item.classList.add("error"); note(item, error.message); }
  }
  item.classList.remove("busy");
  if (running === controller) running = null;
  if (text) chat.push({ role: "assistant", content: text });
  const facts = [];
  if (first) facts.push(`first token ${Math.round(first - begun)} ms`);
  if (usage && first && usage.completion_tokens > 1) {
    const rate = (usage.completion_tokens - 1) / ((performance.now() - first) / 1000);
    facts.push(`${usage.completion_tokens} tokens`, `${rate.toFixed(0)} tokens/s`);
  }
  if (reason === "length") facts.push("cut at the most tokens");
  if (reason === "stopped") facts.push("stopped");
  if (facts.length) note(item, facts.join(" · "));
  follow(false);
  buttons();
}

function buttons() {
  $("send").disabled = running !== null;
  $("stop").disabled = running === null;
  $("again").disabled = running !== null || messages.length === 0;
}

function send() {
  const text = $("input").value.trim();
  if (!text || running) return;
  $("input").value = "";
  messages.push({ role: "user", content: text });
  bubble("user", text);
  answer();
}

function again() {
  if (running || !messages.length) return;
  if (messages.at(-1).role === "assistant") messages.pop();
  while ($("messages").lastChild?.className !== "user") $("messages").lastChild.remove();
  answer();
}

$("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
$("stop").addEventListener("click", () => running?.abort());
$("again").addEventListener("click", again);
$("clear").addEventListener("click", () => {
  running?.abort();
  running = null;
  messages = [];
  $("messages").replaceChildren();
  $("hint").hidden = false;
  buttons();
  $("input").focus();
});
$("sampling").addEventListener("submit", (event) => event.preventDefault());

fetch("/v1/models").then((response) => response.json()).then((list) => {
  const card = list.data[0];
  const most = $("sampling").elements.max_tokens;
  most.value = Math.min(Number(most.value), Math.floor(card.max_model_len / 2));
  $("model").textContent = `${card.id} · ${card.max_model_len} tokens of context`;
  document.title = `${card.id} · Pagemill`;
});
