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

function restored() {
  const kept = recall(CHATS, []);
  const usable = Array.isArray(kept) ? kept.filter((chat) => chat?.id && Array.isArray(chat.messages)) : [];
  return usable.length ? usable : [emptyChat()];
}

export const chats = createStore(restored());
export const openId = createStore(chats.get()[0].id);

let saving = 0;
chats.watch(() => {
  clearTimeout(saving);
  saving = setTimeout(save, 400);
});
addEventListener("pagehide", save);

// The oldest go first where a browser has no room.
function save() {
  let kept = chats.get().filter((chat) => chat.messages.length).slice(0, MOST_CHATS);
  while (!remember(CHATS, kept) && kept.length > 1) kept = kept.slice(0, Math.floor(kept.length / 2));
}

export const openChat = () => chats.get().find((chat) => chat.id === openId.get()) ?? chats.get()[0];

export function beginChat() {
  const empty = chats.get().find((chat) => !chat.messages.length);
  const chat = empty ?? emptyChat();
  chats.set([chat, ...chats.get().filter((one) => one !== chat)].slice(0, MOST_CHATS));
  openId.set(chat.id);
}

export function removeChat(id) {
  const left = chats.get().filter((chat) => chat.id !== id);
  chats.set(left.length ? left : [emptyChat()]);
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
