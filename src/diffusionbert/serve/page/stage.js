// One run on the page: its states arrive, can be gone through, and edited: re-mask, lock, rewrite a span, undo.

import { events, post } from "./api.js";
import { announce, el, plural, sentence } from "./dom.js";
import { Player } from "./player.js";
import { stateOf } from "./requests.js";
import { frameOf, TokenText } from "./tokens.js";

const ALTERNATIVES = 6;

export class Stage {
  // `host`: canEdit, tool(), color(), say(text); for edits: edit(stage, tokens, text, base), changed(stage),
  // kept(stage) and restore(stage, kept), what of the link belongs to the stage.
  constructor(host, side, name) {
    Object.assign(this, { host, side, frames: [], locks: new Set(), selection: null, past: [] });
    this.title = el("h3", {}, name);
    this.status = el("span", { class: "status" });
    const edits = {
      activate: (index) => this.#activate(index),
      lock: (index) => this.toggleLock(index),
      mask: (index) => this.remask([index]),
      select: (from, to) => this.select(from, to),
    };
    this.tokens = new TokenText(`${name}, token by token`, host.canEdit ? edits : null);
    this.player = new Player(() => this.draw());
    this.actions = el("div", { class: "row buttons actions" });
    this.error = el("div", { class: "error", role: "alert", hidden: true });
    this.element = el(
      "article",
      { class: "stage", "data-state": "idle", "aria-label": name },
      el("header", {}, this.title, this.status),
      this.tokens.element,
      this.player.element,
      this.actions,
      this.error,
    );
  }

  get frame() {
    return this.frames[this.player.index] ?? null;
  }

  get final() {
    return this.frames.at(-1) ?? null;
  }

  get text() {
    return this.frame?.text ?? "";
  }

  get isRunning() {
    return this.element.dataset.state === "running";
  }

  #become(state) {
    this.element.dataset.state = state;
    this.element.setAttribute("aria-busy", state === "running");
  }

  // Runs a request; `base` is the frame that it continues.
  async run(request, { base = null, locks = new Set(), signal, step = "" } = {}) {
    Object.assign(this, { request, base, locks, selection: null });
    this.frames = [];
    this.error.hidden = true;
    this.#become("running");
    this.status.textContent = "waiting for the model …";
    try {
      const body = { ...request.body, diffusing: true, alternatives: ALTERNATIVES };
      const onWait = (seconds) => {
        this.status.textContent = `the server is busy; trying again in ${plural(seconds, "second")}`;
      };
      for await (const event of events(request.path, body, { signal, onWait })) {
        const state = stateOf(event);
        if (state === null || state.step === this.final?.step) continue;
        this.#take(frameOf(state, base));
      }
      this.player.finish();
      if (step !== "") this.player.seek(Number(step));
      this.#become("done");
      announce(`Done. ${this.final.text}`);
    } catch (error) {
      this.#fail(error);
    }
    this.draw();
  }

  #take(frame) {
    if (this.final && frame.step < this.final.step) this.frames = []; // a forbidden word: from noise again
    if (!this.frames.length) this.player.reset(frame.tokens.filter((token) => token.id === null).length + 1);
    this.frames.push(frame);
    this.player.extend();
  }

  #fail(error) {
    this.player.finish();
    if (this.past.length && !this.frames.length) this.undo(false);
    if (error.name === "AbortError") {
      this.#become(this.frames.length ? "done" : "idle");
      this.status.textContent = "stopped";
      announce("Stopped");
      return;
    }
    this.#become("error");
    this.status.textContent = "";
    this.error.replaceChildren(el("strong", {}, "That did not work. "), sentence(error.message));
    this.error.hidden = false;
  }

  draw() {
    const { frame } = this;
    this.element.classList.toggle("bare", !frame && !this.isRunning);
    if (!frame) {
      this.actions.replaceChildren();
      return;
    }
    const last = this.final.step;
    const { color } = this.host;
    this.tokens.render(frame, { color: color(), last, locks: this.locks, selection: this.selection });
    const masked = frame.tokens.filter((token) => token.id === null).length;
    const steps = this.isRunning ? `step ${frame.step}` : `step ${frame.step} of ${last}`;
    this.player.describe(`${steps} · ${masked ? `${masked} masked` : "all unmasked"}`);
    if (!this.isRunning && this.element.dataset.state === "done") {
      this.status.textContent = `${plural(this.final.calls, "network call")} · seed ${this.request.body.seed}`;
    } else if (this.isRunning) this.status.textContent = "generating …";
    this.#drawActions(masked);
  }

  #drawActions(masked) {
    const buttons = [];
    const add = (text, act) => {
      const onclick = (event) => {
        act();
        if (event.detail === 0) this.tokens.focus(); // by key: the button may be gone
      };
      buttons.push(el("button", { type: "button", onclick }, text));
    };
    if (!this.isRunning && this.host.canEdit) {
      const free = this.#unlocked().length;
      if (this.selection) {
        const { from, to } = this.selection;
        const span = Array.from({ length: to - from + 1 }, (_, offset) => from + offset);
        const isLocked = span.every((index) => this.locks.has(index));
        add(`Rewrite ${plural(span.length, "token")}`, () => this.remask(span, true));
        add(isLocked ? "Unlock them" : "Lock them", () => this.#lockAll(span, !isLocked));
        add("Clear the selection", () => this.select(null));
      } else if (masked) add("Continue from this step, with a new seed", () => this.remask([], true));
      else if (this.locks.size && free)
        add(`Redraw the ${plural(free, "token")} not locked`, () => this.remask(this.#unlocked()));
      if (this.past.length) add("Undo", () => this.undo());
    }
    this.actions.replaceChildren(...buttons);
  }

  // ---- edits -----------------------------------------------------------------------------------------------------

  #activate(index) {
    if (this.isRunning) return;
    const tool = this.host.tool();
    if (tool === "inspect") return;
    if (tool === "lock") this.toggleLock(index);
    else if (tool === "select") this.#extend(index);
    else this.remask([index]);
  }

  #extend(index) {
    const { selection } = this;
    const isStart = selection && selection.from === selection.to;
    if (isStart) this.select(Math.min(selection.from, index), Math.max(selection.from, index));
    else this.select(index, index);
  }

  select(from, to) {
    if (this.isRunning) return;
    this.selection = from === null ? null : { from, to };
    announce(from === null ? "Nothing selected" : `${plural(to - from + 1, "token")} selected`);
    this.draw();
  }

  toggleLock(index) {
    if (this.isRunning || !this.frame) return;
    this.#lockAll([index], !this.locks.has(index));
  }

  #lockAll(indices, isLocked) {
    this.locks = new Set(this.locks);
    for (const index of indices) isLocked ? this.locks.add(index) : this.locks.delete(index);
    this.selection = null;
    announce(`${plural(indices.length, "token")} ${isLocked ? "locked" : "unlocked"}`);
    this.draw();
    this.host.changed(this);
  }

  // What was generated and may be drawn anew.
  #unlocked() {
    return this.frame.tokens.flatMap(({ given }, index) => (given || this.locks.has(index) ? [] : [index]));
  }

  // Masks these positions of the frame that is shown, and continues; locked ones only if that is wanted.
  async remask(indices, evenLocked = false) {
    if (this.isRunning || !this.frame) return;
    const base = this.frame;
    if (!evenLocked && indices.some((index) => this.locks.has(index))) {
      const told = "This token is locked. Unlock it first: press L on it, or use the tool “Lock”.";
      this.host.say(told);
      announce(told);
      return;
    }
    const masked = new Set(indices);
    for (const index of masked) this.locks.delete(index);
    const tokens = base.tokens.map(({ id, given }, index) => ({
      id: masked.has(index) ? null : id,
      given,
      locked: this.locks.has(index),
    }));
    const { frames, request, locks } = this;
    this.past.push({ frames, request, locks: new Set(locks), base: this.base, kept: this.host.kept(this) });
    this.#become("running"); // from now on, so that no second edit comes between
    const text = await characters(base);
    await this.host.edit(this, tokens, text, base);
  }

  undo(isWanted = true) {
    const { frames, request, locks, base, kept } = this.past.pop();
    Object.assign(this, { frames, request, locks, base, selection: null });
    this.player.reset(frames.length);
    this.player.count = frames.length;
    this.player.finish();
    this.player.pause();
    this.player.seek(frames.length - 1);
    if (isWanted) {
      this.#become("done");
      this.error.hidden = true;
      announce("Undone");
    }
    this.host.restore(this, kept);
    this.draw();
  }
}

// The text of a frame, if its tokens are those that the server finds in it: then kept tokens keep their characters.
async function characters(frame) {
  if (frame.tokens.some((token) => token.id === null)) return "";
  try {
    const { tokens } = await post("v1/tokenize", { text: frame.text });
    const isSame =
      tokens.length === frame.tokens.length && tokens.every(({ id }, index) => id === frame.tokens[index].id);
    return isSame ? frame.text : "";
  } catch {
    return "";
  }
}
