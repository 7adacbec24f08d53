"use strict";
/* Tables are sorted by a click on a heading; long ones, or all of a page together, are filtered by a text of a row. */
{
  const LONG = 8;
  const number = (text) => parseFloat(text.replace(/,/g, "").replace("\u2212", "-"));
  const compare = (one, other) => {
    const numbers = [number(one), number(other)];
    if (numbers.some(Number.isNaN)) {
      return numbers.every(Number.isNaN) ? one.localeCompare(other) : Number.isNaN(numbers[0]) - Number.isNaN(numbers[1]);
    }
    return numbers[0] - numbers[1];
  };

  const sorted = (table, index, sign) => {
    const cell = (row) => row.cells[index].textContent.trim();
    const rows = [...table.tBodies[0].rows];
    const isEmpty = (row) => ["", "\u2013"].includes(cell(row)); // which stand last in both orders
    const filled = rows.filter((row) => !isEmpty(row)).sort((one, other) => sign * compare(cell(one), cell(other)));
    table.tBodies[0].append(...filled, ...rows.filter(isEmpty));
  };

  const addFilter = (tables, place) => {
    const rows = tables.flatMap((table) => [...table.tBodies[0].rows]);
    const box = document.createElement("input");
    Object.assign(box, { type: "search", className: "filter", placeholder: `filter ${rows.length} rows` });
    box.setAttribute("aria-label", "Only rows with this text");
    box.addEventListener("input", () => {
      const text = box.value.toLowerCase();
      for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(text);
      for (const part of document.querySelectorAll("[data-together] > section")) {
        part.hidden = !part.querySelector("tbody tr:not([hidden])");
      }
    });
    place.before(box);
  };

  const tables = [...document.querySelectorAll(".scroll table")].filter((table) => table.tBodies[0]?.rows.length > 1);
  for (const table of tables) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, index) => {
      const button = document.createElement("button");
      button.append(...head.childNodes);
      if (!button.textContent.trim()) button.setAttribute("aria-label", `Sort by column ${index + 1}`);
      head.append(button);
      button.addEventListener("click", () => {
        const isUp = head.getAttribute("aria-sort") !== "ascending";
        for (const each of heads) each.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", isUp ? "ascending" : "descending");
        sorted(table, index, isUp ? 1 : -1);
      });
    });
  }
  const together = document.querySelector("[data-together]");
  if (together) {
    addFilter([...together.querySelectorAll(".scroll table")].filter((table) => table.tBodies[0]), together);
  } else {
    for (const table of tables) if (table.tBodies[0].rows.length >= LONG) addFilter([table], table.closest(".scroll"));
  }
}
