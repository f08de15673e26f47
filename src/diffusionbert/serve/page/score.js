// Score: how surprising each token is, and what kind of number the total is.

import { announce, el, plural } from "./dom.js";
import { scoreRequest } from "./requests.js";
import { legendOf, MOST_NATS, surprise } from "./tokens.js";
import { AnswerView } from "./view.js";

const SPECIMEN = ["How surprising is ", null, "?"];
const EXAMPLES = [
  ["Two sentences", { score: "The children play in the garden.\nThe garden play in the children." }],
  ["Exactly, from left to right", { score: "The capital of France is Paris.", order: "left-to-right" }],
];

const KINDS = {
  exact: "Exact: the likelihood of generating the text in this order. Nothing is drawn, so there is no interval.",
  bound: "An upper bound on the surprise: the text is at least this likely. The interval is that of the random draws.",
  pseudo:
    "A pseudo-likelihood: each token given all others. It is no likelihood, and comparable only with its own kind.",
  none: "This model has no likelihood.",
};

const ORDERS = {
  "": "Bound, over all orders",
  "left-to-right": "Exact, from left to right",
  confidence: "Exact, most confident first",
  entropy: "Exact, lowest entropy first",
};

export class ScoreView extends AnswerView {
  constructor(app) {
    super(app, "score", SPECIMEN, EXAMPLES);
    const { order } = this.form.elements;
    const own = app.info.quantity ? [""] : [];
    order.append(...[...own, ...app.info.orders].map((value) => el("option", { value }, ORDERS[value] ?? value)));
    const hint = this.form.querySelector("[data-order-hint]");
    const tell = () => {
      hint.textContent = order.value ? KINDS.exact : `The ${app.info.quantity ?? "model’s number"}.`;
    };
    order.addEventListener("change", tell);
    tell();
    const told = (one, index) => `${one.nats} nats (${one.kind}): ${this.texts[index]}`;
    this.share = this.sharing(() => this.scores.map(told).join("\n"), scoreRequest);
  }

  async run(values, signal) {
    values.run = "1";
    const request = scoreRequest(values);
    this.texts = request.body.text;
    if (!this.texts.length) throw new Error("There is no text. Write one per line.");
    this.scores = await this.ask(request, `Scoring ${plural(this.texts.length, "text")} …`, signal);
    const [{ kind, quantity, conditional_on: condition }] = this.scores;
    const about = el("p", { class: "hint" }, `${KINDS[kind]} Quantity: ${quantity}, conditional on ${condition}.`);
    this.shown = [
      legendOf("surprise", surprise),
      about,
      ...this.scores.map((score, index) => this.#card(score, this.texts[index])),
    ];
    this.results.replaceChildren(...this.shown, this.share);
    announce(`Done. ${this.scores.map((one) => `${number(one.nats)} nats, ${one.kind}`).join("; ")}`);
  }

  #card(score, text) {
    const { difference } = score;
    const isDrawn = score.kind !== "exact";
    const facts = [
      ["per token", `${number(score.nats_per_token)} nats`],
      ["perplexity per token", number(score.perplexity_per_token)],
      ["perplexity per word", number(score.perplexity_per_word)],
      ["bits per byte", number(score.bits_per_byte)],
    ];
    if (score.index > 0 && difference) {
      const drawn = isDrawn ? ` ${interval(difference.ci95)}` : "";
      facts.push(["more than the first text", `${signed(difference.nats)} nats${drawn}`]);
    }
    if (score.num_unknown) facts.push(["unknown words", String(score.num_unknown)]);
    return el(
      "article",
      { class: "scored" },
      el("p", { class: "tokens", "data-color": "surprise" }, ...surprises(score.tokens ?? [], text)),
      el(
        "p",
        { class: "total" },
        el("b", {}, `${number(score.nats)} nats`),
        isDrawn ? el("span", {}, ` ${interval(score.ci95)} `) : " ",
        el("span", { class: "kind" }, score.kind),
      ),
      el(
        "p",
        { class: "hint" },
        isDrawn && !score.precision_reached ? `Imprecise: ${plural(score.num_draws, "draw")} were not enough.` : "",
      ),
      el(
        "dl",
        { class: "facts" },
        ...facts.flatMap(([name, value]) => [el("div", {}, el("dt", {}, name), el("dd", {}, value))]),
      ),
    );
  }
}

function surprises(tokens, text) {
  const characters = Array.from(text);
  const parts = [];
  let at = 0;
  for (const { start, end, nats } of tokens) {
    parts.push(characters.slice(at, start).join(""));
    const value = nats === null ? 1 : Math.max(0, Math.min(nats / MOST_NATS, 1));
    const told = `${characters.slice(start, end).join("")}: ${number(nats)} nats`;
    parts.push(
      el(
        "span",
        { class: "token", title: told, vars: { "--v": value.toFixed(3) } },
        characters.slice(start, end).join(""),
        el("span", { class: "hidden" }, ` (${number(nats)}) `),
        el("sub", { "aria-hidden": "true" }, nats === null ? "∞" : nats.toFixed(1)),
      ),
    );
    at = end;
  }
  return [...parts, characters.slice(at).join("")];
}

const number = (value) =>
  value === null || value === undefined ? "∞" : Math.abs(value) >= 100 ? value.toFixed(0) : value.toFixed(2);

const signed = (value) =>
  value === null ? "∞" : `${value > 0 ? "+" : value < 0 ? "−" : ""}${number(Math.abs(value))}`;

const interval = ([low, high]) => `(95% interval ${number(low)} to ${number(high)})`;
