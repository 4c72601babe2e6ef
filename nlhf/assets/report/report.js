// Filters of the judgements: by tag, by run, by text. Cards are written by the server side; this only hides them.
"use strict";
const form = document.getElementById("filters");
const cards = Array.from(document.querySelectorAll(".card"), (element) => ({
  element,
  tags: element.dataset.tags.split(" "),
  run: element.dataset.run,
  text: null,
}));

function matches(card, tag, run, words) {
  if (tag && !card.tags.includes(tag)) return false;
  if (run && card.run !== run) return false;
  if (!words.length) return true;
  card.text ??= card.element.textContent.toLowerCase();
  return words.every((word) => card.text.includes(word));
}

function apply() {
  const values = new FormData(form);
  const words = values.get("text").toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const card of cards) {
    const visible = matches(card, values.get("tag"), values.get("run"), words);
    card.element.hidden = !visible;
    shown += visible;
  }
  document.getElementById("count").textContent = `${shown} of ${cards.length}`;
}

form.addEventListener("input", apply);
form.addEventListener("submit", (event) => event.preventDefault());
apply();
