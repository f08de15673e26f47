// Rewrite: a random part of a text, or a span of it, again.

import { GenerationView } from "./generation.js";
import { rewriteRequest } from "./requests.js";

const SPECIMEN = ["The ", null, " was born in ", null, " and moved ", null, " the north."];
const EXAMPLES = [
  ["A little", { rewrite: "The king was born in London and moved to the north as a child.", strength: 0.25 }],
  ["A lot", { rewrite: "The king was born in London and moved to the north as a child.", strength: 0.7 }],
];

const codePoints = (text) => Array.from(text).length;

export class RewriteView extends GenerationView {
  constructor(app) {
    super(app, "rewrite", SPECIMEN, EXAMPLES, rewriteRequest);
    const { rewrite, strength } = this.form.elements;
    const output = this.form.querySelector("[data-strength]");
    const tell = () => {
      output.textContent = `${Math.round(100 * strength.value)}% of the words`;
    };
    strength.addEventListener("input", tell);
    strength.addEventListener("change", tell);
    tell();
    const button = this.form.querySelector("[data-selection]");
    const spans = () => {
      const { selectionStart, selectionEnd, value } = rewrite;
      const isAny = value.slice(selectionStart, selectionEnd).trim() !== "";
      return isAny ? `${codePoints(value.slice(0, selectionStart))}-${codePoints(value.slice(0, selectionEnd))}` : "";
    };
    document.addEventListener("selectionchange", () => {
      if (document.activeElement === rewrite) button.disabled = spans() === "";
    });
    button.addEventListener("click", () => {
      if (this.form.reportValidity()) this.start({ ...this.values(), spans: spans() });
    });
  }
}
