// The browser of judgements: filters, a list in pages, and one judgement in detail.
// What was judged is untrusted. It reaches the page as text nodes only: nothing here parses markup, sets an address or
// a handler from data, and attributes other than those that this script names are never set.
"use strict";

const PAGE = 50;
const data = JSON.parse(document.getElementById("judgement-data").textContent);
const $ = (id) => document.getElementById(id);
const browser = $("browser");
const form = $("filters");
const detail = $("detail");
const OTHER = { A: "B", B: "A" };

const key = (j) => `${j.run} ${j.pair} ${j.order} ${j.sample}`;
const byKey = new Map(data.judgements.map((judgement) => [key(judgement), judgement]));
const sampled = data.judgements.some((judgement) => judgement.sample);
const twinOf = (j) => byKey.get(key({ ...j, order: j.order === "AB" ? "BA" : "AB" }));

let found = data.judgements; // those that pass the filters
let page = 0;
let current = null; // the judgement in detail
let showReply = false;
let marker = null; // what was searched for, as a pattern to mark

// ------------------------------------------------------------------------------------------------ building the page

/** An element with a class, attributes and children; a string becomes a text node. */
function el(tag, className, children = [], attributes = {}) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...[children].flat().filter((child) => child !== null));
  return element;
}

const chip = (text, kind = "") => el("span", `chip ${kind}`, text);
const button = (text, action, attributes = {}) => {
  const element = el("button", "", text, { type: "button", ...attributes });
  element.addEventListener("click", action);
  return element;
};

/** Text as it was written, with what was searched for marked. */
function marked(content) {
  if (!marker) return [content];
  return content.split(marker).map((part, i) => (i % 2 ? el("mark", "", part) : part));
}

const text = (content) => el("div", "text", marked(content), { dir: "auto" });

function argumentList(items) {
  return el("ul", "arguments", items.map((item) =>
    el("li", item.match ? "matched" : "", [
      item.match ? el("b", "number", String(item.match), { "aria-label": `match ${item.match}` }) : null,
      ...marked(item.text),
    ], { dir: "auto" })));
}

// --------------------------------------------------------------------------------------------- facts of a judgement

const labelOf = (j) => {
  const label = data.pairs[j.pair].label;
  return j.order === "AB" ? label : OTHER[label] ?? label;
};
const outcome = (j) => (j.tags.includes("right") ? "right" : j.tags.includes("wrong") ? "wrong" : "none");

function chips(j) {
  return [
    chip(`judge ${j.verdict ?? "no verdict"} / human ${labelOf(j) ?? "no label"}`, outcome(j)),
    ...Object.keys(data.flags).filter((tag) => j.tags.includes(tag)).map((tag) => chip(data.flags[tag], "flag")),
  ];
}

function place(j) {
  const parts = [j.order, data.pairs[j.pair].subset];
  if (sampled) parts.push(`sample ${j.sample}`);
  if (data.runs.length > 1) parts.push(data.runs[j.run]);
  return parts.filter(Boolean).join(" · ");
}

// ------------------------------------------------------------------------------------------------- filter and search

const escaped = (word) => word.replace(/[.*+?^${}()|[\]\\\/-]/g, "\\$&");

function texts(pair) {
  return [pair.id, pair.subset, ...pair.context.flat(), ...pair.responses,
    ...Object.values(pair.humans).flat(2).map((argument) => argument.text)];
}

const ownTexts = (j) => [j.reply, j.critique ?? "", ...(j.generated ?? []).map((argument) => argument.text)];

/** A test of judgements: every word stands in the pair or in what the judge wrote; each pair is read but once. */
function textTest(words) {
  const patterns = words.map((word) => new RegExp(escaped(word), "i"));
  const inPair = new Map();
  return (j) => {
    if (!inPair.has(j.pair)) {
      const all = texts(data.pairs[j.pair]);
      inPair.set(j.pair, patterns.map((pattern) => all.some((part) => pattern.test(part))));
    }
    const hits = inPair.get(j.pair);
    return patterns.every((pattern, i) => hits[i] || ownTexts(j).some((part) => pattern.test(part)));
  };
}

function filter() {
  const values = new FormData(form);
  const outcomeTag = values.get("outcome");
  const flags = values.getAll("flag");
  const run = values.get("run");
  const subset = values.get("subset") ? data.subsets[values.get("subset")] : null;
  const words = values.get("text").split(/\s+/).filter(Boolean);
  const hasWords = words.length ? textTest(words) : () => true;
  marker = words.length ? new RegExp(`(${words.map(escaped).join("|")})`, "i") : null;
  found = data.judgements.filter((j) =>
    (!outcomeTag || j.tags.includes(outcomeTag))
    && flags.every((tag) => j.tags.includes(tag))
    && (!run || j.run === Number(run))
    && (subset === null || data.pairs[j.pair].subset === subset)
    && hasWords(j));
  page = 0;
  if (!found.includes(current)) {
    current = found[0] ?? null;
    browser.classList.remove("reading");
  }
  drawList();
  drawDetail();
}

// -------------------------------------------------------------------------------------------------------------- list

const pages = () => Math.max(1, Math.ceil(found.length / PAGE));

function drawList() {
  const start = page * PAGE;
  const shown = found.slice(start, start + PAGE);
  $("rows").start = start + 1;
  $("rows").replaceChildren(...shown.map((j) => {
    const row = button([
      el("span", "id", data.pairs[j.pair].id, { dir: "auto" }),
      el("span", "dim", place(j)),
      el("span", "chips", chips(j)),
    ], () => open(j, true), { class: "row" });
    if (j === current) row.setAttribute("aria-current", "true");
    return el("li", "", row);
  }));
  const range = found.length ? `${start + 1}–${start + shown.length} of ${found.length}` : "nothing found";
  $("count").textContent = found.length === data.judgements.length ? range : `${range} (${data.judgements.length} in all)`;
  $("previous-page").disabled = page === 0;
  $("next-page").disabled = page >= pages() - 1;
}

function turn(step) {
  page = Math.min(Math.max(page + step, 0), pages() - 1);
  drawList();
  $("rows").scrollTop = 0;
}

function row(j) {
  const index = found.indexOf(j) - page * PAGE;
  return index >= 0 && index < PAGE ? $("rows").children[index].firstChild : null;
}

// ------------------------------------------------------------------------------------------------------------ detail

function panel(j, shown) {
  const pair = data.pairs[j.pair];
  const humans = j.reference ? [j.reference] : pair.humans[j.order] ?? [];
  const note = j.order === shown ? "as shown above" : "responses A and B in each other's place";
  const reply = el("details", "reply", [el("summary", "", "Reply as written"), text(j.reply)]);
  reply.open = showReply;
  return el("section", "panel", [
    el("h4", "", [`Order ${j.order}: ${note} `, ...chips(j)]),
    el("dl", "facts", j.facts.map(([name, value]) => el("div", "", [el("dt", "", name), el("dd", "", value)]))),
    el("div", "columns", [
      el("div", "", [
        el("h5", "", "The judge's critique"),
        j.generated ? argumentList(j.generated) : j.critique ? text(j.critique) : el("p", "dim", "(none)"),
      ]),
      el("div", "", [
        el("h5", "", humans.length > 1 ? "The humans' critiques" : "The human's critique"),
        ...(humans.length ? humans.map(argumentList) : [el("p", "dim", "(none)")]),
      ]),
    ]),
    reply,
  ]);
}

function drawDetail() {
  const j = current;
  if (!j) return detail.replaceChildren();
  const pair = data.pairs[j.pair];
  const twin = twinOf(j);
  const position = found.indexOf(j);
  const first = j.order === "AB" ? 0 : 1;
  const better = labelOf(j);
  const response = (name, content) => el("div", "", [
    el("h4", "", [`Response ${name} `, better === name ? chip("better", "right") : null]), text(content)]);
  const all = data.judgements.filter((other) => data.pairs[other.pair].id === pair.id);
  const title = el("h3", "id", pair.id, { tabindex: "-1", dir: "auto" });
  detail.replaceChildren(
    el("div", "tools", [
      button("‹ List", close, { class: "back" }),
      button("Previous", () => step(-1), position > 0 ? {} : { disabled: "" }),
      button("Next", () => step(1), position < found.length - 1 ? {} : { disabled: "" }),
      twin ? button("Other order", exchange) : null,
    ]),
    title,
    el("p", "dim", place(j)),
    better === "tie" ? el("p", "", chip("humans call it a tie")) : "",
    ...pair.context.flatMap(([role, content]) => [el("h4", "", role), text(content)]),
    el("div", "columns", [response("A", pair.responses[first]), response("B", pair.responses[1 - first])]),
    panel(j, j.order),
    twin ? panel(twin, j.order) : "",
    all.length > (twin ? 2 : 1) ? el("section", "siblings", [
      el("h4", "", "All judgements on this pair"),
      el("div", "chips", all.map((other) => button(
        `${place(other)}: ${other.verdict ?? "no verdict"}`,
        () => open(other, true),
        { class: `chip ${outcome(other)}`, ...(other === j ? { "aria-current": "true" } : {}) },
      ))),
    ]) : "",
  );
  return title;
}

function open(j, focus) {
  const before = row(current);
  if (before) before.removeAttribute("aria-current");
  current = j;
  browser.classList.add("reading");
  const title = drawDetail();
  const index = found.indexOf(j);
  if (index >= 0 && Math.floor(index / PAGE) !== page) {
    page = Math.floor(index / PAGE);
    drawList();
  }
  const now = row(j);
  if (now) {
    now.setAttribute("aria-current", "true");
    now.scrollIntoView({ block: "nearest" });
  }
  if (focus) title.focus({ preventScroll: true });
  const top = detail.getBoundingClientRect().top;
  if (top < 0 || top > innerHeight / 2) detail.scrollIntoView({ block: "start" });
}

function close() {
  const j = current;
  if (!j) return false;
  browser.classList.remove("reading");
  (row(j) ?? $("rows").querySelector("button") ?? form.elements.text).focus();
  return true;
}

function step(by) {
  const index = found.indexOf(current) + by;
  if (found[index]) open(found[index], true);
}

function exchange() {
  const twin = current && twinOf(current);
  if (twin) open(twin, true);
}

function toggleReply() {
  showReply = !showReply;
  for (const reply of detail.querySelectorAll(".reply")) reply.open = showReply;
}

function moveFocus(by) {
  const rows = Array.from($("rows").querySelectorAll("button"));
  const index = rows.indexOf(document.activeElement);
  if (index < 0) return false;
  rows[Math.min(Math.max(index + by, 0), rows.length - 1)].focus();
  return true;
}

// -------------------------------------------------------------------------------------------------------------- keys

const KEYS = {
  j: () => step(1),
  k: () => step(-1),
  o: exchange,
  r: toggleReply,
  n: () => turn(1),
  p: () => turn(-1),
  "/": () => form.elements.text.focus(),
  Escape: close,
  ArrowDown: () => moveFocus(1),
  ArrowUp: () => moveFocus(-1),
};

// Single letters act only while the focus is in the browser (WCAG 2.1.4) and not where one types.
browser.addEventListener("keydown", (event) => {
  const typing = event.target.matches("select, input[type=search]");
  if (event.ctrlKey || event.metaKey || event.altKey || (typing && event.key !== "Escape")) return;
  const action = KEYS[event.key];
  if (action && action() !== false) event.preventDefault();
});

let pending = 0;
form.addEventListener("input", (event) => {
  clearTimeout(pending);
  pending = setTimeout(filter, event.target.name === "text" ? 150 : 0);
});
form.addEventListener("submit", (event) => event.preventDefault());
$("previous-page").addEventListener("click", () => turn(-1));
$("next-page").addEventListener("click", () => turn(1));

/** How many judgements each choice would leave of all. */
for (const input of form.querySelectorAll("fieldset input")) {
  const n = input.value ? data.judgements.filter((j) => j.tags.includes(input.value)).length : data.judgements.length;
  input.nextElementSibling.append(" ", el("small", "", String(n)));
}

browser.hidden = false;
filter();
