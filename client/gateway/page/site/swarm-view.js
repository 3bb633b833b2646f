// The living swarm: who is in it and where, what it holds, how a message went round, and how to join.
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { Copy } from "./chat-view.js";
import { ago, count, counted, layers, ms, shortName } from "./format.js";
import { Picture } from "./picture.js";
import { coverage } from "./places.js";
import { useStore } from "./store.js";
import { happenings, lastCircuit, lastTag, selected, spansText, swarm } from "./swarm.js";

const LISTED = 12;
const MODELS = 4;
const LEAST_CYCLE_MS = 900;
const WAYS = { map: "Map", distance: "Distance", layers: "Layers" };

export function Swarm() {
  const state = useStore(swarm);
  const model = state.models.find((one) => one.model === state.model) ?? state.models[0];
  const models = model ? [model, ...state.models.filter((one) => one !== model)].slice(0, MODELS) : [];
  return html`<section class="swarm" aria-labelledby="swarm-title">
    <div class="swarm-head"><h2 id="swarm-title">The swarm</h2><${Standing} state=${state} model=${model} /></div>
    <${Field} state=${state} />
    <${Coverage} state=${state} models=${models} />
    <${LastMessage} />
    <${Peers} state=${state} />
    <${Happenings} />
    <${Join} invites=${state.invites} />
  </section>`;
}

function Standing({ state, model }) {
  if (!state.known) return html`<p class="standing">Looking for it …</p>`;
  if (!state.connected) return html`<p class="standing missing">The gateway does not answer</p>`;
  const running = state.circuits.filter(({ phase }) => phase !== "ended");
  const circuits = running.length ? byModel(running, model?.model) : state.ready ? "ready" : "incomplete";
  const text = [counted(state.peers.size, "peer"), circuits].join(" · ");
  return html`<p class=${state.ready || running.length ? "standing" : "standing missing"} title=${state.reason || model?.model}>${text}</p>`;
}

// How many circuits there are; with the model's name unless all are of the one that is chatted with.
function byModel(circuits, own) {
  const counts = new Map();
  for (const circuit of circuits) counts.set(circuit.model, (counts.get(circuit.model) ?? 0) + 1);
  if (counts.size === 1 && (own === undefined || counts.has(own))) return counted(circuits.length, "circuit");
  return [...counts].map(([name, many]) => `${counted(many, "circuit")} of ${name}`).join(", ");
}

// --- the picture

let drawn = null; // the one picture: a benchmark asks it how many frames it has drawn
export const picture = () => drawn;

function Field({ state }) {
  const [still, moving, field] = [useRef(null), useRef(null), useRef(null)];
  const own = useStore(lastTag);
  const chosen = useStore(selected);
  const [hovered, setHovered] = useState("");
  const [by, setBy] = useState("auto");
  const [placed, setPlaced] = useState(null);
  useEffect(() => {
    drawn = new Picture(still.current, moving.current);
    const fit = () => drawn.resize(field.current.clientWidth, field.current.clientHeight);
    const watcher = new ResizeObserver(fit);
    watcher.observe(field.current);
    const recolour = () => { if (drawn.state) drawn.update(drawn.state, drawn.ownTag); };
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", recolour);
    const themed = new MutationObserver(recolour);
    themed.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
    return () => { watcher.disconnect(); themed.disconnect(); dark.removeEventListener("change", recolour); drawn.stop(); };
  }, []);
  // What is said below the picture depends on how it came out.
  const said = () => setPlaced((before) => (before?.by === drawn.placed.by && String(before.ways) === String(drawn.placed.ways) && before.msAcross === drawn.placed.msAcross ? before : drawn.placed));
  useEffect(() => { drawn.update(state, own); said(); }, [state, own]);
  useEffect(() => drawn.choose({ hovered, selected: chosen }), [hovered, chosen]);
  useEffect(() => { drawn.arrange(by); said(); }, [by]);
  const over = ({ offsetX, offsetY }) => setHovered(drawn.peerAt(offsetX, offsetY));
  const shown = hovered || chosen;
  return html`<div class="picture">
    <div class="field-of-peers" ref=${field} role="img" aria-label=${spoken(state)} onPointerMove=${over} onPointerLeave=${() => setHovered("")}
      onClick=${({ offsetX, offsetY }) => selected.set(drawn.peerAt(offsetX, offsetY))}>
      <canvas ref=${still}></canvas><canvas ref=${moving}></canvas>
    </div>
    <div class="caption">
      <p>${shown && state.peers.has(shown) ? html`<${PeerLine} id=${shown} peer=${state.peers.get(shown)} />` : caption(state, placed)}</p>
      ${placed?.ways.length > 1 && html`<fieldset class="switch small"><legend class="unseen">Where peers are drawn</legend>
        ${placed.ways.map((way) => [way, WAYS[way]]).map(([value, name]) => html`<label key=${value}>
          <input type="radio" name="by" value=${value} checked=${(placed.ways.includes(by) ? by : placed.by) === value} onChange=${() => setBy(value)} /><span>${name}</span></label>`)}
      </fieldset>`}
    </div>
  </div>`;
}

function PeerLine({ id, peer }) {
  const facts = [peer.region, peer.device, spansText(peer).trim() || "no layers yet", peer.draining ? "takes nothing new" : counted(peer.sessions ?? 0, "session"), peer.layer_ms && `${ms(peer.layer_ms)} a layer`];
  return html`<b>${shortName(peer, id)}</b> ${facts.filter(Boolean).join(" · ")}`;
}

function caption(state, placed) {
  const live = state.circuits.filter(({ phase }) => phase === "decode");
  const tpot = live.at(-1)?.tpot_ms;
  const slowed = tpot && tpot < LEAST_CYCLE_MS ? ` Steps are shown ${Math.round(LEAST_CYCLE_MS / tpot)} times slower than they are.` : "";
  const where = placed?.by === "map" ? "In the regions that their owners state." : placed?.by === "distance" ? `As far apart as their round trips: ${ms(placed.msAcross)} across.` : "Around the ring by the layers that they hold.";
  const circuit = state.circuits.length || !state.planned ? "" : " The faint line is the circuit that the next message would get.";
  return `${where}${slowed}${circuit}`;
}

// What the picture shows, for whoever does not see it.
function spoken(state) {
  const live = state.circuits.filter(({ phase }) => phase !== "ended");
  const hops = live.slice(-3).map(({ model, hops: all }) => (model === state.model ? "" : `of ${model}, `) + all.map((hop) => `${hop.name || hop.peer_id.slice(-6)} with layers ${layers(hop.start, hop.stop)}`).join(", then "));
  return `A picture of ${counted(state.peers.size, "peer")}. ${live.length ? `${counted(live.length, "circuit")} in use: ${hops.join("; ")}.` : "No circuit is in use."}`;
}

// --- what is held

function Coverage({ state, models }) {
  if (!models.length) return null;
  const [first, ...others] = models.map((model) => layersOf(state, model));
  return html`<section class="part" aria-labelledby="coverage-title">
    <div class="part-head"><h3 id="coverage-title">Layers</h3><p class=${first.gaps.length ? "missing" : "quiet"}>${first.told}</p></div>
    <${LayersBar} ...${first} />
    ${others.map((one) => html`<p key=${one.model.model_hash} class=${one.gaps.length ? "missing" : "quiet"}>${one.told}</p><${LayersBar} ...${one} />`)}
  </section>`;
}

function layersOf(state, model) {
  const { held, gaps } = coverage(state.peers, model);
  const told = gaps.length ? `Nobody holds layers ${gaps.map(([start, stop]) => layers(start, stop)).join(", ")}` : `All ${held.length} layers are held`;
  return { model, held, gaps, told };
}

function LayersBar({ model, held, told }) {
  const most = Math.max(1, ...held);
  return html`<div class="coverage" role="img" aria-label=${`${model.model}: ${told}. The least held has ${counted(Math.min(...held), "peer")}, the most held ${most}.`}>
      ${held.map((many, layer) => html`<i key=${layer} class=${many ? "held" : "gap"} title=${`Layer ${layer}: ${counted(many, "peer")}`} style=${many ? { opacity: 0.35 + 0.65 * (many / most) } : {}}></i>`)}
    </div>
    <div class="scale quiet" aria-hidden="true"><span>0</span><span>${model.model}</span><span>${held.length - 1}</span></div>`;
}

// --- the last message

function LastMessage() {
  const circuit = useStore(lastCircuit);
  if (!circuit || !circuit.hops.length) return null;
  const parts = circuit.hops.map((hop) => ({
    hop, compute: hop.compute_ms ?? hop.predicted_compute_ms ?? 0, queue: hop.queue_ms ?? 0, link: circuit.hops.length > 1 ? hop.link_ms ?? hop.predicted_link_ms ?? 0 : 0,
  }));
  const most = Math.max(...parts.map(({ compute, queue, link }) => compute + queue + link), 0.001);
  const measured = circuit.hops.every((hop) => hop.compute_ms !== null);
  return html`<section class="part" aria-labelledby="last-title">
    <div class="part-head"><h3 id="last-title">Your last message</h3><p class="quiet">${measured ? "measured" : "predicted"}, by hop</p></div>
    <dl class="figures">
      <div><dt>First token</dt><dd>${ms(circuit.ttft_ms)}</dd></div>
      <div><dt>Each token</dt><dd>${ms(circuit.tpot_ms)}</dd></div>
      <div><dt>Tokens</dt><dd>${count(circuit.tokens)}</dd></div>
      ${circuit.losses > 0 && html`<div><dt>Peers lost</dt><dd>${circuit.losses}</dd></div>`}
    </dl>
    <ol class="hops">${parts.map(({ hop, compute, queue, link }) => html`<li key=${hop.peer_id + hop.start}>
      <span class="hop-name"><b>${hop.name || `…${hop.peer_id.slice(-6)}`}</b> <span class="quiet">${layers(hop.start, hop.stop)}</span></span>
      <span class="hop-bar" aria-hidden="true">${[["compute", compute], ["queue", queue], ["link", link]].map(([kind, took]) => html`<i key=${kind} class=${kind} style=${{ width: `${(took / most) * 100}%` }}></i>`)}</span>
      <span class="hop-time" title=${`First token: ${ms(hop.first_compute_ms)}`}><span class="unseen">computes ${ms(compute)}, waits ${ms(queue)}, link ${ms(link)}; in all </span>${ms(compute + queue + link)}</span>
      ${hop.partner && html`<span class="partner quiet">copy kept by ${partnerName(hop.partner)}${hop.copy_behind_tokens ? `, ${counted(hop.copy_behind_tokens, "token")} behind` : ""}</span>`}
    </li>`)}</ol>
    <p class="key quiet" aria-hidden="true"><i class="compute"></i> computing <i class="queue"></i> waiting <i class="link"></i> on the line</p>
  </section>`;
}

const partnerName = (id) => shortName(swarm.get().peers.get(id), id);

// --- who serves

function Peers({ state }) {
  const [all, setAll] = useState(false);
  const chosen = useStore(selected);
  const ordered = [...state.peers].sort(([one, a], [other, b]) => (b.tokens_served ?? 0) - (a.tokens_served ?? 0) || (one < other ? -1 : 1));
  if (!ordered.length) return state.known ? html`<section class="part"><h3>Peers</h3><p class="quiet">Nobody serves yet. The command below is for the first.</p></section>` : null;
  const listed = all ? ordered : ordered.slice(0, LISTED);
  const most = Math.max(1, ordered[0][1].tokens_served ?? 0);
  return html`<section class="part" aria-labelledby="peers-title">
    <div class="part-head"><h3 id="peers-title">Peers</h3><p class="quiet">tokens served through here</p></div>
    <ol class="peers">${listed.map(([id, peer]) => html`<li key=${id}>
      <button type="button" class="peer" aria-pressed=${chosen === id ? "true" : "false"} onClick=${() => selected.set(chosen === id ? "" : id)}>
        <span class="peer-share" aria-hidden="true" style=${{ width: `${((peer.tokens_served ?? 0) / most) * 100}%` }}></span>
        <span class="peer-name">${shortName(peer, id)}</span>
        <span class="peer-layers quiet">${spansText(peer).trim() || "no layers"}${peer.answers === false ? ", silent" : peer.left_out ? ", failed" : peer.draining ? ", leaving" : ""}</span>
        <span class="peer-tokens">${count(peer.tokens_served ?? 0)}</span>
      </button></li>`)}</ol>
    ${ordered.length > LISTED && html`<button type="button" class="more" onClick=${() => setAll(!all)}>${all ? "Fewer" : `All ${ordered.length}`}</button>`}
  </section>`;
}

function Happenings() {
  const told = useStore(happenings);
  const [now, setNow] = useState(Date.now());
  useEffect(() => {
    const timer = setInterval(() => setNow(Date.now()), 10000);
    return () => clearInterval(timer);
  }, []);
  if (!told.length) return null;
  return html`<section class="part" aria-labelledby="happenings-title">
    <h3 id="happenings-title">Just now</h3>
    <ul class="happenings">${told.slice(0, 6).map((one) => html`<li key=${one.id + one.at + one.text} class=${one.kind}>
      <span><b>${one.name || `…${one.id.slice(-6)}`}</b> ${one.text}</span><span class="quiet">${ago(one.at, Math.max(now, one.at))}</span></li>`)}</ul>
  </section>`;
}

function Join({ invites }) {
  const command = `molink-peer join --initial-peers ${invites.length ? invites.join(" ") : "ADDRESS"}`;
  return html`<section class="part join" aria-labelledby="join-title">
    <h3 id="join-title">Lend your machine</h3>
    <p class="quiet">It holds a few layers, and stops when you stop it.${invites.length ? "" : " Ask whoever runs this gateway for a peer’s address."}</p>
    <div class="command"><code tabindex="0" role="region" aria-label="Command to join">${command}</code><${Copy} text=${command} label="Copy the command to join" /></div>
  </section>`;
}
