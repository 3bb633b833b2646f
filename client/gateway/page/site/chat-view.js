// The chat: messages, what is done with them, and where the next one is written.
import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/htm-preact.js";
import { chats, openChat, openId, settings } from "./chats.js";
import { announced, edit, goOn, regenerate, running, send, stop } from "./conversation.js";
import { counted, ms, rate } from "./format.js";
import { models } from "./gateway.js";
import { icons, mark } from "./icons.js";
import { useStore } from "./store.js";

const RENDER_EVERY_MS = 90;
const NEAR_PX = 80; // so near to its end a chat follows what is written
const STARTS = {
  chat: ["Explain how a rainbow forms.", "Write a haiku about machines that think together.", "Which questions should I ask before I move house?"],
  text: ["ROMEO:\n", "Once upon a time, ", "The capital of France is"],
};

let markdown = null;
const loadMarkdown = async () => (markdown ??= (await import("./markdown.js")).render);

export function Chat() {
  useStore(chats);
  useStore(openId);
  const now = useStore(running);
  const said = useStore(announced);
  const chat = openChat();
  const list = useRef(null);
  const follows = useRef(true);
  useLayoutEffect(() => {
    if (follows.current && list.current) list.current.scrollTop = list.current.scrollHeight;
  });
  const onScroll = ({ currentTarget: { scrollTop, scrollHeight, clientHeight } }) => {
    follows.current = scrollHeight - scrollTop - clientHeight < NEAR_PX;
  };
  const last = chat.messages.at(-1);
  return html`<section class="chat" aria-labelledby="chat-title">
    <h2 id="chat-title" class="unseen">${chat.title || "New chat"}</h2>
    <div class="messages" ref=${list} onScroll=${onScroll} tabindex="0" role="region" aria-label="Messages">
      ${chat.messages.length === 0 ? html`<${Welcome} />` : html`<ol class="thread">
        ${chat.messages.map((message) => html`<${Message} key=${message.id} chatId=${chat.id} message=${message}
          writes=${now?.messageId === message.id} isLast=${message === last} />`)}
      </ol>`}
    </div>
    <p class="unseen" role="status" aria-live="polite">${said}</p>
    <${Composer} chatId=${chat.id} busy=${Boolean(now)} />
  </section>`;
}

function Welcome() {
  const { mode } = useStore(settings);
  return html`<div class="welcome">
    ${mark}
    <p class="welcome-title">${mode === "chat" ? "Ask the swarm" : "Begin a text"}</p>
    <p class="quiet">${mode === "chat" ? "Several people’s machines hold this model together. Watch them answer." : "The model goes on where your text ends."}</p>
    <ul class="starts">${STARTS[mode].map((text) => html`<li key=${text}><button type="button" class="start" onClick=${() => send(text)}>${text.trim()}</button></li>`)}</ul>
  </div>`;
}

function Message({ chatId, message, writes, isLast }) {
  const [changing, setChanging] = useState(false);
  const own = message.role === "user";
  if (changing) {
    const save = (text) => { setChanging(false); edit(chatId, message.id, text); };
    return html`<li class="message own"><${Editor} text=${message.text} onSave=${save} onLeave=${() => setChanging(false)} /></li>`;
  }
  return html`<li class=${`message ${own ? "own" : "model"}${writes ? " writes" : ""}`} aria-busy=${writes ? "true" : "false"}>
    <h3 class="unseen">${own ? "You" : "Model"}</h3>
    ${message.note && html`<p class="note">${message.note}</p>`}
    ${own || message.mode === "text" ? html`<div class="plain">${message.text}</div>` : html`<${Markdown} text=${message.text} writes=${writes} />`}
    ${writes && !message.text && html`<span class="waits" aria-hidden="true"></span>`}
    ${message.error && html`<p class="failure" role="alert">${message.error}</p>`}
    ${!writes && html`<div class="beneath">
      <${Copy} text=${message.text} label=${own ? "Copy your message" : "Copy the answer"} />
      ${own && html`<button type="button" class="tool" onClick=${() => setChanging(true)} aria-label="Edit your message" title="Edit">${icons.edit}</button>`}
      ${!own && html`<button type="button" class="tool" onClick=${() => regenerate(chatId, message.id)} aria-label="Answer again" title="Again">${icons.again}</button>`}
      ${!own && isLast && message.mode === "text" && html`<button type="button" class="tool worded" onClick=${() => goOn(chatId)}>${icons.onward} Go on</button>`}
      ${!own && html`<span class="took">${tookText(message)}</span>`}
    </div>`}
  </li>`;
}

function tookText({ took, finish, circuit }) {
  const parts = [];
  if (took) parts.push(counted(took.tokens, "token"), `first after ${ms(took.ttft_ms)}`, rate(took.tpot_ms));
  if (circuit) parts.push(counted(circuit.hops.length, "hop"));
  if (finish === "stopped") parts.push("stopped");
  if (finish === "length") parts.push("at its longest");
  return parts.filter(Boolean).join(" · ");
}

// What is written is parsed again now and then, not with each token: a long answer would take longer and longer.
function Markdown({ text, writes }) {
  const place = useRef(null);
  const drawn = useRef({ wanted: "", text: "", at: 0, timer: 0 });
  useEffect(() => {
    const state = drawn.current;
    const draw = async () => {
      const render = await loadMarkdown().catch(() => (plain) => document.createTextNode(plain));
      // Meanwhile more may have come, or all of it: what is drawn is always the newest.
      if (!place.current || state.text === state.wanted) return;
      Object.assign(state, { text: state.wanted, at: performance.now() });
      place.current.replaceChildren(render(state.text));
    };
    state.wanted = text;
    clearTimeout(state.timer);
    state.timer = setTimeout(draw, writes ? Math.max(0, RENDER_EVERY_MS - (performance.now() - state.at)) : 0);
  }, [text, writes]);
  useEffect(() => () => clearTimeout(drawn.current.timer), []);
  return html`<div class="prose" ref=${place}></div>`;
}

export function Copy({ text, label, worded = false }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    if (!await copied(text)) return;
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  return html`<button type="button" class=${worded ? "tool worded" : "tool"} onClick=${copy} aria-label=${done ? "Copied" : label} title="Copy">
    ${done ? icons.done : icons.copy}${worded && (done ? " Copied" : " Copy")}</button>`;
}

// A page that did not come over TLS, nor from this machine, has no clipboard but the old way.
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = document.createElement("textarea");
    field.value = text;
    document.body.append(field);
    field.select();
    const worked = document.execCommand("copy");
    field.remove();
    return worked;
  }
}

function Editor({ text, onSave, onLeave }) {
  const field = useRef(null);
  useEffect(() => { field.current.focus(); grow(field.current); }, []);
  const onKeyDown = (event) => {
    if (event.key === "Escape") onLeave();
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); onSave(event.currentTarget.value); }
  };
  return html`<div class="editor">
    <label class="unseen" for="editor">Your message</label>
    <textarea id="editor" ref=${field} rows="1" onInput=${(event) => grow(event.currentTarget)} onKeyDown=${onKeyDown} defaultValue=${text}></textarea>
    <div class="beneath">
      <button type="button" class="button quiet-button" onClick=${onLeave}>Leave it</button>
      <button type="button" class="button" onClick=${() => onSave(field.current.value)}>Send again</button>
    </div>
  </div>`;
}

function Composer({ chatId, busy }) {
  const [text, setText] = useState("");
  const { mode, model } = useStore(settings);
  const known = useStore(models);
  const field = useRef(null);
  useEffect(() => { if (matchMedia("(hover: hover)").matches) field.current.focus(); }, [chatId]);
  useLayoutEffect(() => grow(field.current), [text]);
  const submit = (event) => {
    event?.preventDefault();
    if (busy || !text.trim()) return;
    send(text);
    setText("");
  };
  const onKeyDown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
    if (event.key === "Escape" && busy) stop();
  };
  const change = (values) => settings.update((value) => ({ ...value, ...values }));
  return html`<form class="composer" onSubmit=${submit}>
    <div class="field">
      <label class="unseen" for="message">${mode === "chat" ? "Your message" : "Your text"}</label>
      <textarea id="message" ref=${field} rows="1" value=${text} onInput=${(event) => setText(event.currentTarget.value)} onKeyDown=${onKeyDown}
        placeholder=${mode === "chat" ? "Ask anything" : "Begin a text, and the model goes on"}></textarea>
      ${busy
        ? html`<button type="button" class="go" onClick=${stop} aria-label="Stop the answer">${icons.stop}</button>`
        : html`<button type="submit" class="go" disabled=${!text.trim()} aria-label="Send">${icons.send}</button>`}
    </div>
    <div class="choices">
      <fieldset class="switch"><legend class="unseen">What the model does</legend>
        ${[["chat", "Chat"], ["text", "Complete"]].map(([value, name]) => html`<label key=${value}>
          <input type="radio" name="mode" value=${value} checked=${mode === value} onChange=${() => change({ mode: value })} /><span>${name}</span></label>`)}
      </fieldset>
      <label class="unseen" for="model">Model</label>
      <select id="model" value=${known.some((one) => one.id === model) ? model : known[0]?.id} onChange=${(event) => change({ model: event.currentTarget.value })}>
        ${known.length ? known.map(({ id }) => html`<option key=${id} value=${id}>${id}</option>`) : html`<option value="">No model yet</option>`}
      </select>
    </div>
  </form>`;
}

function grow(field) {
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight, 220)}px`;
}
