// What the fields of a task ask the server for, and the same request as curl and Python.

import { address } from "./api.js";
import { readCanvas, SAMPLING } from "./state.js";

const words = (given) =>
  given
    .split(",")
    .map((word) => word.trim())
    .filter(Boolean);

function sampling(values, side, seed) {
  const found = {};
  for (const [name, usual] of Object.entries(SAMPLING)) {
    const value = values[side + name];
    if (value !== usual) found[name] = name === "sampler" ? value : Number(value);
  }
  return { ...found, seed: Number(seed) };
}

export function writeRequest(values, side, seed) {
  const body = { prompt: values.prompt, max_tokens: values.max_tokens, ...sampling(values, side, seed) };
  if (values.suffix) body.suffix = values.suffix;
  if (values.include) body.include = words(values.include);
  if (values.forbid) body.forbid = words(values.forbid);
  return { path: "v1/completions", body };
}

export function rewriteRequest(values, side, seed) {
  const body = { text: values.rewrite, ...sampling(values, side, seed) };
  if (values.spans) body.spans = values.spans.split(".").map((span) => span.split("-").map(Number));
  else body.strength = values.strength;
  return { path: "v1/rewrite", body };
}

export function canvasRequest(values, side, seed) {
  const tokens = readCanvas(values[`${side}canvas`]).map(({ id, locked }) => ({
    id,
    state: id === null ? "masked" : locked ? "locked" : "free",
  }));
  const body = { tokens, ...sampling(values, side, seed) };
  if (values[`${side}text`]) body.text = values[`${side}text`];
  if (values.forbid) body.forbid = words(values.forbid);
  return { path: "v1/canvas", body };
}

export function fillRequest(values) {
  return {
    path: "v1/fill",
    body: {
      text: values.fill,
      num_alternatives: values.alternatives,
      max_blank_tokens: values.longest,
      probabilities: 5,
    },
  };
}

export function scoreRequest(values) {
  const texts = values.score
    .split("\n")
    .map((line) => line.trim())
    .filter(Boolean);
  const body = { text: texts, tokens: true };
  if (texts.length > 1) body.paired = true;
  if (values.order) body.order = values.order;
  return { path: "v1/score", body };
}

// The state that an event of a stream carries, whichever endpoint sent it.
export const stateOf = (event) => event.state ?? event.choices?.[0]?.state ?? event.data?.[0]?.state ?? null;

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

export function asCurl({ path, body }, needsKey) {
  const key = needsKey ? ' \\\n  -H "Authorization: Bearer $DIFFUSIONBERT_API_KEY"' : "";
  return `curl ${quoted(address(path))} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d ${quoted(JSON.stringify(body))}\n`;
}

function literal(value) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value)
      .map(([name, one]) => `${JSON.stringify(name)}: ${literal(one)}`)
      .join(", ")}}`;
  }
  return JSON.stringify(value);
}

export function asPython({ path, body }, needsKey) {
  const key = needsKey ? ', "Authorization": f"Bearer {os.environ[\'DIFFUSIONBERT_API_KEY\']}"' : "";
  const lines = Object.entries(body).map(([name, value]) => `    ${JSON.stringify(name)}: ${literal(value)},`);
  return [
    `import json${needsKey ? "\nimport os" : ""}`,
    "import urllib.request",
    "",
    `body = {\n${lines.join("\n")}\n}`,
    "request = urllib.request.Request(",
    `    ${JSON.stringify(address(path))},`,
    "    json.dumps(body).encode(),",
    `    {"Content-Type": "application/json"${key}},`,
    ")",
    "print(json.load(urllib.request.urlopen(request)))",
    "",
  ].join("\n");
}
