"use strict";
/* A search over titles, headings, claims, tables and figures: every word has to occur. ENTRIES is in entries.js. */
{
  const MOST = 15;
  const element = (name, fields) => Object.assign(document.createElement(name), fields);
  const nav = document.querySelector("nav.top");
  const box = element("input", { id: "search", type: "search", placeholder: "Search: ptd-p figure 12", autocomplete: "off" });
  const list = element("ul", { id: "found", hidden: true });
  box.setAttribute("aria-label", "Search all pages");
  list.setAttribute("aria-label", "What was found");
  list.setAttribute("aria-live", "polite");
  nav.querySelector(".right").before(box, list); // the list is the next to be reached by Tab; style.css shows it last

  const wholeWords = (text) => new Set(text.toLowerCase().split(/[^\w-]+/));
  const find = (words) =>
    ENTRIES.filter(([title]) => words.every((word) => title.toLowerCase().includes(word)))
      .map(([title, page]) => [title, page, words.filter((word) => wholeWords(title).has(word)).length])
      .sort((one, other) => other[2] - one[2]); // stable: among equals as the pages were made

  box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = words.length ? find(words) : [];
    const rows = found.slice(0, MOST).map(([title, page]) => {
      const row = element("li", {});
      row.append(element("a", { href: page, textContent: title }));
      return row;
    });
    if (found.length > MOST) rows.push(element("li", { textContent: `and ${found.length - MOST} more` }));
    if (words.length && !found.length) rows.push(element("li", { textContent: "nothing has all of these words" }));
    list.replaceChildren(...rows);
    list.hidden = !words.length;
  });
  list.addEventListener("click", () => (list.hidden = true)); // a link may lead to this very page
  document.addEventListener("keydown", (event) => {
    const isTyping = ["INPUT", "SELECT", "TEXTAREA"].includes(document.activeElement.tagName);
    if (event.key === "/" && !isTyping) {
      event.preventDefault();
      box.focus();
    } else if (event.key === "Escape") {
      list.hidden = true;
    }
  });
}
