// Fill: ranked fillings of all blanks, and the most probable tokens of each blank by itself.

import { announce, el, percent } from "./dom.js";
import { fillRequest } from "./requests.js";
import { spelled } from "./tokens.js";
import { AnswerView } from "./view.js";

const SPECIMEN = ["The ", null, " said on ", null, " that ", null, "."];
const EXAMPLES = [
  ["Two words", { fill: "The [MASK] said on [MASK] that it would close the factory." }],
  ["A phrase of any length", { fill: "He opened the door and saw [BLANK] on the table." }],
];

export class FillView extends AnswerView {
  constructor(app) {
    super(app, "fill", SPECIMEN, EXAMPLES);
    const { mask, blank } = app.info;
    const { fill } = this.form.elements;
    fill.placeholder = `The ${mask} said on ${blank}.`;
    for (const button of this.form.querySelectorAll("[data-insert]")) {
      const mark = { mask, blank }[button.dataset.insert];
      button.title = mark;
      button.addEventListener("click", () => {
        fill.setRangeText(mark, fill.selectionStart, fill.selectionEnd, "end");
        fill.focus();
      });
    }
    this.share = this.sharing(() => this.answer.fillings.map(({ text }) => text).join("\n"), fillRequest);
  }

  async run(values, signal) {
    values.run = "1";
    const { mask, blank } = this.app.info;
    if (!values.fill.includes(mask) && !values.fill.includes(blank)) {
      throw new Error(`The text has no blank. Insert ${mask} for one token, or ${blank} for any number of them.`);
    }
    [this.answer] = await this.ask(fillRequest(values), "Filling …", signal);
    const best = this.answer.fillings[0]?.nats ?? 0;
    const rows = this.answer.fillings.map((one) =>
      el(
        "li",
        {},
        el("p", { class: "filled" }, ...marked(values.fill, one, mask, blank)),
        el("p", { class: "facts" }, rank(one.nats, best)),
      ),
    );
    this.shown = [
      el("ol", { class: "fillings" }, ...rows),
      el(
        "p",
        { class: "hint" },
        `Nats of all blanks, conditional on ${this.answer.fillings[0]?.conditional_on ?? "the text"}; fewer are better.`,
      ),
      this.#columns(),
    ].filter(Boolean);
    this.results.replaceChildren(...this.shown, this.share);
    announce(`Done. ${this.answer.fillings[0]?.text ?? "No filling"}`);
  }

  #columns() {
    const { probabilities } = this.answer;
    if (!probabilities?.some((one) => one.length)) return null;
    const lists = probabilities.map((tokens, index) => {
      const rows = tokens.map((one) =>
        el(
          "li",
          {},
          el("span", {}, spelled(one.text)),
          el("i", { vars: { "--v": one.probability } }),
          el("b", {}, percent(one.probability)),
        ),
      );
      return el("section", { class: "bars" }, el("h4", {}, `Blank ${index + 1}`), el("ol", {}, ...rows));
    });
    return el("div", {}, el("h3", {}, "Each blank by itself"), el("div", { class: "columns" }, ...lists));
  }
}

function rank(nats, best) {
  const share = nats === best ? "the best that was found" : `${percent(Math.exp(best - nats))} as likely as the best`;
  return `${nats.toFixed(2)} nats · ${share}`;
}

// The filled text, with its fillings marked; whatever is not found as given is shown plainly.
function marked(given, { text, fillings }, mask, blank) {
  const between = given.split(
    new RegExp([mask, blank].map((one) => one.replace(/[[\]\\^$.*+?(){}|]/g, "\\$&")).join("|")),
  );
  if (between.length !== fillings.length + 1) return [text];
  const parts = [];
  let at = 0;
  for (const [index, filling] of fillings.entries()) {
    const from = text.toLowerCase().indexOf(filling.toLowerCase(), at + between[index].trimEnd().length);
    if (from < 0) return [text];
    parts.push(text.slice(at, from), el("mark", {}, text.slice(from, from + filling.length)));
    at = from + filling.length;
  }
  return [...parts, text.slice(at)];
}
