// One generation at a time: sent, stopped, made again, and what it took.
import { changeChat, changeMessage, chats, newId, openChat, settings, standStill } from "./chats.js";
import { generate, models } from "./gateway.js";
import { createStore } from "./store.js";
import { figuresOf, lastTag } from "./swarm.js";

const FIGURES_WITHIN_MS = 1500;

// The generation that runs, if one does: {chatId, messageId, abort}.
export const running = createStore(null);
running.watch((now) => standStill(now !== null));
// What a screen reader is told: that an answer has begun, and the whole of it.
export const announced = createStore("");

export function stop() {
  running.get()?.abort();
}

export function send(text) {
  const chat = openChat();
  if (running.get() || !text.trim()) return;
  changeChat(chat.id, ({ messages }) => ({ messages: [...messages, { id: newId(), role: "user", text }] }));
  answer(chat.id);
}

export function regenerate(chatId, messageId) {
  if (running.get()) return;
  changeChat(chatId, ({ messages }) => ({ messages: messages.slice(0, messages.findIndex((one) => one.id === messageId)) }));
  answer(chatId);
}

export function edit(chatId, messageId, text) {
  if (running.get() || !text.trim()) return;
  changeChat(chatId, ({ messages }) => {
    const at = messages.findIndex((one) => one.id === messageId);
    return { messages: [...messages.slice(0, at), { ...messages[at], text }] };
  });
  answer(chatId);
}

// Lets the model write on where its text ends.
export function goOn(chatId) {
  if (!running.get()) answer(chatId);
}

async function answer(chatId) {
  const abort = new AbortController();
  const message = { id: newId(), role: "assistant", text: "", mode: settings.get().mode, tag: newId() };
  changeChat(chatId, ({ messages }) => ({ messages: [...messages, message] }));
  running.set({ chatId, messageId: message.id, abort: () => abort.abort() });
  lastTag.set(message.tag);
  announced.set("The model is answering.");
  const times = { asked: performance.now(), first: 0, last: 0, pieces: 0 };
  const note = (change) => changeMessage(chatId, message.id, change);
  try {
    for await (const piece of pieces(chatId, message, abort.signal)) take(piece, times, note);
  } catch (error) {
    if (error.name === "AbortError") note(() => ({ finish: "stopped" }));
    else note(() => ({ error: error.message }));
  }
  const ended = openChatMessage(chatId, message.id);
  running.set(null);
  announced.set(ended?.error ? `The answer failed. ${ended.error}` : `The answer: ${ended?.text ?? ""}`);
  if (times.first) note(({ usage }) => ({ took: timesOf(times, usage) }));
  const figures = await figuresOf(message.tag, FIGURES_WITHIN_MS);
  if (figures) note(() => ({ circuit: figures }));
}

function take(piece, times, note) {
  if (piece.text) {
    times.last = performance.now();
    times.first ||= times.last;
    times.pieces += 1;
    note(({ text }) => ({ text: text + piece.text }));
  }
  if (piece.finish) note(() => ({ finish: piece.finish }));
  if (piece.usage) note(() => ({ usage: piece.usage }));
}

// As the browser saw it: pieces that came together count as one where the gateway did not say how many tokens it were.
function timesOf({ asked, first, last, pieces: count }, usage) {
  const tokens = usage?.completion_tokens ?? count;
  return { ttft_ms: first - asked, tpot_ms: tokens > 1 ? (last - first) / (tokens - 1) : null, tokens };
}

// A model without a chat template is given the whole as one text, then and from then on.
async function* pieces(chatId, message, signal) {
  if (message.mode === "chat") {
    try {
      yield* generate("/v1/chat/completions", { ...sampling(), messages: spoken(chatId) }, { tag: message.tag, signal });
      return;
    } catch (error) {
      if (error.code !== "no_chat_template") throw error;
      settings.update((value) => ({ ...value, mode: "text" }));
      changeMessage(chatId, message.id, () => ({ mode: "text", note: "This model knows no chats: it goes on with your text instead." }));
    }
  }
  yield* generate("/v1/completions", { ...sampling(), prompt: written(chatId) }, { tag: message.tag, signal });
}

function sampling() {
  const { model, temperature, top_p, max_tokens, seed } = settings.get();
  const known = models.get();
  const named = known.some((one) => one.id === model) ? model : known[0]?.id ?? model;
  return { model: named, temperature, top_p, max_tokens, ...(seed === "" ? {} : { seed: Number(seed) }) };
}

const messagesOf = (chatId) => openChatById(chatId)?.messages ?? [];

// Many chat templates want user and assistant to take turns: an answer that failed or never began is left out with what
// was asked, and one that was written on is one.
function spoken(chatId) {
  const { system } = settings.get();
  const said = system.trim() ? [{ role: "system", content: system }] : [];
  let asked = [];
  for (const { role, text, error } of messagesOf(chatId)) {
    if (role === "user") asked = [{ role, content: text }];
    else if (text && !error) {
      said.push(...asked);
      asked = [];
      if (said.at(-1)?.role === role) said.at(-1).content += text;
      else said.push({ role, content: text });
    }
  }
  return [...said, ...asked];
}

const written = (chatId) => messagesOf(chatId).map(({ text }) => text).join("");
const openChatById = (chatId) => chats.get().find((chat) => chat.id === chatId);
const openChatMessage = (chatId, messageId) => messagesOf(chatId).find((one) => one.id === messageId);
