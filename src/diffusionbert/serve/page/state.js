// What a link reproduces: the fields of a task, its seed and its canvas, in the fragment of the address.

export const TASKS = ["write", "fill", "rewrite", "score"];

// Empty is the server's default; `fitTo` knows those of the numbers.
export const SAMPLING = { sampler: "", steps: 0, temperature: 0, top_k: "", top_p: "" };
const RUN = { seed: "", run: "", canvas: "", text: "", locks: "", step: "", color: "probability" };
const B = (fields) => Object.fromEntries(Object.entries(fields).map(([name, value]) => [`b.${name}`, value]));
const { canvas, text, locks, run, step } = RUN;
const BOTH = { ...SAMPLING, ...RUN, compare: false, ...B({ ...SAMPLING, canvas, text, locks, run, step }) };

export const FIELDS = {
  write: { prompt: "", suffix: "", max_tokens: 24, include: "", forbid: "", ...BOTH },
  fill: { fill: "", alternatives: 5, longest: 3, run: "" },
  rewrite: { rewrite: "", strength: 0.4, spans: "", ...BOTH },
  score: { score: "", order: "", run: "" },
};

// The server's defaults, and no more new tokens than the model can have.
export function fitTo({ limits, defaults: { steps, temperature } }) {
  FIELDS.write.max_tokens = Math.min(FIELDS.write.max_tokens, limits.tokens);
  const known = { steps, temperature };
  Object.assign(SAMPLING, known);
  for (const task of ["write", "rewrite"]) Object.assign(FIELDS[task], known, B(known));
}

export const defaults = (task) => ({ ...FIELDS[task] });

export function encode(task, values) {
  const found = new URLSearchParams({ task });
  for (const [name, usual] of Object.entries(FIELDS[task])) {
    if (!values.compare && name.startsWith("b.")) continue;
    if (values[name] !== undefined && String(values[name]) !== String(usual)) found.set(name, values[name]);
  }
  return `#${found}`;
}

// Unknown names are left out, and a value has the type of its default.
export function decode(fragment) {
  const given = new URLSearchParams(fragment.replace(/^#/, ""));
  const task = TASKS.includes(given.get("task")) ? given.get("task") : TASKS[0];
  const values = defaults(task);
  for (const [name, usual] of Object.entries(values)) {
    const value = given.get(name);
    if (value === null) continue;
    if (typeof usual === "boolean") values[name] = value === "true";
    else if (typeof usual === "number") values[name] = Number.isFinite(Number(value)) ? Number(value) : usual;
    else values[name] = value;
  }
  return { task, values };
}

// A canvas in a link: an id per position, with l if it is locked and g if it was given at first; m is masked.
export const writeCanvas = (tokens) =>
  tokens.map(({ id, locked, given }) => (id === null ? "m" : `${id}${locked ? "l" : ""}${given ? "g" : ""}`)).join(".");

export const readCanvas = (written) =>
  written.split(".").map((one) => {
    const [, id, locked, given] = one.match(/^(\d+)(l?)(g?)$/) ?? [];
    return { id: id === undefined ? null : Number(id), locked: Boolean(locked), given: Boolean(given) };
  });

export const writeNumbers = (numbers) => [...numbers].sort((one, other) => one - other).join(".");

export const readNumbers = (written) =>
  new Set(
    written
      .split(".")
      .filter((one) => /^\d+$/.test(one))
      .map(Number),
  );

export const freshSeed = () => crypto.getRandomValues(new Uint32Array(1))[0];
