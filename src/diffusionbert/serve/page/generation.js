// Write and rewrite: one run, or two from one seed side by side, that can be watched and edited.

import { announce, el } from "./dom.js";
import { samplingInputs, samplingWords } from "./form.js";
import { canvasRequest } from "./requests.js";
import { exportedPage, shareRow } from "./share.js";
import { Stage } from "./stage.js";
import { freshSeed, readCanvas, readNumbers, writeCanvas, writeNumbers } from "./state.js";
import { legendOf, SCALES } from "./tokens.js";
import { View } from "./view.js";
import { NOTES } from "./viewer.js";

const TOOLS = { inspect: "Inspect", mask: "Re-mask", lock: "Lock", select: "Select" };
const HINTS = {
  inspect: "Point at a token, or tap it, to see what else it could have been.",
  mask: "Click a token to mask it again: the model continues from there. Drag over tokens to select a span.",
  lock: "Click a token to lock it, and again to unlock it. The generated tokens that are not locked can be drawn anew.",
  select: "Click the first token of a span and then the last, or drag.",
};
const KEYS = "Keys: arrows move, Shift with arrows selects, M re-masks, L locks.";
const EDITS = ["canvas", "text", "run", "locks", "step"];

export class GenerationView extends View {
  // `requestOf(values, side, seed)` asks for a text.
  constructor(app, task, specimen, examples, requestOf) {
    super(app, task, specimen, examples);
    const canEdit = app.info.tasks.includes("canvas");
    Object.assign(this, { requestOf, canEdit, colorName: "probability" });
    for (const fieldset of this.form.querySelectorAll("[data-sampling]")) {
      samplingInputs(fieldset, app.info, fieldset.dataset.sampling);
    }
    const { compare } = this.form.elements;
    compare.addEventListener("change", () => {
      this.form.querySelector('[data-sampling="b."]').hidden = !compare.checked;
      this.form.querySelector('[data-sampling=""] legend').textContent = compare.checked ? "Settings A" : "Settings";
      if (compare.checked) this.form.querySelector("details").open = true;
    });
    this.stages = [];
    this.legend = el("div", { class: "legends" });
    this.hint = el("p", { class: "hint" });
    const tools = canEdit ? TOOLS : { inspect: TOOLS.inspect };
    const first = canEdit && !window.matchMedia("(hover: none)").matches ? "mask" : "inspect";
    this.tools = choices("Click to", tools, first, () => this.say(HINTS[this.tool()]), `${task}-tool`);
    const names = Object.fromEntries(Object.entries(SCALES).map(([value, { name }]) => [value, name]));
    this.colors = choices("Color by", names, "probability", (value) => this.#paint(value), `${task}-color`);
    this.place = el("div", { class: "stages" });
    this.share = shareRow({
      text: () => this.stages.map((stage) => stage.text).join("\n\n"),
      link: () => this.url,
      requests: () => this.stages.map((stage) => stage.request),
      exported: () => this.exported(),
    });
  }

  // ---- what stages ask of their host --------------------------------------------------------------------------------

  tool = () => this.tools.querySelector("input:checked").value;

  color = () => this.colorName;

  say(text, keys = "") {
    this.hint.replaceChildren(text, keys && el("span", { class: "keys" }, ` ${keys}`));
  }

  kept(stage) {
    return Object.fromEntries(EDITS.map((name) => [stage.side + name, this.snapshot[stage.side + name]]));
  }

  restore(stage, kept) {
    Object.assign(this.snapshot, kept);
    this.app.linked(this);
  }

  changed(stage) {
    this.snapshot[`${stage.side}locks`] = writeNumbers(stage.locks);
    this.#remember(stage);
    this.app.linked(this);
  }

  // Continues a stage from a canvas, with a seed of its own.
  async edit(stage, tokens, text, base) {
    const { side } = stage;
    const seed = freshSeed();
    const edits = { canvas: writeCanvas(tokens), text, run: seed, locks: writeNumbers(stage.locks), step: "" };
    for (const [name, value] of Object.entries(edits)) this.snapshot[side + name] = value;
    await this.working((signal) => this.#work([[stage, { base, locks: new Set(stage.locks) }]], signal));
  }

  // ---- runs ----------------------------------------------------------------------------------------------------

  async run(values, signal) {
    const sides = values.compare ? ["", "b."] : [""];
    const seed = values.run !== "" ? values.run : values.seed !== "" ? values.seed : freshSeed();
    for (const side of sides) if (values[`${side}run`] === "" || !values[`${side}canvas`]) values[`${side}run`] = seed;
    this.stages = sides.map((side) => {
      const name = values.compare ? (side ? "B" : "A") : "Text";
      const stage = new Stage(this, side, name);
      const words = samplingWords(values, side, this.app.info);
      stage.title.replaceChildren(values.compare ? el("b", {}, `${name} `) : "", el("span", {}, words));
      return stage;
    });
    this.#link();
    this.place.classList.toggle("two", sides.length > 1);
    this.place.replaceChildren(...this.stages.map((stage) => stage.element));
    const toolbar = el("div", { class: "toolbar" }, this.tools, this.colors, this.legend);
    this.results.replaceChildren(toolbar, this.place, this.hint, this.share);
    this.say("");
    if (!(values.color in SCALES)) values.color = "probability";
    this.colors.querySelector(`[value="${values.color}"]`).checked = true;
    this.#paint(values.color);
    this.app.linked(this);
    await this.#work(
      this.stages.map((stage) => [stage, this.#remembered(stage, values)]),
      signal,
    );
    if (this.stages.some((stage) => stage.frames.length)) this.say(HINTS[this.tool()], this.canEdit ? KEYS : "");
  }

  // What a link says about a stage beside its request.
  #remembered(stage, values) {
    const { side } = stage;
    const known = { probability: null, alternatives: [] };
    const canvas = values[`${side}canvas`];
    const base = canvas ? { tokens: readCanvas(canvas).map((token) => ({ ...token, ...known })) } : null;
    return { base, locks: readNumbers(values[`${side}locks`]), step: values[`${side}step`] };
  }

  async #work(work, signal) {
    const values = this.snapshot;
    await Promise.all(
      work.map(([stage, options]) => {
        const { side } = stage;
        const make = values[`${side}canvas`] ? canvasRequest : this.requestOf;
        const request = make(values, side, values[`${side}run`]);
        return stage.run(request, { ...options, signal });
      }),
    );
    this.drawLegend();
  }

  // Sliders of two stages move together, and the shown step is part of the link.
  #link() {
    for (const stage of this.stages) {
      stage.player.onScrub = (fraction) => {
        for (const other of this.stages) {
          if (other !== stage && other.frames.length && !other.isRunning) {
            other.player.pause();
            other.player.seek(Math.round(fraction * (other.frames.length - 1)));
          }
          this.#remember(other);
        }
        this.app.linked(this);
      };
    }
  }

  #remember({ side, player }) {
    this.snapshot[`${side}step`] = player.isLast || player.isPlaying ? "" : player.index;
  }

  #paint(name) {
    this.colorName = name;
    if (this.snapshot) this.snapshot.color = name;
    this.drawLegend();
    this.stages.forEach((stage) => stage.draw());
    if (this.snapshot) this.app.linked(this);
  }

  drawLegend() {
    const last = Math.max(1, ...this.stages.map(({ final }) => final?.step ?? 1));
    this.legend.replaceChildren(
      legendOf(this.colorName, SCALES[this.colorName], [...NOTES, ["locked", "locked"]], last),
    );
  }

  exported() {
    const runs = this.stages
      .filter((stage) => stage.frames.length)
      .map((stage) => ({ name: stage.title.textContent, frames: stage.frames, locks: [...stage.locks] }));
    announce("Exported");
    return exportedPage([el("p", { class: "lead" }, this.app.credit)], runs);
  }
}

// A row of radio buttons that looks like one control.
function choices(label, options, chosen, onChange, name) {
  const inputs = Object.entries(options).map(([value, text]) =>
    el(
      "label",
      {},
      el("input", { type: "radio", name, value, checked: value === chosen, onchange: () => onChange(value) }),
      el("span", {}, text),
    ),
  );
  return el("fieldset", { class: "choices" }, el("legend", {}, label), ...inputs);
}
