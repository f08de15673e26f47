// Write: continue a text, or write what is between two.

import { GenerationView } from "./generation.js";
import { writeRequest } from "./requests.js";

const SPECIMEN = ["Once", " ", null, " ", null, " time", " ", null, " was", " ", null, " ", null, " ", null, "."];
const EXAMPLES = [
  ["From nothing", { max_tokens: 24 }],
  ["Continue a sentence", { prompt: "The old man walked down to the", max_tokens: 20 }],
  ["Write the middle", { prompt: "The little girl", suffix: "and they all went home.", max_tokens: 14 }],
  ["Compare two samplers", { prompt: "In the spring", max_tokens: 20, compare: true, "b.sampler": "confidence" }],
];

export class WriteView extends GenerationView {
  constructor(app) {
    super(app, "write", SPECIMEN, EXAMPLES, writeRequest);
    this.form.elements.max_tokens.max = app.info.limits.tokens;
  }
}
