// Goes through the states of a run: forward by itself, or where the slider is.

import { el, prefersStill } from "./dom.js";

export class Player {
  constructor(onShow) {
    this.onShow = onShow;
    this.button = el("button", { type: "button", class: "play", onclick: () => this.toggle() });
    this.slider = el("input", {
      type: "range",
      min: 0,
      max: 0,
      value: 0,
      "aria-label": "Step",
      oninput: () => this.#scrub(),
    });
    this.label = el("span", { class: "where" });
    this.element = el("div", { class: "player" }, this.button, this.slider, this.label);
    this.reset(1);
  }

  // Before a run that is expected to have so many states.
  reset(expected) {
    this.pause();
    Object.assign(this, { count: 0, index: -1, expected, complete: false, following: true });
    this.slider.max = Math.max(expected - 1, 1);
    this.slider.value = 0;
  }

  extend() {
    this.count += 1;
    if (this.count > this.expected) this.slider.max = this.count - 1;
    if (!this.following) return;
    if (prefersStill() || this.index < 0) this.seek(this.count - 1);
    else this.#tick();
  }

  finish() {
    this.complete = true;
    this.slider.max = Math.max(this.count - 1, 1);
    if (this.following && !prefersStill() && this.index < this.count - 1) this.#tick();
    else this.#draw();
  }

  get isLast() {
    return this.complete && this.index >= this.count - 1;
  }

  get isPlaying() {
    return this.timer !== undefined;
  }

  seek(index) {
    this.index = Math.max(0, Math.min(index, this.count - 1));
    this.slider.value = this.index;
    this.onShow(this.index);
    this.#draw();
  }

  toggle() {
    if (this.isPlaying) {
      this.following = false;
      this.pause();
    } else {
      if (this.index >= this.count - 1) this.seek(0);
      this.following = true;
      this.#tick();
    }
    this.#draw();
  }

  pause() {
    clearTimeout(this.timer);
    this.timer = undefined;
  }

  describe(text) {
    this.label.textContent = text;
    this.slider.setAttribute("aria-valuetext", text);
  }

  #scrub() {
    this.pause();
    this.following = false;
    this.seek(Number(this.slider.value));
    this.onScrub?.(this.count > 1 ? this.index / (this.count - 1) : 1);
  }

  #tick() {
    this.timer ??= setTimeout(
      () => {
        this.timer = undefined;
        if (this.index < this.count - 1) this.seek(this.index + 1);
        if (this.index < this.count - 1 && this.following) this.#tick();
        this.#draw();
      },
      Math.max(30, Math.min(3000 / Math.max(this.count, this.expected), 140)),
    );
  }

  #draw() {
    this.button.setAttribute("aria-label", this.isPlaying ? "Pause" : "Play the steps");
    this.button.classList.toggle("playing", this.isPlaying);
    this.button.disabled = this.count < 2;
    this.slider.disabled = this.count < 2;
  }
}
