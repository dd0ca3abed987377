"use strict";

const make = (tag, attributes = {}, ...children) => {
  const node = Object.assign(document.createElement(tag), attributes);
  node.append(...children);
  return node;
};

// --- tables: a click on a heading sorts by its column, first descending for numbers
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  table.querySelectorAll("thead button").forEach((button, column) => {
    button.addEventListener("click", () => {
      const heading = button.parentElement;
      const first = column === 0 ? "ascending" : "descending";
      const other = first === "ascending" ? "descending" : "ascending";
      const order = heading.getAttribute("aria-sort") === first ? other : first;
      table.querySelectorAll("th[aria-sort]").forEach((th) => th.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", order);
      const value = (row) => row.cells[column].dataset.value;
      const compare = (one, two) => {
        const [a, b] = [value(one), value(two)];
        if (a === "" || b === "") return (a === "") - (b === "");  // what has no value stays last
        const difference = isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b;
        return order === "ascending" ? difference : -difference;
      };
      body.append(...[...body.rows].sort(compare));
    });
  });
}

// --- token view
const views = JSON.parse(document.getElementById("views").textContent);
const answer = document.getElementById("answer");
const panel = document.getElementById("tree");
const unique = (values) => [...new Set(values)];
const choices = {};

function swatch(origin) {
  if (!origin) return "";
  const members = [...Array(31).keys()].filter((bit) => (origin >> bit) & 1);
  return members.length > 1 ? "var(--both)" : `var(--s${members[0] % 4})`;
}

function choose(name, label, values) {
  const old = choices[name] && choices[name].value;
  const select = make("select", { id: `choose-${name}` });
  values.forEach((value) => select.append(make("option", { value, textContent: value })));
  if (values.map(String).includes(old)) select.value = old;
  if (choices[name]) choices[name].replaceWith(select);
  else document.getElementById("choices").append(make("label", { textContent: label }, select));
  choices[name] = select;
  return select;
}

const current = () => views.find((view) => view.row === choices.row.value && view.workload === choices.workload.value
  && String(view.temperature) === choices.temperature.value);

function showCell() {
  choose("question", "Question", current().questions.map((question) => question.id)).onchange = showAnswer;
  const names = current().specialists;
  const entries = names.map((name, index) => [name, `var(--s${index % 4})`]);
  if (names.length > 1) entries.push(["several", "var(--both)"]);
  entries.push(["verifier", "transparent"]);
  document.getElementById("legend").replaceChildren(...entries.map(([name, colour]) => {
    const item = make("span", { textContent: name });
    item.style.setProperty("--swatch", colour);
    return item;
  }));
  showAnswer();
}

function showAnswer() {
  const question = current().questions.find((item) => String(item.id) === choices.question.value);
  answer.replaceChildren();
  question.turns.forEach((turn) => {
    const text = make("span", { className: "turn" });
    answer.append(make("span", { className: "question", textContent: turn.question }), text);
    const spans = turn.pieces.map((piece) => make("span", { className: "token", textContent: piece, tabIndex: -1 }));
    turn.steps.forEach((step) => colour(turn, step, spans));
    text.append(...spans);
    if (turn.cut) text.append(make("em", { className: "note", textContent: " (trees of later steps left out)" }));
  });
  panel.replaceChildren(make("p", { className: "note", textContent: "No step chosen." }));
  const firstToken = answer.querySelector(".token");
  if (firstToken) firstToken.tabIndex = 0;
}

function colour(turn, step, spans) {
  // The token at place p of the answer is the root of a step at position p; the step commits those after it.
  const committed = spans.slice(step.position + 1, step.position + 1 + step.committed);
  const accepted = step.nodes.filter((node) => node.accepted);
  committed.forEach((span, place) => {
    const node = accepted[place];
    if (node) span.style.setProperty("--swatch", swatch(node.origin));
    span.title = node ? "drafted" : "the verifier's own";
    if (place === 0) span.classList.add("start");
    const show = () => {
      answer.querySelectorAll(".same").forEach((other) => other.classList.remove("same"));
      committed.forEach((other) => other.classList.add("same"));
      showTree(turn, step);
    };
    span.addEventListener("mouseenter", show);
    span.addEventListener("focus", show);
    span.addEventListener("click", () => span.focus());
  });
}

function showTree(turn, step) {
  const items = step.nodes.map((node) => {
    const code = make("code", { textContent: node.text });
    if (node.origin) code.style.setProperty("--swatch", swatch(node.origin));
    const item = make("li", { className: node.accepted ? "accepted" : "" }, code);
    if (node.parent !== null) {
      const odds = `${(100 * node.probability).toPrecision(2)}%`;
      item.append(make("span", { className: "odds", textContent: node.accepted ? `${odds}, accepted` : odds }));
    }
    return item;
  });
  step.nodes.forEach((node, place) => {
    if (node.parent === null) return;
    let list = items[node.parent].querySelector(":scope > ul");
    if (!list) items[node.parent].append(list = make("ul"));
    list.append(items[place]);
  });
  const view = current();
  const by = view.routed ? `, drafted by ${view.specialists[step.chosen]}` : "";
  const tokens = step.committed === 1 ? "1 token" : `${step.committed} tokens`;
  panel.replaceChildren(
    make("p", { className: "note", textContent: `Step ${turn.steps.indexOf(step) + 1}: ${tokens} committed${by}` }),
    make("ul", {}, items[0]),
  );
}

answer.addEventListener("keydown", (event) => {
  const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 };
  const tokens = [...answer.querySelectorAll(".token")];
  const place = tokens.indexOf(document.activeElement);
  if (!(event.key in moves) || place < 0) return;
  event.preventDefault();
  const next = tokens[Math.max(0, Math.min(tokens.length - 1, place + moves[event.key]))];
  tokens[place].tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
});

if (views.length) {
  for (const [name, label] of [["row", "Row"], ["workload", "Workload"], ["temperature", "Temperature"]]) {
    choose(name, label, unique(views.map((view) => view[name]))).onchange = showCell;
  }
  showCell();
} else {
  panel.textContent = "No answers are stored.";
}
