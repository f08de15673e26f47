// A state of a text as one button per token: color and an underline's length show a number, a card its alternatives.
// The buttons are inline elements, because <button> is not and would break lines within words.

import { el, percent } from "./dom.js";

// A state whose tokens know the characters that they show and those before them. Offsets count code points.
// Tokens that a run kept have in `base` how they came about before it.
export function frameOf(state, base = null) {
  const characters = Array.from(state.text);
  let at = 0;
  const tokens = state.tokens.map((token, index) => {
    const start = Math.max(token.start, at);
    const gap = characters.slice(at, start).join("");
    const shown = characters.slice(start, Math.max(token.end, start)).join("");
    at = Math.max(token.end, start);
    const before = base?.tokens[index];
    const kept = token.given && before && !before.given && before.id === token.id;
    const history = kept ? { probability: before.probability, alternatives: before.alternatives, given: false } : {};
    return { ...token, ...history, kept: Boolean(kept), gap, shown: token.id === null ? "" : shown };
  });
  return { ...state, tokens, tail: characters.slice(at).join("") };
}

// What a color shows: its number from 0 to 1 for a token, and the words of its legend.
export const SCALES = {
  probability: {
    name: "Probability",
    low: "unlikely",
    high: "likely",
    value: (token) => (token.probability === null ? null : Math.sqrt(token.probability)), // most are small
    ticks: () => ["0", "6", "25", "56", "100%"],
  },
  step: {
    name: "Step",
    low: "first",
    high: "last",
    value: (token, last) => (token.kept || !token.step ? null : last > 1 ? (token.step - 1) / (last - 1) : 1),
    ticks: (last) => [0, 0.25, 0.5, 0.75, 1].map((part) => String(Math.round(1 + part * Math.max(last - 1, 0)))),
  },
};

export const MOST_NATS = 10;
export const surprise = {
  name: "Surprise",
  low: "expected",
  high: "surprising (nats)",
  ticks: () => [0, 0.25, 0.5, 0.75, 1].map((part) => `${part * MOST_NATS}${part === 1 ? "+" : ""}`),
};

export function legendOf(color, scale, notes = [], last = 1) {
  const ticks = scale.ticks(last).map((tick, index) => el("i", { vars: { "--v": index / 4 } }, tick));
  return el(
    "p",
    { class: "legend", "data-color": color },
    el("span", { class: "scale" }, scale.low, el("span", { class: "ramp" }, ...ticks), scale.high),
    ...notes.map(([kind, text]) =>
      el("span", { class: "legend-note" }, el("i", { class: `sample ${kind}`, "aria-hidden": "true" }), text),
    ),
  );
}

// A token that continues a word, as people write such endings.
export const spelled = (text) => (text.startsWith("##") ? `‑${text.slice(2)}` : text);

function described(token, last, isLocked) {
  const parts = [];
  if (token.id === null) parts.push("masked");
  else if (token.given) parts.push("given");
  else {
    if (token.probability !== null) parts.push(`probability ${percent(token.probability)}`);
    if (token.kept) parts.push("kept from before");
    else if (token.step) parts.push(`step ${token.step} of ${last}`);
    const others = token.alternatives.filter((one) => one.id !== token.id).slice(0, 3);
    if (others.length) {
      parts.push(`instead ${others.map((one) => `${spelled(one.text)} ${percent(one.probability)}`).join(", ")}`);
    }
  }
  if (isLocked) parts.push("locked");
  return parts.join("; ");
}

function cardOf(token, last, isLocked) {
  const title = token.id === null ? "masked" : token.shown || spelled(token.text);
  const facts = [];
  if (token.id === null) facts.push("not generated yet");
  else if (token.given) facts.push("given");
  else {
    if (token.probability !== null) facts.push(percent(token.probability));
    facts.push(token.kept ? "kept from before" : `step ${token.step ?? "–"} of ${last}`);
  }
  if (isLocked) facts.push("locked");
  const rows = token.alternatives.map((one) =>
    el(
      "li",
      { class: one.id === token.id ? "chosen" : null },
      el("span", {}, spelled(one.text)),
      el("i", { vars: { "--v": one.probability } }),
      el("b", {}, percent(one.probability)),
    ),
  );
  return [
    el("strong", {}, title),
    el("span", { class: "facts" }, facts.join(" · ")),
    rows.length ? el("ol", {}, ...rows) : null,
  ];
}

export class TokenText {
  // `actions`: activate(index), lock(index), mask(index), select(from, to); without them the tokens only tell.
  constructor(label, actions = null) {
    this.actions = actions;
    this.tokens = [];
    this.current = 0; // which token the tabulator key reaches
    this.anchor = 0; // where a selection begins
    this.body = el("div", { class: "tokens", role: "group", "aria-label": label });
    this.card = el("div", { class: "card", "aria-hidden": "true", hidden: true });
    this.element = el("div", { class: "text" }, this.body, this.card);
    this.body.addEventListener("pointerover", (event) => this.#hover(event.target));
    this.body.addEventListener("pointerleave", () => this.#hide());
    this.body.addEventListener("focusin", (event) => {
      this.#roam(this.#index(event.target));
      this.#hover(event.target);
    });
    this.body.addEventListener("focusout", () => this.#hide());
    this.body.addEventListener("keydown", (event) => this.#key(event));
    if (actions) this.#followPointer();
  }

  render(frame, { color, last, locks = new Set(), selection = null }) {
    Object.assign(this, { frame, last, locks });
    if (this.tokens.length !== frame.tokens.length) this.#build(frame.tokens.length);
    this.body.dataset.color = color;
    const scale = SCALES[color];
    frame.tokens.forEach((token, index) => {
      const { gap, button } = this.tokens[index];
      const isLocked = locks.has(index);
      const value = token.id === null || token.given ? null : scale.value(token, last);
      const isSelected = selection !== null && index >= selection.from && index <= selection.to;
      const wasMasked = button.classList.contains("masked");
      if (gap.data !== token.gap) gap.data = token.gap;
      if (button.textContent !== token.shown) button.textContent = token.shown;
      button.className = "token";
      button.classList.toggle("masked", token.id === null);
      button.classList.toggle("given", token.given && token.id !== null);
      button.classList.toggle("locked", isLocked);
      button.classList.toggle("selected", isSelected);
      button.classList.toggle("fresh", wasMasked && token.id !== null);
      button.classList.toggle("plain", value === null);
      if (value === null) button.style.removeProperty("--v");
      else button.style.setProperty("--v", value.toFixed(3));
      button.setAttribute("aria-label", `${token.shown} ${described(token, last, isLocked)}`.trim());
      if (this.actions) button.setAttribute("aria-pressed", isSelected);
    });
    if (this.tail.data !== frame.tail) this.tail.data = frame.tail;
    if (!this.card.hidden) this.#hover(this.tokens[this.told]?.button);
  }

  #build(number) {
    this.tail = new Text();
    Object.assign(this, { current: 0, anchor: 0 });
    this.tokens = Array.from({ length: number }, (_, index) => ({
      gap: new Text(),
      button: el("span", { role: "button", class: "token", "data-index": index, tabindex: index ? -1 : 0 }),
    }));
    this.body.replaceChildren(...this.tokens.flatMap(({ gap, button }) => [gap, button]), this.tail);
  }

  #index(target) {
    const button = target?.closest?.(".token");
    return button ? Number(button.dataset.index) : null;
  }

  #hover(target) {
    const index = this.#index(target);
    if (index === null) return;
    this.told = index;
    this.card.replaceChildren(...cardOf(this.frame.tokens[index], this.last, this.locks.has(index)).filter(Boolean));
    this.card.hidden = false;
    const { button } = this.tokens[index];
    const space = this.element.clientWidth - this.card.offsetWidth;
    this.card.style.left = `${Math.max(0, Math.min(button.offsetLeft, space))}px`;
    this.card.style.top = `${button.offsetTop + button.offsetHeight + 6}px`;
  }

  #hide() {
    this.card.hidden = true;
  }

  focus() {
    this.tokens[this.current]?.button.focus();
  }

  #roam(index) {
    if (index === null) return;
    this.tokens[this.current].button.tabIndex = -1;
    this.current = index;
    this.tokens[index].button.tabIndex = 0;
  }

  #key(event) {
    const index = this.#index(event.target);
    if (index === null || event.ctrlKey || event.altKey || event.metaKey) return;
    const to = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: this.tokens.length - 1 }[event.key];
    const key = event.key.toLowerCase();
    if (this.tokens[to]) {
      if (event.shiftKey) this.actions?.select(Math.min(this.anchor, to), Math.max(this.anchor, to));
      else this.anchor = to;
      this.tokens[to].button.focus();
    } else if (key === "escape") {
      this.#hide();
      this.actions?.select(null);
    } else if (key === "l") this.actions?.lock(index);
    else if (key === "enter" || key === " ") event.target.click();
    else if (key === "m" || key === "delete") this.actions?.mask(index);
    else return;
    event.preventDefault();
  }

  // A drag over tokens selects them; a click does what the chosen tool does.
  #followPointer() {
    let from = null;
    let dragged = false;
    this.body.addEventListener("pointerdown", (event) => {
      from = event.pointerType === "touch" ? null : this.#index(event.target);
      dragged = false;
    });
    this.body.addEventListener("pointermove", (event) => {
      const to =
        from === null || !event.buttons ? null : this.#index(document.elementFromPoint(event.clientX, event.clientY));
      if (to === null || (to === from && !dragged)) return;
      dragged = true;
      this.actions.select(Math.min(from, to), Math.max(from, to));
    });
    this.body.addEventListener("click", (event) => {
      const index = this.#index(event.target);
      if (index === null || dragged) return;
      if (event.shiftKey) this.actions.select(Math.min(this.anchor, index), Math.max(this.anchor, index));
      else {
        this.anchor = index;
        this.actions.activate(index);
      }
    });
  }
}
