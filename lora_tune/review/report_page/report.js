"use strict";
// Sorting and filtering of the table, and what links it to the figures: pointing shows a trial everywhere, selecting
// compares it with others. Which trials are compared stands in the page's address. The page says the same without it.
(() => {
  const MOST = 6; // as many as there are colours
  const table = document.getElementById("table");
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells].slice(0, -1);
  const sort = document.getElementById("sort");
  const shown = new Map(); // trial -> its elements, the row first
  for (const element of document.querySelectorAll("#table [data-t], .chart [data-t]")) {
    if (!shown.has(element.dataset.t)) shown.set(element.dataset.t, []);
    shown.get(element.dataset.t).push(element);
  }
  const rowOf = new Map([...body.rows].map((row) => [row.dataset.t, row]));

  // The table.
  const value = (row, i) => {
    const cell = row.cells[i];
    const text = cell.dataset.v ?? cell.textContent.trim();
    const number = Number(text);
    return text === "" ? null : Number.isNaN(number) ? text : number;
  };
  const compare = (a, b) => {
    if (a === null || b === null) return a === b ? 0 : a === null ? 1 : -1; // what is unknown comes last
    if (typeof a === "number" && typeof b === "number") return a - b;
    return String(a).localeCompare(String(b), "en", { numeric: true });
  };
  const sortBy = (i, down) => {
    heads.forEach((head) => head.removeAttribute("aria-sort"));
    heads[i].setAttribute("aria-sort", down ? "descending" : "ascending");
    sort.value = i;
    const rows = [...body.rows].map((row) => [value(row, i), row]);
    rows.sort(([a], [b]) => (down && a !== null && b !== null ? -compare(a, b) : compare(a, b)));
    body.append(...rows.map(([, row]) => row));
  };
  heads.forEach((head, i) => head.addEventListener("click", () => sortBy(i, head.getAttribute("aria-sort") === "ascending")));
  sort.addEventListener("change", () => sortBy(Number(sort.value), false));
  document.getElementById("filter").addEventListener("change", (event) => {
    const wanted = event.target.value;
    for (const row of body.rows) row.hidden = wanted !== "" && row.dataset.state !== wanted;
  });

  // Pointing.
  const tip = document.getElementById("tip");
  const said = new Map();
  for (const title of document.querySelectorAll(".chart [data-t] > title")) {
    said.set(title.parentNode, title.textContent);
    title.remove(); // the browser's own hint would stand beside ours
  }
  const texts = (trial) => [...rowOf.get(trial).cells].slice(1, -1).map((cell, i) => [heads[i + 1].textContent, cell.textContent]);
  const words = (element) => {
    const known = texts(element.dataset.t).filter(([, text]) => text !== "").map(([head, text]) => `${head} ${text}`);
    return [`Trial ${element.dataset.t}`, said.get(element), ...known].filter(Boolean).join("\n");
  };
  const AROUND = [[0, 0], [0, 3], [0, -3], [3, 0], [-3, 0], [0, 6], [0, -6], [6, 0], [-6, 0]]; // thin lines are hard to hit
  const at = (event) => {
    const inside = event.target.closest?.("svg.chart");
    for (const [dx, dy] of inside ? AROUND : AROUND.slice(0, 1)) {
      const found = document.elementFromPoint(event.clientX + dx, event.clientY + dy)?.closest("[data-t]");
      if (found && shown.has(found.dataset.t)) return found;
    }
    return null;
  };
  let hot = null;
  const point = (element, event) => {
    const trial = element?.dataset.t ?? null;
    if (trial !== hot) {
      for (const other of shown.get(hot) ?? []) other.classList.remove("hot");
      for (const other of shown.get(trial) ?? []) {
        other.classList.add("hot");
        if (other.ownerSVGElement && other !== element) other.parentNode.append(other); // above the other lines
      }
      hot = trial;
    }
    tip.hidden = !element || !element.ownerSVGElement;
    if (tip.hidden) return;
    tip.textContent = words(element);
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 4))}px`;
    tip.style.top = `${event.clientY + 18 + height > innerHeight ? Math.max(4, event.clientY - height - 12) : event.clientY + 18}px`;
  };
  document.addEventListener("pointermove", (event) => point(at(event), event));
  document.documentElement.addEventListener("pointerleave", () => point(null));

  // Comparing.
  const section = document.getElementById("compare");
  const named = () => {
    const found = /^#compare=([\d,]+)$/.exec(location.hash);
    return found ? [...new Set(found[1].split(","))].filter((trial) => rowOf.has(trial)).slice(-MOST) : [];
  };
  const choose = (trials) => { location.hash = trials.length ? `compare=${trials.join(",")}` : "compare"; };
  const toggle = (trial) => {
    const now = named();
    choose(now.includes(trial) ? now.filter((other) => other !== trial) : [...now, trial].slice(-MOST));
  };
  const cell = (tag, text, row) => Object.assign(row.appendChild(document.createElement(tag)), { textContent: text });
  const show = () => {
    const trials = named();
    const colours = ["one", "two", "three", "four", "five", "six"];
    for (const element of document.querySelectorAll(".picked")) element.classList.remove("picked");
    for (const box of boxes.values()) box.checked = false;
    trials.forEach((trial, i) => {
      boxes.get(trial).checked = true;
      for (const element of shown.get(trial)) {
        element.classList.add("picked");
        element.style.setProperty("--pick", `var(--${colours[i]})`);
      }
    });
    document.body.classList.toggle("some", trials.length > 0);
    section.hidden = trials.length < 2;
    const made = document.getElementById("compared");
    made.replaceChildren();
    if (section.hidden) return;
    const top = made.createTHead().insertRow();
    cell("th", "", top);
    trials.forEach((trial, i) => {
      const chip = Object.assign(document.createElement("span"), { className: "chip" });
      chip.style.setProperty("--pick", `var(--${colours[i]})`);
      cell("th", ` ${trial}`, top).prepend(chip, "Trial");
    });
    const rows = made.createTBody();
    const happened = trials.map((trial) => rowOf.get(trial).cells[heads.length].textContent);
    const facts = [...heads.slice(1).map((head, i) => [head.textContent, trials.map((trial) => texts(trial)[i][1])]), ["What happened", happened]];
    for (const [name, values] of facts) {
      if (values.every((text) => text === "")) continue;
      const row = rows.insertRow();
      row.classList.toggle("differs", new Set(values).size > 1 && name !== "What happened");
      cell("th", name, row);
      for (const text of values) cell("td", text, row);
    }
    section.querySelector("code").textContent = section.dataset.clone.replace("TRIAL", trials.at(-1));
  };
  const boxes = new Map();
  for (const [trial, row] of rowOf) {
    const box = Object.assign(document.createElement("input"), { type: "checkbox", title: `compare trial ${trial}` });
    row.cells[0].prepend(box);
    boxes.set(trial, box);
  }
  document.addEventListener("click", (event) => {
    const found = event.target.closest?.("#table [data-t]") ?? (event.target.closest?.("svg.chart") && at(event));
    if (found && getSelection().isCollapsed) toggle(found.dataset.t);
  });
  document.getElementById("clear").addEventListener("click", () => choose([]));
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") choose([]); });
  addEventListener("hashchange", show);
  show();
})();
