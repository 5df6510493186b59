"use strict";
// What is under the pointer, in words. A mark has its text in data-tip; the picture of a grid has
// its rows there, a letter for every round in which the client was selected.
const tip = document.getElementById("tip");

function gridText(image, event) {
  const rows = image.rows ||= JSON.parse(image.dataset.tip.slice(5));
  const box = image.getBoundingClientRect();
  const inside = (at, start, size, count) =>
    Math.min(count - 1, Math.max(0, Math.floor((at - start) / size * count)));
  const [name, selected] = rows[inside(event.clientY, box.top, box.height, rows.length)];
  const round = inside(event.clientX, box.left, box.width, selected.length);
  for (let last = round; last >= 0; last--) {
    if (selected[last] === ".") continue;
    const when = last === round ? "chosen in this round" : `chosen in round ${last + 1}`;
    return `${name}, round ${round + 1}\ncluster ${selected[last]}, ${when}`;
  }
  return `${name}, round ${round + 1}\nnot selected yet`;
}

function show(event) {
  const mark = event.target.closest?.("[data-tip]");
  tip.style.display = mark ? "block" : "none";
  if (!mark) return;
  const text = mark.dataset.tip;
  tip.textContent = text.startsWith("grid:") ? gridText(mark, event) : text;
  const left = Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8);
  const below = event.clientY + 16;
  const fits = below + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${fits ? below : event.clientY - tip.offsetHeight - 12}px`;
}

for (const name of ["pointermove", "pointerdown"]) document.addEventListener(name, show);
document.addEventListener("scroll", () => { tip.style.display = "none"; }, true);
