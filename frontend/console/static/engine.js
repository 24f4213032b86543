// The engine's side: numbers, plots, requests and prefixes, from the events of the server.

import { Chart } from "./chart.js";
import { byId, make, setText } from "./dom.js";
import { age, bytes, compact, count, rate, seconds, share } from "./format.js";
import { Table } from "./table.js";

const HISTORY = 300; // samples
const RATE_SECONDS = 4; // over which a request's speed is taken

const used = ({ kv_blocks: kv, kv_unused: unused }) => (kv ? kv.total - kv.free - unused : null);
const hits = (sample, before) => {
  const prompt = sample.prompt_tokens - (before?.prompt_tokens ?? 0);
  return prompt > 0 ? (sample.cached_tokens - (before?.cached_tokens ?? 0)) / prompt : null;
};

const TILES = [
  { title: "Decode", unit: "tok/s", text: ({ rates }) => rate(rates?.decode_tokens) },
  { title: "Prefill", unit: "tok/s", text: ({ rates }) => rate(rates?.prefill_tokens) },
  { title: "TTFT", unit: "p50", text: ({ ttft }) => seconds(ttft?.p50) },
  { title: "ITL", unit: "p50", text: ({ itl }) => seconds(itl?.p50) },
  { title: "Running", unit: "", text: ({ running }) => count(running) },
  { title: "Waiting", unit: "", text: ({ waiting }) => count(waiting) },
  { title: "KV in use", unit: "", text: (sample) => share(used(sample) / sample.kv_blocks?.total) },
  { title: "Cache hits", unit: "", text: (sample, first) => share(hits(sample, first) ?? NaN) },
  { title: "Device busy", unit: "", text: ({ rates }) => share(rates?.device_busy) },
];

const CHARTS = [
  {
    title: "Throughput",
    unit: "tokens/s",
    format: rate,
    series: [
      { name: "decode", color: "blue", value: ({ rates }) => rates?.decode_tokens },
      { name: "prefill", color: "orange", value: ({ rates }) => rates?.prefill_tokens },
    ],
  },
  {
    title: "Requests",
    unit: "count",
    format: count,
    top: () => 4,
    series: [
      { name: "running", color: "blue", value: ({ running }) => running },
      { name: "waiting", color: "orange", value: ({ waiting }) => waiting },
    ],
  },
  {
    title: "Time to first token",
    unit: "last 30 s",
    format: seconds,
    series: [
      { name: "p50", color: "blue", value: ({ ttft }) => ttft?.p50 },
      { name: "p90", color: "orange", value: ({ ttft }) => ttft?.p90 },
    ],
  },
  {
    title: "Inter-token latency",
    unit: "last 30 s",
    format: seconds,
    series: [
      { name: "p50", color: "blue", value: ({ itl }) => itl?.p50 },
      { name: "p90", color: "orange", value: ({ itl }) => itl?.p90 },
    ],
  },
  {
    title: "KV cache",
    unit: "blocks",
    format: compact,
    stacked: true,
    top: (samples) => samples.at(-1)?.kv_blocks?.total ?? 0,
    series: [
      { name: "private", color: "orange", value: ({ kv_blocks: kv }) => kv && kv.private + kv.in_transit },
      { name: "cached, in use", color: "purple", value: ({ kv_blocks: kv, kv_unused: unused }) => kv && kv.cached - unused },
      { name: "cached, unused", color: "blue", value: ({ kv_blocks: kv, kv_unused: unused }) => kv && unused },
      { name: "free", color: "gray", value: ({ kv_blocks: kv }) => kv?.free },
    ],
  },
  {
    title: "Device busy",
    unit: "share of time",
    format: share,
    top: () => 1,
    series: [{ name: "busy", color: "green", value: ({ rates }) => rates?.device_busy }],
  },
];

const HOST_CHART = {
  title: "Host tier",
  unit: "blocks",
  format: compact,
  stacked: true,
  top: (samples) => samples.at(-1)?.host_blocks?.total ?? 0,
  series: [
    { name: "used", color: "purple", value: ({ host_blocks: host }) => host?.used },
    { name: "free", color: "gray", value: ({ host_blocks: host }) => host && host.total - host.used },
  ],
};

const REQUESTS = [
  { title: "Request", class: "id", text: ({ id }) => id },
  { title: "Tenant", class: "id short", hint: "of the API key's digest", text: ({ tenant }) => tenant ?? "-" },
  { title: "State", class: "state", text: ({ state }) => state, state: ({ state }) => state },
  { title: "Prompt", class: "number", hint: "tokens", text: ({ prompt_tokens: tokens }) => count(tokens) },
  { title: "Cached", class: "number", hint: "tokens of the prompt", text: (row) => (row.state === "waiting" ? "–" : count(row.cached_tokens)) },
  { title: "Generated", class: "number", hint: "tokens", text: ({ generated_tokens: tokens }) => count(tokens) },
  { title: "tok/s", class: "number", text: ({ speed }) => (speed == null ? "–" : speed.toFixed(1)) },
  { title: "Age", class: "number", text: ({ age_seconds: value }) => age(value) },
];

const PREFIXES = [
  { title: "Node", class: "id short", hint: "keyed digest of its first block, another at each start", text: ({ digest }) => digest },
  { title: "Tenant", class: "id short", text: ({ tenant }) => tenant ?? "-" },
  { title: "Tokens", class: "number gauge", hint: "held by this node", text: ({ tokens }) => count(tokens), share: ({ part }) => part },
  { title: "Blocks", class: "number", text: ({ blocks }) => count(blocks) },
  { title: "Ends at", class: "number", hint: "tokens from the start of the prompt", text: ({ end }) => count(end) },
  { title: "Branches", class: "number", hint: "nodes that continue it", text: ({ children }) => count(children) },
  { title: "In use by", class: "number", hint: "running requests", text: ({ users }) => count(users) },
  { title: "Uses", class: "number", hint: "so far", text: ({ uses }) => count(uses) },
  { title: "Last use", class: "number", text: (row) => (row.users ? "now" : age(row.idle_seconds)) },
  { title: "Tier", class: "state", text: ({ tier }) => tier, state: ({ tier }) => tier },
];

export class Dashboard {
  constructor() {
    this.samples = [];
    this.progress = new Map(); // of each request: [time, generated] of the last seconds
    this.tiles = TILES.map(({ title, unit }) => {
      const value = make("b", {}, "–");
      byId("tiles").append(make("div", { class: "tile" }, make("span", {}, title, make("small", {}, ` ${unit}`)), value));
      return value;
    });
    this.charts = [];
    CHARTS.forEach((options) => this.addChart(options));
    this.requests = new Table(byId("requests"), REQUESTS, "No requests.");
    this.prefixes = new Table(byId("prefixes"), PREFIXES, "Nothing is cached.");
  }

  addChart(options) {
    const chart = new Chart(options);
    this.charts.push(chart);
    byId("charts").append(chart.element);
  }

  setEngine(engine) {
    this.facts = [
      ["Model", engine.names.join(", ")],
      ["Parameters", compact(engine.parameters)],
      ["Context", `${count(engine.context_length)} tokens`],
      ["Device", engine.ranks > 1 ? `${engine.ranks} × ${engine.device}` : engine.device],
      ["Threads", engine.threads === null ? "–" : engine.ranks > 1 ? `${engine.threads} a rank` : `${engine.threads}`],
      ["Kernels", engine.kernels],
      ["Activations", engine.dtype],
      ["KV cache", `${engine.kv_dtype}, ${bytes(engine.kv_bytes)}${engine.ranks > 1 ? " a rank" : ""}`],
      ["Block", `${engine.block_size} tokens`],
      ["Quantized weights", engine.quantization === "none" ? "dequantized" : "as in the file"],
      ["Policy", engine.policy],
      ["Most running", count(engine.max_seqs)],
      ["Most tokens a step", count(engine.max_step_tokens)],
    ];
  }

  setHistory(samples) {
    this.samples = samples;
  }

  take({ sample, requests, prefixes, prefix_nodes: nodes }) {
    this.samples.push(sample);
    if (this.samples.length > HISTORY) this.samples.shift();
    if (sample.host_blocks?.total && this.charts.length === CHARTS.length) this.addChart(HOST_CHART);
    const first = this.samples.find(({ prompt_tokens: tokens }) => tokens != null);
    const counting = first && first.prompt_tokens <= sample.prompt_tokens ? first : null;
    TILES.forEach(({ text }, at) => setText(this.tiles[at], text(sample, counting)));
    this.charts.forEach((chart) => chart.update(this.samples));
    this.showRequests(sample, requests);
    const largest = prefixes[0]?.tokens ?? 1;
    this.prefixes.update(keyed(prefixes, (row) => `${row.digest} ${row.tenant} ${row.end}`).map((row) => ({ ...row, part: row.tokens / largest })));
    setText(byId("prefixes-note"), nodes ? `${count(prefixes.length)} of ${count(nodes)} nodes; no text is shown` : "");
    this.showFacts(sample);
  }

  showRequests(sample, requests) {
    const rows = keyed(requests, ({ id }) => id);
    const before = this.progress;
    this.progress = new Map();
    for (const row of rows) {
      const points = (before.get(row.rowKey) ?? []).filter(([time]) => time >= sample.time - RATE_SECONDS - 0.5);
      points.push([sample.time, row.generated_tokens]);
      this.progress.set(row.rowKey, points);
      const [time, tokens] = points[0];
      row.speed = sample.time - time > 0.5 && row.state === "decode" ? (row.generated_tokens - tokens) / (sample.time - time) : null;
    }
    this.requests.update(rows);
    const all = (sample.running ?? 0) + (sample.waiting ?? 0);
    setText(byId("requests-note"), all > rows.length ? `${rows.length} of ${count(all)}` : "");
  }

  showFacts(sample) {
    const facts = [
      ...(this.facts ?? []),
      ["Steps", count(sample.step)],
      ["Requests finished", count(sample.finished)],
      ["Tokens generated", count(sample.generated_tokens)],
      ["Preemptions", count(sample.preemptions)],
      ["Recoveries", count(sample.recoveries)],
    ];
    const list = byId("facts");
    if (list.children.length !== facts.length) {
      list.replaceChildren(...facts.map(([name]) => make("div", {}, make("dt", {}, name), make("dd", {}))));
    }
    facts.forEach(([, value], at) => setText(list.children[at].lastChild, value));
  }
}

/** Rows with a `rowKey` of their own, even where several share a name. */
function keyed(rows, nameOf) {
  const seen = new Map();
  return rows.map((row) => {
    const name = nameOf(row);
    const number = (seen.get(name) ?? 0) + 1;
    seen.set(name, number);
    return { ...row, rowKey: `${name} ${number}` };
  });
}
