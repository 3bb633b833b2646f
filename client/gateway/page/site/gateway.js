// What the page asks of the gateway: models, generations and the swarm's events, with a key where one is wanted.
import { createStore } from "./store.js";
import { events } from "./sse.js";

const KEY = "molink.key";

// Whether the gateway has refused the page for want of a key.
export const keyWanted = createStore(false);
export const models = createStore([]);

export class GatewayError extends Error {
  constructor(message, status = 0, code = null, parameter = null) {
    super(message);
    Object.assign(this, { status, code, parameter });
  }
}

export function apiKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

export function setApiKey(key) {
  try {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  } catch { /* it is asked for again */ }
  keyWanted.set(false);
}

export async function ask(path, { body, tag, signal } = {}) {
  const headers = {};
  if (apiKey()) headers.Authorization = `Bearer ${apiKey()}`;
  if (body) headers["Content-Type"] = "application/json";
  if (tag) headers["X-Molink-Tag"] = tag;
  let response;
  try {
    response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal, credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new GatewayError("The gateway cannot be reached. Is it still running?");
  }
  if (response.ok) return response;
  if (response.status === 401) keyWanted.set(true);
  throw await refusal(response);
}

async function refusal(response) {
  let said = {};
  try {
    said = (await response.json()).error ?? {};
  } catch { /* not the gateway's own words */ }
  const text = typeof said.message === "string" ? said.message : `The gateway answered ${response.status}.`;
  return new GatewayError(text, response.status, said.code, said.param);
}

export async function loadModels() {
  const { data } = await (await ask("/v1/models")).json();
  models.set(data);
}

// Yields the text of one generation as it comes. The last thing is {finish} with why it ended, and {usage}.
export async function* generate(path, body, { tag, signal }) {
  const response = await ask(path, { body: { ...body, stream: true, stream_options: { include_usage: true } }, tag, signal });
  for await (const event of events(response)) {
    if (event.data === "[DONE]") return;
    const chunk = JSON.parse(event.data);
    if (chunk.error) throw new GatewayError(chunk.error.message, 0, chunk.error.code);
    const choice = chunk.choices?.[0];
    const text = choice?.delta?.content ?? choice?.text ?? "";
    if (text) yield { text };
    if (choice?.finish_reason) yield { finish: choice.finish_reason };
    if (chunk.usage) yield { usage: chunk.usage };
  }
  throw new GatewayError("The answer broke off: the connection to the gateway ended.");
}
