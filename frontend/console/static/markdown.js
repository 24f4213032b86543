// A little Markdown as nodes: paragraphs, headings, lists, code, emphasis. Never as markup, and no links or images.

import { make } from "./dom.js";

const FENCE = /^\s*(```+|~~~+)(.*)$/;
const HEADING = /^(#{1,6})\s+(.+)$/;
const BULLET = /^\s*[-*+]\s+(.*)$/;
const NUMBER = /^\s*(\d{1,9})[.)]\s+(.*)$/;
const INLINE = /(`+)(.+?)\1|\*\*(.+?)\*\*|__(.+?)__|\*([^*\s](?:[^*]*[^*\s])?)\*/g;

/** The nodes of a text. What is not closed yet, as while it streams, is shown as far as it goes. */
export function render(text) {
  const nodes = [];
  const lines = text.split("\n");
  for (let at = 0; at < lines.length; ) {
    const fence = FENCE.exec(lines[at]);
    if (fence) {
      const body = [];
      for (at++; at < lines.length && !lines[at].trim().startsWith(fence[1]); at++) body.push(lines[at]);
      at++;
      nodes.push(make("pre", {}, make("code", {}, body.join("\n"))));
    } else if (HEADING.test(lines[at])) {
      nodes.push(make("p", { class: "heading" }, ...inline(HEADING.exec(lines[at++])[2])));
    } else if (BULLET.test(lines[at]) || NUMBER.test(lines[at])) {
      at = list(lines, at, nodes);
    } else if (!lines[at].trim()) {
      at++;
    } else {
      const body = [];
      while (at < lines.length && lines[at].trim() && !begins(lines[at])) body.push(lines[at++]);
      nodes.push(make("p", {}, ...inline(body.join("\n"))));
    }
  }
  return nodes;
}

const begins = (line) => [FENCE, HEADING, BULLET, NUMBER].some((form) => form.test(line));

/** One list, of items that follow each other; returns the line after it. */
function list(lines, at, nodes) {
  const form = BULLET.test(lines[at]) ? BULLET : NUMBER;
  const first = form === NUMBER ? NUMBER.exec(lines[at])[1] : null;
  const items = [];
  while (at < lines.length) {
    const item = form.exec(lines[at]);
    if (item) items.push(item.at(-1));
    else if (lines[at].trim() && items.length && /^\s/.test(lines[at])) items.push(`${items.pop()}\n${lines[at].trim()}`);
    else if (lines[at].trim() || !form.test(lines[at + 1] ?? "")) break;
    at++;
  }
  nodes.push(make(first ? "ol" : "ul", { start: first }, ...items.map((item) => make("li", {}, ...inline(item)))));
  return at;
}

function inline(text) {
  const nodes = [];
  let end = 0;
  for (const found of text.matchAll(INLINE)) {
    nodes.push(text.slice(end, found.index));
    const [whole, , code, strong, strong2, emphasis] = found;
    if (code !== undefined) nodes.push(make("code", {}, code));
    else if (emphasis !== undefined) nodes.push(make("em", {}, emphasis));
    else nodes.push(make("strong", {}, strong ?? strong2));
    end = found.index + whole.length;
  }
  nodes.push(text.slice(end));
  return nodes;
}
