// Settings: how the model answers, how the page looks, and a key where the gateway wants one.
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { DEFAULTS, settings } from "./chats.js";
import { apiKey, loadModels, setApiKey } from "./gateway.js";
import { icons } from "./icons.js";
import { recall, remember, useStore } from "./store.js";

const THEME = "molink.theme";

export function applyTheme(theme = recall(THEME, "auto")) {
  remember(THEME, theme);
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
}

export function SettingsDialog({ close, keyWanted }) {
  const dialog = useRef(null);
  const values = useStore(settings);
  const [theme, setTheme] = useState(recall(THEME, "auto"));
  const [key, setKey] = useState(apiKey());
  const asksKey = useRef(keyWanted || Boolean(apiKey()));
  useEffect(() => { dialog.current.showModal(); }, []);
  const change = (name, value) => settings.update((all) => ({ ...all, [name]: value }));
  const number = (name) => (event) => { if (event.currentTarget.validity.valid && event.currentTarget.value !== "") change(name, Number(event.currentTarget.value)); };
  const leave = () => dialog.current.close();
  const onClose = () => {
    if (asksKey.current && key !== apiKey()) { setApiKey(key.trim()); loadModels().catch(() => {}); }
    close();
  };
  return html`<dialog ref=${dialog} class="settings" aria-labelledby="settings-title" onClose=${onClose} onClick=${(event) => event.target === dialog.current && leave()}>
    <form method="dialog" onSubmit=${(event) => { event.preventDefault(); leave(); }}>
      <div class="dialog-head"><h2 id="settings-title">Settings</h2><button type="button" class="tool" onClick=${leave} aria-label="Close the settings">${icons.close}</button></div>
      ${asksKey.current && html`<div class="setting wide"><label for="key">API key</label>
        <input id="key" type="password" autocomplete="off" value=${key} onInput=${(event) => setKey(event.currentTarget.value)} aria-describedby="key-help" />
        <p id="key-help" class="quiet">${keyWanted ? "This gateway wants a key. " : ""}It is forgotten when this tab is closed.</p></div>`}
      <div class="setting wide"><label for="system">System prompt</label>
        <textarea id="system" rows="3" value=${values.system} placeholder="You are a helpful assistant." onInput=${(event) => change("system", event.currentTarget.value)}></textarea></div>
      <div class="setting"><label for="temperature">Temperature <output>${values.temperature}</output></label>
        <input id="temperature" type="range" min="0" max="2" step="0.1" value=${values.temperature} onInput=${number("temperature")} /></div>
      <div class="setting"><label for="top_p">Top p <output>${values.top_p}</output></label>
        <input id="top_p" type="range" min="0.05" max="1" step="0.05" value=${values.top_p} onInput=${number("top_p")} /></div>
      <div class="setting"><label for="max_tokens">Longest answer, in tokens</label>
        <input id="max_tokens" type="number" min="1" max="1000000" value=${values.max_tokens} onInput=${number("max_tokens")} /></div>
      <div class="setting"><label for="seed">Seed</label>
        <input id="seed" type="number" step="1" min="0" max="9007199254740991" value=${values.seed} placeholder="another each time" onInput=${(event) => event.currentTarget.validity.valid && change("seed", event.currentTarget.value)} /></div>
      <fieldset class="setting wide"><legend>Appearance</legend><div class="switch">
        ${[["auto", "As the system"], ["light", "Light"], ["dark", "Dark"]].map(([value, name]) => html`<label key=${value}>
          <input type="radio" name="theme" value=${value} checked=${theme === value} onChange=${() => { setTheme(value); applyTheme(value); }} /><span>${name}</span></label>`)}
      </div></fieldset>
      <div class="dialog-foot">
        <button type="button" class="button quiet-button" onClick=${() => settings.set({ ...DEFAULTS, model: values.model, mode: values.mode })}>As at first</button>
        <button type="submit" class="button">Done</button>
      </div>
    </form>
  </dialog>`;
}
