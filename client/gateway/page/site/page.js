// The page: a chat, and beside it the swarm that answers. Nothing here comes from anywhere but the gateway.
import { html, render, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { Chat } from "./chat-view.js";
import { beginChat, chats, openId, removeChat } from "./chats.js";
import { running } from "./conversation.js";
import { keyWanted, loadModels } from "./gateway.js";
import { icons, mark } from "./icons.js";
import { SettingsDialog, applyTheme } from "./settings-view.js";
import { useStore } from "./store.js";
import { Swarm, picture } from "./swarm-view.js";
import { followSwarm, swarm } from "./swarm.js";

const MODELS_AGAIN_MS = 5000;

function Page() {
  const [shown, setShown] = useState("chat"); // of the two halves, where there is room for one
  const [listed, setListed] = useState(false);
  const [setting, setSetting] = useState(false);
  const wanted = useStore(keyWanted);
  useEffect(() => { if (wanted) setSetting(true); }, [wanted]);
  return html`<div class="page" data-shown=${shown}>
    <a class="skip" href="#message">Write a message</a>
    <header class="top">
      <button type="button" class="tool chats-button" onClick=${() => setListed(!listed)} aria-expanded=${listed ? "true" : "false"} aria-controls="chats" aria-label="Chats" title="Chats">${icons.chats}</button>
      <h1 class="brand">${mark}<span>MoLink</span></h1>
      <nav class="halves" aria-label="Parts of the page">
        ${[["chat", "Chat"], ["swarm", "Swarm"]].map(([value, name]) => html`<button key=${value} type="button" aria-pressed=${shown === value ? "true" : "false"} onClick=${() => setShown(value)}>${name}${value === "swarm" && html`<${Light} />`}</button>`)}
      </nav>
      <button type="button" class="tool new-button" onClick=${() => { beginChat(); setShown("chat"); }} aria-label="New chat" title="New chat">${icons.add}</button>
      <button type="button" class="tool" onClick=${() => setSetting(true)} aria-label="Settings" title="Settings">${icons.settings}</button>
    </header>
    <${Chats} listed=${listed} close=${() => setListed(false)} />
    <main class="halves-shown"><${Chat} /><${Swarm} /></main>
    ${setting && html`<${SettingsDialog} close=${() => setSetting(false)} keyWanted=${wanted} />`}
  </div>`;
}

// Whether the swarm can answer, where it is not to be seen.
function Light() {
  const { ready, known, connected } = useStore(swarm);
  return known && html`<span class=${ready && connected ? "light" : "light out"}><span class="unseen">${ready && connected ? ", ready" : ", cannot answer now"}</span></span>`;
}

function Chats({ listed, close }) {
  const all = useStore(chats);
  const open = useStore(openId);
  const busy = useStore(running);
  const first = useRef(null);
  useEffect(() => { if (listed) first.current?.focus(); }, [listed]);
  return html`<nav id="chats" class=${listed ? "chats listed" : "chats"} aria-label="Chats" onKeyDown=${(event) => event.key === "Escape" && close()}>
    <button type="button" class="begin" ref=${first} onClick=${() => { beginChat(); close(); }}>${icons.add} New chat</button>
    <ul>${all.filter(({ messages }) => messages.length).map((chat) => html`<li key=${chat.id}>
      <button type="button" class="chat-name" aria-current=${chat.id === open ? "true" : "false"} onClick=${() => { openId.set(chat.id); close(); }}>${chat.title || "New chat"}</button>
      <button type="button" class="tool" disabled=${busy?.chatId === chat.id} onClick=${() => removeChat(chat.id)} aria-label=${`Delete the chat ${chat.title}`} title="Delete">${icons.close}</button>
    </li>`)}</ul>
    <p class="quiet kept">Chats are kept in this browser only.</p>
  </nav>`;
}

async function keepModels() {
  for (;;) {
    try {
      await loadModels();
      return;
    } catch { /* the gateway says so elsewhere */ }
    await new Promise((resume) => setTimeout(resume, MODELS_AGAIN_MS));
  }
}

applyTheme();
document.getElementById("page").replaceChildren();
render(html`<${Page} />`, document.getElementById("page"));
performance.mark("drawn");
keepModels();
followSwarm();
globalThis.molinkPicture = picture; // for whoever measures it
