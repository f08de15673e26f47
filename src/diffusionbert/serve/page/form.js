// Fields of a form by the names that a link has for them, and the part of it that sets a sampler.

import { el } from "./dom.js";
import { SAMPLING } from "./state.js";

export function readForm(form, usual) {
  const found = { ...usual };
  for (const [name, value] of Object.entries(usual)) {
    const input = form.elements.namedItem(name);
    if (!input) continue;
    if (typeof value === "boolean") found[name] = input.checked;
    else if (typeof value === "number") found[name] = input.value === "" ? value : Number(input.value);
    else found[name] = input.value;
  }
  return found;
}

export function writeForm(form, values) {
  for (const [name, value] of Object.entries(values)) {
    const input = form.elements.namedItem(name);
    if (!input) continue;
    if (typeof value === "boolean") input.checked = value;
    else input.value = value;
    input.dispatchEvent(new Event("change", { bubbles: true }));
  }
}

// `name:setting=value,…` as its name and its settings.
export function parsedSampler(text) {
  const [name, rest = ""] = text.split(/:(.*)/s);
  return {
    name,
    settings: Object.fromEntries(
      rest
        .split(",")
        .filter(Boolean)
        .map((one) => one.split(/=(.*)/s)),
    ),
  };
}

// Fills a fieldset with the inputs of a sampler; `side` begins their names.
export function samplingInputs(fieldset, info, side) {
  const written = el("input", { type: "hidden", name: `${side}sampler` });
  const select = el(
    "select",
    {},
    el("option", { value: "" }, "the model’s own"),
    ...info.samplers.map(({ name }) => el("option", { value: name }, name)),
  );
  const about = el("p", { class: "hint" });
  const settings = el("div", { class: "row" });
  const card = () => info.samplers.find(({ name }) => name === select.value);
  const draw = (given) => {
    const { sampler, sampler_after_prompt: other } = info.defaults;
    about.textContent = card()?.description ?? (sampler === other ? sampler : `${sampler}; after a prompt, ${other}`);
    const inputs = (card()?.settings ?? []).map((one) =>
      el(
        "label",
        {},
        one.name,
        el("input", { "data-setting": one.name, placeholder: String(one.default ?? "none"), value: given[one.name] }),
      ),
    );
    settings.replaceChildren(...inputs);
  };
  const write = () => {
    const set = [...settings.querySelectorAll("input")].filter((input) => input.value.trim());
    const shown = set.map((input) => `${input.dataset.setting}=${input.value.trim()}`);
    written.value = select.value + (shown.length ? `:${shown.join(",")}` : "");
  };
  select.addEventListener("change", (event) => {
    event.stopPropagation();
    draw({});
    write();
  });
  settings.addEventListener("input", write);
  written.addEventListener("change", () => {
    const parsed = parsedSampler(written.value);
    select.value = parsed.name;
    if (select.selectedIndex < 0) select.value = "";
    draw(parsed.settings);
  });
  const number = (label, name, properties) =>
    el("label", {}, label, el("input", { type: "number", name: side + name, ...properties }));
  fieldset.append(
    el("label", {}, "Sampler", select),
    about,
    settings,
    written,
    el(
      "div",
      { class: "row four" },
      number("Steps", "steps", { min: 1, max: info.limits.steps }),
      number("Temperature", "temperature", { min: 0, max: 100, step: "any" }),
      number("Top-k", "top_k", { min: 0, placeholder: info.defaults.top_k ?? "all" }),
      number("Top-p", "top_p", { min: 0.01, max: 1, step: "any", placeholder: info.defaults.top_p ?? 1 }),
    ),
  );
}

// The settings of one side in a few words.
export function samplingWords(values, side, info) {
  const continues = (values.prompt || values.suffix) && values[`${side}steps`] >= info.limits.tokens;
  const words = {
    sampler: (value) => value || (continues ? info.defaults.sampler_after_prompt : info.defaults.sampler),
    steps: (value) => `${value} steps`,
    temperature: (value) => `temperature ${value}`,
    top_k: (value) => `top-k ${value}`,
    top_p: (value) => `top-p ${value}`,
  };
  return Object.entries(words)
    .filter(([name]) => name === "sampler" || values[side + name] !== SAMPLING[name])
    .map(([name, word]) => word(values[side + name]))
    .join(", ");
}
