// The conversation: what was said, the answer that streams in, and what it took.

import { ApiError, call, events } from "./api.js";
import { byId, make } from "./dom.js";
import { count, seconds } from "./format.js";
import { render } from "./markdown.js";

const log = byId("log");
const question = byId("question");

let turns = []; // {role, content}
let running = null; // AbortController of the answer under way
let modelName = "";

export function setModel(name) {
  modelName = name;
}

export function start(onUnauthorized) {
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = question.value.trim();
    if (!text || running) return;
    question.value = "";
    send(text, onUnauthorized);
  });
  question.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      byId("composer").requestSubmit();
    }
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("new-chat").addEventListener("click", () => {
    running?.abort();
    turns = [];
    log.replaceChildren(byId("empty") ?? make("p", { class: "empty", id: "empty" }, "A new chat."));
    question.focus();
  });
}

function body() {
  const system = byId("system").value.trim();
  const request = {
    model: modelName,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...turns],
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const [id, name] of [["temperature", "temperature"], ["max-tokens", "max_tokens"], ["seed", "seed"]]) {
    const value = byId(id).value;
    if (value !== "") request[name] = Number(value);
  }
  return JSON.stringify(request);
}

async function send(text, onUnauthorized) {
  byId("empty")?.remove();
  turns.push({ role: "user", content: text });
  show("user", "You").body.textContent = text;
  const conversation = turns;
  const answer = show("assistant", "Model");
  const controller = (running = new AbortController());
  setBusy(true);
  answer.body.append(make("span", { class: "wait", "aria-label": "waiting" }));
  const result = { content: "", reasoning: "", finish: "", usage: null, first: null, last: null };
  const started = performance.now();
  const draw = throttled(() => drawAnswer(answer, result));
  try {
    const response = await call("/v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: body(),
      signal: controller.signal,
    });
    for await (const { data } of events(response)) {
      if (data === "[DONE]") break;
      take(JSON.parse(data), result);
      draw();
    }
  } catch (error) {
    if (error.name === "AbortError") {
      result.finish = "stopped";
    } else {
      if (error.status === 401) onUnauthorized(error.message);
      answer.root.append(make("p", { class: "error", role: "alert" }, error.message));
    }
  }
  draw.now();
  if (running === controller) running = null;
  if (turns === conversation) {
    // An answer that never began would only confuse the model.
    if (result.content) turns.push({ role: "assistant", content: result.content });
    else turns.pop();
  }
  if (!result.content && !result.reasoning) answer.body.replaceChildren();
  answer.root.append(make("p", { class: "stats" }, ...statistics(result, started)));
  scroll(true);
  if (!running) setBusy(false);
}

function take(chunk, result) {
  if (chunk.error) throw new ApiError(500, chunk.error.message);
  if (chunk.usage) result.usage = chunk.usage;
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const content = choice.delta?.content ?? "";
  const reasoning = choice.delta?.reasoning_content ?? choice.delta?.reasoning ?? "";
  if (content || reasoning) {
    result.last = performance.now();
    result.first ??= result.last;
  }
  result.content += content;
  result.reasoning += reasoning;
  if (choice.finish_reason) result.finish = choice.finish_reason;
}

function drawAnswer(answer, result) {
  if (!result.content && !result.reasoning) return;
  const stick = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  const nodes = render(result.content);
  if (result.reasoning) nodes.unshift(make("blockquote", {}, ...render(result.reasoning)));
  answer.body.replaceChildren(...nodes);
  scroll(stick);
}

/** What an answer took, as small labelled numbers. */
function statistics({ usage, first, last, finish }, started) {
  const parts = [];
  const add = (label, value) => parts.push(make("span", {}, `${label} `, make("b", {}, value)));
  if (first !== null) add("TTFT", seconds((first - started) / 1e3));
  if (usage) {
    const tokens = usage.completion_tokens;
    if (tokens > 1 && last > first) add("speed", `${(((tokens - 1) / (last - first)) * 1e3).toFixed(1)} tok/s`);
    add("generated", count(tokens));
    add("prompt", count(usage.prompt_tokens));
    add("cached", count(usage.prompt_tokens_details?.cached_tokens ?? 0));
  }
  if (finish) add("end", finish);
  return parts;
}

function show(kind, name) {
  const text = make("div", { class: "text" });
  const root = make("article", { class: `turn ${kind}`, "aria-label": name }, make("h3", {}, name), text);
  log.append(root);
  scroll(true);
  return { root, body: text };
}

function scroll(stick) {
  if (stick) log.scrollTop = log.scrollHeight;
}

function setBusy(busy) {
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
  log.setAttribute("aria-busy", busy);
  if (!busy) question.focus();
}

/** `action` at most once a frame; `now` does it at once, and is the last one. */
function throttled(action) {
  let frame = 0;
  const request = () => {
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      action();
    });
  };
  request.now = () => {
    cancelAnimationFrame(frame);
    action();
  };
  return request;
}
