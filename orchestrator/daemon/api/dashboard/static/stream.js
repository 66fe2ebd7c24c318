// Server-sent events over fetch: unlike EventSource it can send a key.

const RETRY_MS = 2000;
const HIDDEN_MS = 30_000;
const URL_OF_EVENTS = new URL("../events", import.meta.url);
const KEY = "outrider.key";

export const readKey = () => sessionStorage.getItem(KEY) ?? "";
export const keepKey = (key) => sessionStorage.setItem(KEY, key);
export const headers = () => (readKey() ? { Authorization: `Bearer ${readKey()}` } : {});

/** Follow the daemon for as long as the page is looked at. `told` gets each event, `linked` whether there is a
 * connection, and `refused` the message where a key is missing or wrong; then it ends. */
export async function follow({ told, linked, refused }) {
  for (;;) {
    await untilVisible();
    try {
      const refusal = await readOnce(told, linked);
      if (refusal) {
        linked(false, "no key");
        refused(refusal);
        return;
      }
      linked(false, "reconnecting");
    } catch (error) {
      if (!(error instanceof TypeError || error instanceof DOMException)) throw error;
      linked(false, "reconnecting");
    }
    await new Promise((resume) => setTimeout(resume, RETRY_MS));
  }
}

async function readOnce(told, linked) {
  const leaving = new AbortController();
  const watch = () => document.hidden && setTimeout(() => document.hidden && leaving.abort(), HIDDEN_MS);
  document.addEventListener("visibilitychange", watch);
  try {
    const answer = await fetch(URL_OF_EVENTS, { headers: headers(), signal: leaving.signal, cache: "no-store" });
    if (answer.status === 401 || answer.status === 403) return (await answer.json()).error.message;
    if (!answer.ok || !answer.body) return "";
    linked(true, "live");
    await readEvents(answer.body, told);
    return "";
  } finally {
    document.removeEventListener("visibilitychange", watch);
  }
}

async function readEvents(body, told) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    pending += value;
    const events = pending.split("\n\n");
    pending = events.pop();
    for (const event of events) {
      const lines = event.split("\n");
      const kind = lines.find((line) => line.startsWith("event: "))?.slice(7);
      const data = lines.find((line) => line.startsWith("data: "))?.slice(6);
      if (kind && data) told(kind, JSON.parse(data));
    }
  }
}

function untilVisible() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resume) => {
    const look = () => {
      if (document.hidden) return;
      document.removeEventListener("visibilitychange", look);
      resume();
    };
    document.addEventListener("visibilitychange", look);
  });
}
