"use strict";
/* Names for the theme's landmarks that lack them: the search, and the buttons of each block of code. */
{
  const add = () => {
    document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
    document.querySelectorAll(".md-code__nav").forEach((each, i) => each.setAttribute("aria-label", `Code ${i + 1}`));
  };
  add();
  new MutationObserver(add).observe(document.querySelector(".md-content"), { childList: true, subtree: true });
}
