"use strict";
/* The values of a figure's points: of the one that the pointer is near, or that the arrow keys move to. */
for (const figure of document.querySelectorAll(".figure[data-values]")) {
  const NEAR = 24;
  const image = figure.querySelector("img");
  const { size, points } = JSON.parse(figure.dataset.values);
  const [shown, mark] = ["output", "i"].map((name) => document.createElement(name));
  let at = -1;

  const show = (index) => {
    at = index;
    if (index < 0) return [shown, mark].forEach((each) => each.remove());
    const [x, y, text] = points[index];
    const scale = image.clientWidth / size[0];
    shown.textContent = text;
    Object.assign(mark.style, { left: `${x * scale}px`, top: `${y * scale}px` });
    figure.append(mark, shown);
    const isRight = x * scale > image.clientWidth / 2;
    Object.assign(shown.style, { top: `${y * scale + 10}px`, left: `${x * scale + (isRight ? -shown.offsetWidth - 8 : 8)}px` });
  };

  figure.addEventListener("pointermove", (event) => {
    const box = image.getBoundingClientRect();
    const scale = image.clientWidth / size[0];
    const far = ([x, y]) => Math.hypot(x * scale - event.clientX + box.left, y * scale - event.clientY + box.top);
    const nearest = points.reduce((best, point, i) => (far(point) < far(points[best]) ? i : best), 0);
    show(far(points[nearest]) < NEAR ? nearest : -1);
  });
  figure.addEventListener("pointerleave", () => show(-1));
  figure.addEventListener("blur", () => show(-1));
  figure.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    show((at + step + points.length) % points.length);
  });
}
