"use strict";
const at = (id) => document.getElementById(id);
const file = at("file"), drop = at("drop"), shown = at("shown");
let newest = 0;

function element(tag, text, name) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  return made;
}

const percent = (p) => p > 0.999 ? "> 99.9 %" : (100 * p).toFixed(1) + " %";

function card(model, colour) {
  const box = element("section", undefined, "model");
  box.style.setProperty("--own", `var(${colour})`);
  box.append(element("h2", model.title), element("div", model.classes[0].name, "said"));
  if (model.unsure) box.append(element("div", "unsure", "unsure"));
  for (const { name, probability } of model.classes) {
    const row = element("div", undefined, "row");
    const bar = element("span", undefined, "bar"), filled = element("i");
    filled.style.width = `${100 * probability}%`;
    bar.append(filled);
    const label = element("span", name);
    label.title = name;
    row.append(label, bar, element("span", percent(probability)));
    box.append(row);
  }
  return box;
}

function show(answer) {
  const models = answer.models;
  at("models").replaceChildren(
    ...models.map((model, n) => card(model, n ? "--alone" : "--with")));
  const verdict = at("verdict");
  verdict.hidden = models.length < 2;
  if (models.length > 1) {
    const agree = models[0].classes[0].name === models[1].classes[0].name;
    verdict.textContent = agree
      ? "Both models say the same." : "The two models disagree.";
  }
}

function complain(text) {
  at("fault").textContent = text;
  at("fault").hidden = !text;
  if (text) { at("models").replaceChildren(); at("verdict").hidden = true; }
}

async function ask(picture) {
  if (!picture) return;
  const mine = ++newest;
  at("nothing").hidden = true;
  complain("");
  URL.revokeObjectURL(shown.src);
  shown.src = URL.createObjectURL(picture);
  shown.alt = picture.name || "the picture";
  shown.hidden = false;
  at("named").textContent = picture.name || "";
  at("named").hidden = !picture.name;
  at("which").textContent = "another";
  let answer;
  try {
    if (picture.size > limit) throw new Error("the file is too large: at most " + limit / 2 ** 20 + " MiB");
    const got = await fetch("/predict", { method: "POST", body: picture });
    answer = await got.json();
  } catch (error) {
    answer = { error: error.message || "the program has ended: start 'perfed serve' again" };
  }
  if (mine !== newest) return;  // another picture was dropped meanwhile
  if (answer.error) complain(answer.error); else show(answer);
}

let limit = Infinity;
fetch("/about").then((got) => got.json()).then((about) => {
  limit = about.limit;
  at("takes").textContent = about.takes;
  for (const [name, value] of Object.entries(about.card))
    at("card").append(element("dt", name), element("dd", value));
});
shown.onerror = () => { shown.hidden = true; };
file.onchange = () => { ask(file.files[0]); file.value = ""; };
for (const kind of ["dragenter", "dragover"])
  addEventListener(kind, (event) => { event.preventDefault(); drop.classList.add("over"); });
for (const kind of ["dragleave", "drop"])
  addEventListener(kind, (event) => { event.preventDefault(); drop.classList.remove("over"); });
addEventListener("drop", (event) => ask(event.dataTransfer.files[0]));
addEventListener("paste", (event) => ask(event.clipboardData.files[0]));
