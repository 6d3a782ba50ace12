// The live view: /metrics once a second while the page is visible; rates are differences of counters.
const $ = (id) => document.getElementById(id);
const PERIOD_MS = 1000, KEPT = 120;
const rates = [];
let last = null;

// Prometheus text -> {name: total over label sets}, and buckets -> {name: Map(bound -> cumulative count)}
function read(text) {
  const values = {}, buckets = {};
  for (const line of text.split("\n")) {
    const match = /^([\w:]+)(?:\{(.*)\})? (\S+)/.exec(line);
    if (!match || line.startsWith("#")) continue;
    const [, name, labels = "", shown] = match;
    const bound = /(?:^|,)le="([^"]*)"/.exec(labels);
    if (bound) {
      const of = (buckets[name.replace(/_bucket$/, "")] ??= new Map());
      const key = bound[1] === "+Inf" ? Infinity : Number(bound[1]);
      of.set(key, (of.get(key) ?? 0) + Number(shown));
    } else values[name] = (values[name] ?? 0) + Number(shown);
  }
  return { values, buckets, at: performance.now() };
}

const rate = (now, before, name) =>
  Math.max(0, ((now.values[name] ?? 0) - (before.values[name] ?? 0)) / ((now.at - before.at) / 1000));

// Median of what was observed since the server started, by linear interpolation within its bucket; seconds.
function median(buckets) {
  if (!buckets) return null;
  const bounds = [...buckets.keys()].sort((a, b) => a - b);
  const total = buckets.get(Infinity) ?? 0;
  if (!total) return null;
  let low = 0, below = 0;
  for (const bound of bounds) {
    const upTo = buckets.get(bound);
    if (upTo >= total / 2) return bound === Infinity ? low : low + (bound - low) * ((total / 2 - below) / (upTo - below));
    low = bound;
    below = upTo;
  }
  return low;
}

const whole = (value) => (value === undefined ? "–" : Math.round(value).toLocaleString());
const time = (seconds) =>
  seconds === null ? "–" : seconds < 1 ? `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms` : `${seconds.toFixed(2)} s`;

function show(now) {
  const { values, buckets } = now;
  $("running").textContent = whole(values["vllm:num_requests_running"]);
  $("waiting").textContent = whole(values["vllm:num_requests_waiting"]);
  $("preemptions").textContent = whole(values["vllm:num_preemptions_total"]);
  $("first-token").textContent = time(median(buckets["vllm:time_to_first_token_seconds"]));
  $("next-token").textContent = time(median(buckets["vllm:inter_token_latency_seconds"]));
  const queries = values["vllm:prefix_cache_queries_total"] ?? 0;
  const hits = values["vllm:prefix_cache_hits_total"] ?? 0;
  $("prefix-hits").textContent = queries ? `${Math.round((100 * hits) / queries)} %` : "–";
  const used = values["vllm:kv_cache_usage_perc"] ?? 0;
  $("kv").textContent = `${(100 * used).toFixed(1)} %`;
  if (!last) return;
  const output = rate(now, last, "vllm:generation_tokens_total");
  $("output-rate").textContent = whole(output);
  $("prompt-rate").textContent = whole(rate(now, last, "vllm:prompt_tokens_total"));
  rates.push(output);
  if (rates.length > KEPT) rates.shift();
  draw();
}

function draw() {
  const canvas = $("rates"), scale = devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const style = getComputedStyle(canvas), most = Math.max(10, ...rates);
  const x = (index) => width - ((rates.length - 1 - index) * width) / (KEPT - 1);
  const y = (value) => height - 2 - (value / most) * (height - 16);
  pen.strokeStyle = getComputedStyle($("send")).backgroundColor;
  pen.lineWidth = 1.5;
  pen.beginPath();
  rates.forEach((value, index) => (index ? pen.lineTo(x(index), y(value)) : pen.moveTo(x(index), y(value))));
  pen.stroke();
  pen.fillStyle = style.color;
  pen.font = "11px system-ui, sans-serif";
  pen.fillText(`most ${Math.round(most)}`, 2, 11);
}

function badge(text, kind) {
  $("health").textContent = text;
  $("health").className = `badge ${kind}`;
}

async function poll() {
  if (!document.hidden) {
    try {
      const [health, metrics] = await Promise.all([fetch("/health"), fetch("/metrics")]);
      if (health.ok) badge("ready", "ok");
      else badge((await health.json()).error.message, "bad");
      if (metrics.ok) {
        const now = read(await metrics.text());
        show(now);
        last = now;
      }
    } catch {
      badge("no connection", "bad");
    }
  } else last = null;
  setTimeout(poll, PERIOD_MS);
}
poll();
