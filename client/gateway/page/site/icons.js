// Icons, drawn with the colour of the text around them.
import { html } from "./vendor/htm-preact.js";

const icon = (path) => html`<svg class="icon" viewBox="0 0 20 20" aria-hidden="true" focusable="false"><path d=${path} /></svg>`;

export const icons = {
  send: icon("M10 16V4.5M5 9.2 10 4l5 5.2"),
  stop: html`<svg class="icon" viewBox="0 0 20 20" aria-hidden="true" focusable="false"><rect x="5.5" y="5.5" width="9" height="9" rx="2" fill="currentColor" stroke="none" /></svg>`,
  copy: icon("M7.5 7.5V4.5h8v8h-3M4.5 7.5h8v8h-8z"),
  done: icon("M4.5 10.5l3.5 3.5 7.5-8"),
  again: icon("M15.5 8A6 6 0 1 0 16 11.5M16 4v4.2h-4.2"),
  edit: icon("M4.5 15.5l.8-3.4 7.6-7.6 2.6 2.6-7.6 7.6zM11.4 6l2.6 2.6"),
  add: icon("M10 4.5v11M4.5 10h11"),
  close: icon("M5.5 5.5l9 9M14.5 5.5l-9 9"),
  chats: icon("M4 5.5h12M4 10h12M4 14.5h7"),
  settings: icon("M4 6.5h5.5M13.5 6.5H16M4 13.5h2.5M10.5 13.5H16M9.5 6.5a2 2 0 1 0 4 0a2 2 0 1 0-4 0M6.5 13.5a2 2 0 1 0 4 0a2 2 0 1 0-4 0"),
  onward: icon("M4.5 10h11M10.8 5.2 15.5 10l-4.7 4.8"),
  light: icon("M10 6.5a3.5 3.5 0 1 0 0 7a3.5 3.5 0 1 0 0-7M10 2.5v1.2M10 16.3v1.2M2.5 10h1.2M16.3 10h1.2M4.7 4.7l.9.9M14.4 14.4l.9.9M4.7 15.3l.9-.9M14.4 5.6l.9-.9"),
};

// The product's mark: a ring that four arcs close, as a circuit's hops close a model.
export const mark = html`<svg class="mark" viewBox="0 0 32 32" aria-hidden="true" focusable="false">
  <path d="M16 4.5a11.5 11.5 0 0 1 10 5.8" /><path d="M27.2 16.8a11.5 11.5 0 0 1-6.4 9.7" />
  <path d="M14.6 27.4a11.5 11.5 0 0 1-8.6-5.7" /><path d="M4.6 15a11.5 11.5 0 0 1 5-8.5" /></svg>`;
