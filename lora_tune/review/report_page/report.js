"use strict";
// Sorting and filtering of the table of trials; the page says the same without it.
(() => {
  const table = document.getElementById("table");
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
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
  heads.forEach((head, i) => head.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const rows = [...body.rows].map((row) => [value(row, i), row]);
    rows.sort(([a], [b]) => (down && a !== null && b !== null ? -compare(a, b) : compare(a, b)));
    body.append(...rows.map(([, row]) => row));
  }));
  document.getElementById("filter").addEventListener("change", (event) => {
    const wanted = event.target.value;
    for (const row of body.rows) row.hidden = wanted !== "" && row.dataset.state !== wanted;
  });
})();
