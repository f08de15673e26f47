// The server: JSON requests, server-sent events, and errors that say what to do.

export class ApiError extends Error {
  constructor(message, { status = 0, param = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { status, param, retryAfter });
  }
}

const KEY = "diffusionbert-key";

export const address = (path) => new URL(path, document.baseURI.split("#")[0]).href;

export const hasKey = () => sessionStorage.getItem(KEY) !== null;

async function ask(path, options) {
  const headers = { ...options.headers };
  if (hasKey()) headers.Authorization = `Bearer ${sessionStorage.getItem(KEY)}`;
  let response;
  try {
    response = await fetch(address(path), { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer. Is “diffusionbert serve” still running?");
  }
  if (response.status === 401) {
    await askForKey();
    return ask(path, options);
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  const { error } = await response.json().catch(() => ({}));
  const message = error?.message ?? `The server answered with ${response.status}.`;
  const retryAfter = Number(response.headers.get("retry-after")) || null;
  return new ApiError(message, { status: response.status, param: error?.param ?? null, retryAfter });
}

let asked = null;

function askForKey() {
  sessionStorage.removeItem(KEY);
  asked ??= new Promise((resolve, reject) => {
    const dialog = document.getElementById("key-dialog");
    const input = document.getElementById("key");
    input.value = "";
    dialog.addEventListener(
      "close",
      () => {
        asked = null;
        if (dialog.returnValue !== "ok") return reject(new ApiError("This server needs an API key.", { status: 401 }));
        sessionStorage.setItem(KEY, input.value.trim());
        input.value = "";
        resolve();
      },
      { once: true },
    );
    dialog.returnValue = "";
    dialog.showModal();
  });
  return asked;
}

export async function get(path) {
  return (await ask(path, {})).json();
}

const posted = (body, signal) => ({
  method: "POST",
  headers: { "Content-Type": "application/json" },
  body: JSON.stringify(body),
  signal,
});

const pause = (seconds, signal) =>
  new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, 1000 * seconds);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    });
  });

// Waits for a place in the queue where the server says when to come again.
async function waiting(path, body, { signal, onWait }) {
  for (let attempt = 0; ; attempt += 1) {
    try {
      return await ask(path, posted(body, signal));
    } catch (error) {
      if (error.status !== 429 || attempt >= 5) throw error;
      const seconds = Math.min(error.retryAfter ?? 1, 30);
      onWait?.(seconds);
      await pause(seconds, signal);
    }
  }
}

export async function post(path, body, options = {}) {
  return (await waiting(path, body, options)).json();
}

// Yields the events of a stream; an error in it is thrown.
export async function* events(path, body, options = {}) {
  const response = await waiting(path, { ...body, stream: true }, options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new ApiError("The answer broke off. Try again.");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: ?/, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message, { param: event.error.param });
      yield event;
    }
  }
}
