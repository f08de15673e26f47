// Takes a result elsewhere: as text, link, curl, Python, or one HTML file that needs nothing else.

import { hasKey } from "./api.js";
import { announce, el } from "./dom.js";
import { asCurl, asPython } from "./requests.js";

async function copy(button, text) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
    announce("Copied");
  } catch {
    window.prompt("Copy this:", text); // where the page may not use the clipboard
  }
  setTimeout(() => {
    button.textContent = label;
  }, 1500);
}

// `source`: text(), link(), requests(), exported() (a promise of HTML).
export function shareRow(source) {
  const button = (label, make) =>
    el("button", { type: "button", class: "quiet", onclick: (event) => copy(event.currentTarget, make()) }, label);
  const codes = (written) =>
    source
      .requests()
      .map((request) => written(request, hasKey()))
      .join("\n");
  return el(
    "div",
    { class: "share", role: "group", "aria-label": "Share" },
    button("Copy text", () => source.text()),
    button("Copy link", () => source.link()),
    button("Copy as curl", () => codes(asCurl)),
    button("Copy as Python", () => codes(asPython)),
    el("button", { type: "button", class: "quiet", onclick: async () => save(await source.exported()) }, "Export HTML"),
  );
}

function save(html) {
  const url = URL.createObjectURL(new Blob([html], { type: "text/html" }));
  el("a", { href: url, download: "diffusionbert.html" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

const VIEWER = ["dom.js", "tokens.js", "player.js", "viewer.js"];

const source = async (name) => (await fetch(new URL(name, import.meta.url))).text();

// One script of modules: their names are unique, so that imports and exports can go.
const joined = (modules) =>
  modules.map((text) => text.replace(/^import [^;]*;$/gm, "").replace(/^export /gm, "")).join("\n");

// Nothing but what is in the file.
const POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'";

// A page of its own with these elements, and a viewer for these runs: [{name, frames, locks}].
export async function exportedPage(elements, runs = []) {
  const main = el("main", { class: "exported" }, el("h1", {}, "DiffusionBERT"), ...elements);
  const parts = [
    '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
    '<meta name="viewport" content="width=device-width, initial-scale=1">',
    `<meta http-equiv="Content-Security-Policy" content="${POLICY}">`,
    `<title>DiffusionBERT</title>\n<style>\n${await source("style.css")}</style>\n</head>\n<body>`,
    main.outerHTML,
  ];
  if (runs.length) {
    const data = JSON.stringify(runs).replaceAll("<", "\\u003c");
    const script = joined(await Promise.all(VIEWER.map(source)));
    parts.push(
      `<script type="application/json" id="runs">${data}</script>`,
      `<script type="module">\n${script}</script>`,
    );
  }
  return [...parts, "</body>\n</html>\n"].join("\n");
}
