// The chats of this browser: they are kept here and nowhere else.
import { createStore, recall, remember } from "./store.js";

const CHATS = "molink.chats.1";
const SETTINGS = "molink.settings.1";
const MOST_CHATS = 50;
const TITLE_CHARACTERS = 48;

export const DEFAULTS = { model: "", mode: "chat", system: "", temperature: 0.7, top_p: 1, max_tokens: 256, seed: "" };

export const settings = createStore({ ...DEFAULTS, ...recall(SETTINGS, {}) });
settings.watch((value) => remember(SETTINGS, value));

export const newId = () => [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

const emptyChat = () => ({ id: newId(), title: "", at: Date.now(), messages: [] });

function lyingThere() {
  const kept = recall(CHATS, []);
  return Array.isArray(kept) ? kept.filter((chat) => chat?.id && Array.isArray(chat.messages)) : [];
}

const orEmpty = (all) => (all.length ? all : [emptyChat()]);
const found = lyingThere();

export const chats = createStore(orEmpty(found));
export const openId = createStore(chats.get()[0].id);

// What a tab's own chats and those that lie there now are together. Of one that both have, the newer is taken. One that
// only one of them has is new there, unless this tab has `seen` it lie there: then the other has deleted it.
export function merged(own, there, seen) {
  const theirs = new Map(there.map((chat) => [chat.id, chat]));
  const ours = new Set(own.map(({ id }) => id));
  const newer = (chat) => (theirs.get(chat.id)?.at > chat.at ? theirs.get(chat.id) : chat);
  return [
    ...there.filter(({ id }) => !ours.has(id) && !seen.has(id)),
    ...own.filter(({ id }) => theirs.has(id) || !seen.has(id)).map(newer),
  ];
}

const seen = new Set(found.map(({ id }) => id));
let unsaved = false;
let saving = 0;
chats.watch(() => {
  unsaved = true;
  clearTimeout(saving);
  saving = setTimeout(save, 400);
});
addEventListener("pagehide", save);

// The oldest go first where a browser has no room. Those are not deleted: they are tried again.
function save() {
  if (!unsaved) return;
  const all = merged(chats.get(), lyingThere(), seen).filter((chat) => chat.messages.length);
  let kept = all.slice(0, MOST_CHATS);
  while (!remember(CHATS, kept)) {
    if (kept.length < 2) return;
    kept = kept.slice(0, Math.floor(kept.length / 2));
  }
  for (const { id } of all) seen.delete(id);
  for (const { id } of kept) seen.add(id);
  unsaved = false;
}

let still = false;
// What other tabs write is taken over, but while an answer is written, which it could take the chat from: afterwards.
export function standStill(wanted) {
  still = wanted;
  takeOver();
}

function takeOver() {
  if (still) return;
  const there = lyingThere();
  const all = merged(chats.get(), there, seen);
  for (const { id } of there) seen.add(id);
  const before = unsaved;
  chats.set(orEmpty(all));
  unsaved = before; // what came from there need not be written there again
  if (!all.some(({ id }) => id === openId.get())) openId.set(chats.get()[0].id);
}
addEventListener("storage", ({ key }) => {
  if (key === CHATS || key === null) takeOver(); // null: all was cleared
});

export const openChat = () => chats.get().find((chat) => chat.id === openId.get()) ?? chats.get()[0];

export function beginChat() {
  const empty = chats.get().find((chat) => !chat.messages.length);
  const chat = empty ?? emptyChat();
  chats.set([chat, ...chats.get().filter((one) => one !== chat)]);
  openId.set(chat.id);
}

export function removeChat(id) {
  const left = chats.get().filter((chat) => chat.id !== id);
  chats.set(orEmpty(left));
  if (openId.get() === id) openId.set(chats.get()[0].id);
}

export function changeChat(id, change) {
  chats.set(chats.get().map((chat) => {
    if (chat.id !== id) return chat;
    const changed = { ...chat, ...change(chat), at: Date.now() };
    const first = changed.messages.find((message) => message.role === "user");
    return { ...changed, title: first ? shortened(first.text) : "" };
  }));
}

export function changeMessage(chatId, messageId, change) {
  changeChat(chatId, (chat) => ({
    messages: chat.messages.map((message) => (message.id === messageId ? { ...message, ...change(message) } : message)),
  }));
}

function shortened(text) {
  const line = text.trim().split("\n")[0];
  return line.length > TITLE_CHARACTERS ? `${line.slice(0, TITLE_CHARACTERS - 1)}…` : line;
}
