"use strict";
/* Roles and names for the theme's parts that lack them: the search, and the buttons that copy code. */
{
  const add = () => {
    document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
    for (const each of document.querySelectorAll("nav.md-code__nav:not([role])")) {
      each.setAttribute("role", "group"); // else each would be a landmark of the page
      each.setAttribute("aria-label", "Code");
    }
  };
  add();
  new MutationObserver(add).observe(document.querySelector(".md-content"), { childList: true, subtree: true });
}
