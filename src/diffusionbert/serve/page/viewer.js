// What an exported file shows: runs that can be gone through, without a server.

import { el } from "./dom.js";
import { Player } from "./player.js";
import { legendOf, SCALES, TokenText } from "./tokens.js";

export const NOTES = [
  ["masked", "masked"],
  ["given", "given"],
];

function viewOf({ name, frames, locks }, color) {
  const tokens = new TokenText(`${name}, token by token`);
  const last = frames.at(-1).step;
  const player = new Player((index) => {
    tokens.render(frames[index], { color: color(), last, locks: new Set(locks) });
    player.describe(`step ${frames[index].step} of ${last}`);
  });
  player.count = frames.length;
  player.finish();
  player.pause();
  player.seek(frames.length - 1);
  return { element: el("article", { class: "stage" }, el("h2", {}, name), tokens.element, player.element), player };
}

function showRuns(data) {
  const select = el("select", {}, ...Object.entries(SCALES).map(([value, { name }]) => el("option", { value }, name)));
  const views = data.map((run) => viewOf(run, () => select.value));
  const legend = el("div");
  const draw = () => {
    legend.replaceChildren(
      legendOf(select.value, SCALES[select.value], NOTES, Math.max(...data.map(({ frames }) => frames.at(-1).step))),
    );
    views.forEach(({ player }) => player.seek(player.index));
  };
  select.addEventListener("change", draw);
  document
    .querySelector("main")
    .append(
      el("div", { class: "toolbar" }, el("label", {}, "Color by ", select), legend),
      el("div", { class: "stages" }, ...views.map(({ element }) => element)),
    );
  draw();
}

const runsElement = document.getElementById("runs");
if (runsElement) showRuns(JSON.parse(runsElement.textContent));
