// The swarm as the gateway tells it: the whole at first, then what changes.
import { ask } from "./gateway.js";
import { events } from "./sse.js";
import { createStore } from "./store.js";

const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 15000;
const MOST_HAPPENINGS = 40;

export const swarm = createStore({ known: false, connected: false, models: [], peers: new Map(), circuits: [], planned: null, invites: [] });
// Who came, went and changed, newest first.
export const happenings = createStore([]);
// The tag of the latest message of this page, and the latest figures of its circuit.
export const lastTag = createStore("");
export const lastCircuit = createStore(null);
export const selected = createStore("");

const waiting = new Map();

export async function followSwarm() {
  let pauseMs = FIRST_PAUSE_MS;
  for (;;) {
    try {
      const response = await ask("/v1/swarm/events");
      for await (const { name, data } of events(response)) {
        pauseMs = FIRST_PAUSE_MS;
        take(name, JSON.parse(data));
      }
    } catch { /* it is tried again, ever more rarely */ }
    swarm.update((value) => ({ ...value, connected: false }));
    await new Promise((resume) => setTimeout(resume, pauseMs));
    pauseMs = Math.min(LONGEST_PAUSE_MS, pauseMs * 2);
  }
}

export function take(name, told) {
  const before = swarm.get();
  const peers = name === "state" ? new Map() : new Map(before.peers);
  for (const [id, peer] of Object.entries(told.peers ?? {})) peers.set(id, peer);
  for (const id of told.gone ?? []) peers.delete(id);
  const { gone: _, ...values } = told;
  const now = { ...before, ...values, peers: told.peers || told.gone || name === "state" ? peers : before.peers, known: true, connected: true };
  if (before.known) note(before.peers, now.peers);
  swarm.set(now);
  follow(now.circuits);
}

function note(before, now) {
  if (before === now) return;
  const happened = [];
  for (const [id, peer] of now) {
    const known = before.get(id);
    if (!known) happened.push({ id, kind: "joined", name: peer.name, text: `joined${spansText(peer)}` });
    else if (String(known.spans) !== String(peer.spans)) happened.push({ id, kind: "moved", name: peer.name, text: `now holds${spansText(peer) || " no layers"}` });
    else if (known.answers !== peer.answers) happened.push({ id, kind: peer.answers ? "joined" : "left", name: peer.name, text: peer.answers ? "answers again" : "does not answer" });
  }
  for (const [id, peer] of before) if (!now.has(id)) happened.push({ id, kind: "left", name: peer.name, text: "left" });
  if (happened.length) happenings.update((value) => [...happened.map((one) => ({ ...one, at: Date.now() })), ...value].slice(0, MOST_HAPPENINGS));
}

export const spansText = ({ spans = [] }) => (spans.length ? ` layers ${spans.map(([start, stop]) => `${start}–${stop - 1}`).join(", ")}` : "");

function follow(circuits) {
  const own = circuits.filter((circuit) => circuit.tag && circuit.tag === lastTag.get()).at(-1);
  if (own) lastCircuit.set(own);
  for (const circuit of circuits) {
    if (circuit.phase === "ended" && waiting.has(circuit.tag)) {
      waiting.get(circuit.tag)(circuit);
      waiting.delete(circuit.tag);
    }
  }
}

// The figures of the circuit that a request had, as soon as it has ended; null if they do not come in time.
export function figuresOf(tag, withinMs) {
  const ended = swarm.get().circuits.find((circuit) => circuit.tag === tag && circuit.phase === "ended");
  if (ended) return Promise.resolve(ended);
  return new Promise((resolve) => {
    waiting.set(tag, resolve);
    setTimeout(() => {
      waiting.delete(tag);
      resolve(lastCircuit.get()?.tag === tag ? lastCircuit.get() : null);
    }, withinMs);
  });
}
