// Elements, and what is said to screen readers. Text always becomes text nodes, never markup.

export function el(tag, properties = {}, ...children) {
  const found = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) found.addEventListener(name.slice(2), value);
    else if (name === "class") found.className = value;
    else if (name === "vars") for (const [key, one] of Object.entries(value)) found.style.setProperty(key, one);
    else found.setAttribute(name, value === true ? "" : value);
  }
  found.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return found;
}

export function announce(text) {
  const live = document.getElementById("live");
  if (live) live.textContent = text;
}

export function percent(value) {
  if (value >= 0.995) return value >= 0.9995 ? "100%" : `${(100 * value).toFixed(1)}%`;
  return value >= 0.01 ? `${Math.round(100 * value)}%` : value >= 0.001 ? `${(100 * value).toFixed(1)}%` : "<0.1%";
}

export const plural = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

export const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);

export const prefersStill = () => window.matchMedia("(prefers-reduced-motion: reduce)").matches;
