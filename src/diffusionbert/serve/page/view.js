// What all tasks share: a form, a run that can be stopped, examples while there is nothing, errors, and a link.

import { post } from "./api.js";
import { announce, el, prefersStill, sentence } from "./dom.js";
import { readForm, writeForm } from "./form.js";
import { exportedPage, shareRow } from "./share.js";
import { defaults, encode, FIELDS } from "./state.js";

export class View {
  // `app`: info, linked(view).
  constructor(app, task, specimen, examples) {
    Object.assign(this, { app, task, snapshot: null, controller: null });
    this.root = document.querySelector(`[data-view="${task}"]`);
    this.form = this.root.querySelector("form");
    this.results = this.root.querySelector("[data-results]");
    this.submit = this.form.querySelector('[type="submit"]');
    this.label = this.submit.textContent;
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.controller) this.controller.abort();
      else this.start(this.values());
    });
    this.form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.form.requestSubmit();
    });
    this.results.append(this.#empty(specimen, examples));
    this.error = el("div", { class: "error", role: "alert", hidden: true });
  }

  values() {
    return { ...readForm(this.form, FIELDS[this.task]), run: "", canvas: "", text: "", locks: "", step: "", spans: "" };
  }

  show(values) {
    writeForm(this.form, values);
  }

  get link() {
    return encode(this.task, this.snapshot ?? this.values());
  }

  get url() {
    return new URL(this.link, document.baseURI).href;
  }

  #empty(specimen, examples) {
    const shown = specimen.map((part) => part ?? el("span", { class: "token masked" }));
    const buttons = examples.map(([label, values]) =>
      el(
        "button",
        {
          type: "button",
          onclick: () => {
            this.show({ ...defaults(this.task), ...values });
            this.form.requestSubmit();
          },
        },
        label,
      ),
    );
    return el(
      "div",
      { class: "empty" },
      el("p", { class: "tokens", "aria-hidden": "true" }, ...shown),
      el("p", {}, "Nothing here yet. Write something, or try one of these:"),
      el("div", { class: "row buttons" }, ...buttons),
    );
  }

  // Runs with these values; a subclass does the work in `run`.
  async start(values) {
    this.snapshot = values;
    this.#reach();
    await this.working((signal) => this.run(values, signal));
  }

  // Does work that can be stopped, and is by other work.
  async working(work) {
    this.controller?.abort();
    const controller = new AbortController();
    this.controller = controller;
    this.busy(true);
    try {
      await work(controller.signal);
    } catch (error) {
      if (error.name !== "AbortError") this.fail(error);
    } finally {
      if (this.controller === controller) {
        this.controller = null;
        this.busy(false);
      }
      this.app.linked(this);
    }
  }

  // On a narrow screen, the results are below the form.
  #reach() {
    if (this.results.getBoundingClientRect().top < window.innerHeight * 0.6) return;
    this.results.scrollIntoView({ behavior: prefersStill() ? "auto" : "smooth" });
  }

  busy(isBusy) {
    this.root.setAttribute("aria-busy", isBusy);
    this.submit.textContent = isBusy ? "Stop" : this.label;
    this.submit.classList.toggle("stop", isBusy);
    if (isBusy) {
      this.error.hidden = true;
      announce("Working");
    }
  }

  fail(error) {
    this.error.replaceChildren(el("strong", {}, "That did not work. "), sentence(error.message));
    this.error.hidden = false;
    this.results.replaceChildren(this.error);
  }
}

// A task that is answered at once; a subclass sets `shown`, the elements of its answer.
export class AnswerView extends View {
  // The row that shares the answer; `text` makes the answer's text, `request` a request of form values.
  sharing(text, request) {
    return shareRow({
      text,
      link: () => this.url,
      requests: () => [request(this.snapshot)],
      exported: () =>
        exportedPage([el("p", { class: "lead" }, this.app.credit), ...this.shown.map((one) => one.cloneNode(true))]),
    });
  }

  // The answer's data, while the results say what is waited for.
  async ask({ path, body }, busy, signal) {
    const say = (text) => this.results.replaceChildren(el("p", { class: "busy" }, text));
    say(busy);
    const onWait = (seconds) => say(`The server is busy; trying again in ${seconds} s`);
    return (await post(path, body, { signal, onWait })).data;
  }
}
