// The picture of the swarm, on two canvases: peers and circuits, drawn when they change, and above them what moves.
import { ms, shortName } from "./format.js";
import { places, stepParts } from "./places.js";

const SLOWEST_MS = 4000;
const FASTEST_MS = 900; // a step is drawn at least so slowly, or nobody could follow it
const EASE_MS = 500;
const IDLE_MS = 2500; // after so long without a new token nothing moves any more
const NAMED = 26; // a swarm of more peers has names only on circuits
const FULL = 2 * Math.PI;

export class Picture {
  constructor(still, moving) {
    this.canvases = [still, moving];
    this.contexts = [still.getContext("2d"), moving.getContext("2d")];
    this.size = { width: 0, height: 0, ratio: 1 };
    this.state = null;
    this.wanted = "auto";
    this.placed = { by: "layers", can: false, at: new Map(), msAcross: null };
    this.shown = new Map(); // where each peer is drawn now, on its way to its place
    this.circuits = new Map(); // by id, with when a token came last and how far the step is
    this.hovered = "";
    this.selected = "";
    this.frame = 0;
    this.frames = 0;
    this.drawnMs = 0;
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
  }

  resize(width, height, ratio = Math.min(2, devicePixelRatio || 1)) {
    if (width === this.size.width && height === this.size.height && ratio === this.size.ratio) return;
    this.size = { width, height, ratio };
    for (const canvas of this.canvases) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    if (this.state) this.update(this.state, this.ownTag, true);
  }

  // Takes the swarm as it is now. `ownTag` marks the circuit of this page's latest message.
  update(state, ownTag = "", resized = false) {
    const before = this.state;
    this.state = state;
    this.ownTag = ownTag;
    this.layerCount = state.models.find((one) => one.model === state.model)?.layers ?? 1;
    if (resized || !before || before.peers !== state.peers || before.model !== state.model) this.place();
    this.followCircuits();
    this.colours = coloursOf(this.canvases[0]);
    this.dirty = true;
    this.wake();
  }

  arrange(wanted) {
    this.wanted = wanted;
    if (this.state) { this.place(); this.dirty = true; this.wake(); }
  }

  choose({ hovered = this.hovered, selected = this.selected }) {
    if (hovered === this.hovered && selected === this.selected) return;
    Object.assign(this, { hovered, selected, dirty: true });
    this.wake();
  }

  // The peer at that place, if there is one.
  peerAt(x, y) {
    let nearest = "";
    let within = Math.max(14, this.radius + 6);
    for (const [id, place] of this.shown) {
      const away = Math.hypot(place.x - x, place.y - y);
      if (away < within) [nearest, within] = [id, away];
    }
    return nearest;
  }

  stop() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
  }

  place() {
    const { width, height } = this.size;
    const count = Math.max(1, this.state.peers.size);
    this.radius = Math.max(4, Math.min(15, Math.sqrt((width * height) / count) / 7));
    const named = count <= NAMED;
    const apart = named ? { x: Math.max(58, this.radius * 3), y: this.radius * 2 + 26 } : { x: this.radius * 3, y: this.radius * 3 };
    const field = { width, height, apart, margin: this.radius + 16, foot: named ? 16 : 0 };
    this.placed = places(this.state.peers, this.layerCount, field, this.wanted);
    const now = performance.now();
    for (const id of [...this.shown.keys()]) if (!this.placed.at.has(id)) this.shown.delete(id);
    for (const [id, to] of this.placed.at) {
      const known = this.shown.get(id);
      if (!known || this.calm.matches) this.shown.set(id, { x: to.x, y: to.y, to, from: to, since: now, born: known?.born ?? now });
      else if (Math.hypot(known.to.x - to.x, known.to.y - to.y) > 0.5) Object.assign(known, { from: { x: known.x, y: known.y }, to, since: now });
    }
  }

  followCircuits() {
    const now = performance.now();
    const current = new Set();
    for (const circuit of this.state.circuits) {
      current.add(circuit.id);
      const known = this.circuits.get(circuit.id);
      const came = !known || known.tokens !== circuit.tokens ? now : known.came;
      const own = Boolean(circuit.tag) && circuit.tag === this.ownTag;
      this.circuits.set(circuit.id, { circuit, own, came, tokens: circuit.tokens, parts: stepParts(circuit.hops), share: known?.share ?? 0 });
    }
    for (const id of [...this.circuits.keys()]) if (!current.has(id)) this.circuits.delete(id);
  }

  // A picture in which nothing moves takes no time.
  wake() {
    if (this.frame || !this.state || !this.size.width) return;
    this.last = performance.now();
    this.frame = requestAnimationFrame((now) => this.draw(now));
  }

  draw(now) {
    this.frame = 0;
    const began = performance.now();
    const passed = Math.min(100, Math.max(0, now - this.last));
    this.last = now;
    const eases = this.ease(now);
    if (eases || this.dirty) this.drawStill(now);
    this.dirty = false;
    const moves = this.drawMoving(now, passed);
    this.frames += 1;
    this.drawnMs += performance.now() - began;
    if (eases || moves) this.frame = requestAnimationFrame((later) => this.draw(later));
  }

  ease(now) {
    let eases = false;
    for (const place of this.shown.values()) {
      const share = Math.min(1, (now - place.since) / EASE_MS);
      const eased = 1 - (1 - share) ** 3;
      place.x = place.from.x + (place.to.x - place.from.x) * eased;
      place.y = place.from.y + (place.to.y - place.from.y) * eased;
      eases ||= share < 1 || (now - place.born < EASE_MS && !this.calm.matches);
    }
    return eases;
  }

  begin(context) {
    const { width, height, ratio } = this.size;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
  }

  drawStill(now) {
    const [context] = this.contexts;
    this.begin(context);
    const live = [...this.circuits.values()].filter(({ circuit }) => circuit.phase !== "ended" || this.circuits.size === 1);
    const drawn = live.length ? live : this.plannedCircuit();
    for (const one of drawn) this.drawPartners(context, one);
    for (const one of drawn) this.drawCircuit(context, one);
    const onCircuits = new Map();
    for (const { circuit, own, isPlanned } of drawn) {
      for (const hop of circuit.hops) onCircuits.set(hop.peer_id, { hop, own: own || onCircuits.get(hop.peer_id)?.own, isPlanned });
    }
    for (const [id, place] of this.shown) this.drawPeer(context, id, place, onCircuits.get(id), now);
    const taken = []; // by words: what would lie over others is left out
    this.drawNames(context, onCircuits, taken);
    for (const one of drawn) if (drawn.length <= 2 || one.own) this.drawDelays(context, one, taken);
  }

  plannedCircuit() {
    const { planned } = this.state;
    return planned ? [{ circuit: { hops: planned.hops, phase: "planned" }, own: false, isPlanned: true }] : [];
  }

  drawPeer(context, id, place, on, now) {
    const peer = this.state.peers.get(id);
    if (!peer) return;
    const { colours } = this;
    const radius = this.radius * (this.calm.matches ? 1 : Math.min(1, 0.3 + (now - place.born) / EASE_MS));
    const chosen = id === this.hovered || id === this.selected;
    context.globalAlpha = peer.answers === false || peer.draining ? 0.45 : 1;
    context.beginPath();
    context.arc(place.x, place.y, radius + 3.5, 0, FULL);
    context.fillStyle = chosen ? colours.accentSoft : colours.sunk;
    context.fill();
    ring(context, place, radius, [0, 1], colours.line, Math.max(1.5, radius * 0.3));
    const held = on && !on.isPlanned ? colours.soft : colours.quiet;
    const isOfModel = !peer.model || peer.model === this.state.model; // a ring is one model's layers
    for (const span of (isOfModel && peer.spans) || []) ring(context, place, radius, this.turns(span), held, Math.max(1.5, radius * 0.3));
    if (on) ring(context, place, radius, this.turns([on.hop.start, on.hop.stop]), on.isPlanned ? colours.quiet : colours.accent, Math.max(2.5, radius * 0.42));
    if (chosen) {
      context.beginPath();
      context.arc(place.x, place.y, radius + 6, 0, FULL);
      context.strokeStyle = colours.accent;
      context.lineWidth = 1.5;
      context.stroke();
    }
    context.globalAlpha = 1;
  }

  turns([start, stop]) {
    return [start / this.layerCount, Math.min(1, stop / this.layerCount)];
  }

  drawNames(context, onCircuits, taken) {
    const { colours, state } = this;
    context.font = `500 11.5px ${colours.font}`;
    context.textAlign = "center";
    context.textBaseline = "top";
    const rank = (id) => (id === this.hovered || id === this.selected ? 0 : onCircuits.get(id)?.own ? 1 : onCircuits.has(id) ? 2 : 3);
    const most = this.shown.size <= NAMED ? 3 : [...onCircuits.values()].some(({ own }) => own) ? 1 : 2;
    const named = [...this.shown.keys()].filter((id) => state.peers.has(id) && rank(id) <= most).sort((a, b) => rank(a) - rank(b));
    for (const id of named) {
      const place = this.shown.get(id);
      const text = shortened(shortName(state.peers.get(id), id), 16);
      const below = place.y + this.radius + 7;
      const y = below > this.size.height - 14 ? place.y - this.radius - 20 : below;
      const half = context.measureText(text).width / 2 + 2;
      const x = Math.min(this.size.width - half, Math.max(half, place.x));
      if (!takes(taken, x - half, y, 2 * half, 13)) continue;
      written(context, text, x, y, onCircuits.has(id) && !onCircuits.get(id).isPlanned ? colours.ink : colours.quiet, colours.sunk);
    }
  }

  drawCircuit(context, { circuit, own, isPlanned }) {
    const { colours } = this;
    context.strokeStyle = isPlanned ? colours.line : circuit.phase === "recovering" ? colours.gap : own ? colours.accent : colours.soft;
    context.lineWidth = own ? 2 : 1.5;
    context.globalAlpha = circuit.phase === "ended" ? 0.5 : 1;
    context.setLineDash([]);
    for (const curve of this.curves(circuit.hops)) {
      context.beginPath();
      context.moveTo(curve.from.x, curve.from.y);
      context.quadraticCurveTo(curve.bend.x, curve.bend.y, curve.to.x, curve.to.y);
      context.stroke();
    }
    context.globalAlpha = 1;
  }

  drawPartners(context, { circuit, isPlanned }) {
    context.strokeStyle = this.colours.quiet;
    context.lineWidth = 1.25;
    context.globalAlpha = isPlanned ? 0.35 : 0.8;
    context.setLineDash([2, 5]);
    for (const hop of circuit.hops) {
      const [from, to] = [this.shown.get(hop.peer_id), this.shown.get(hop.partner)];
      if (!from || !to) continue;
      context.beginPath();
      context.moveTo(from.x, from.y);
      context.lineTo(to.x, to.y);
      context.stroke();
    }
    context.setLineDash([]);
    context.globalAlpha = 1;
  }

  drawDelays(context, { circuit, isPlanned, own }, taken) {
    if (circuit.hops.length < 2) return;
    context.font = `10.5px ${this.colours.font}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (const [at, curve] of this.curves(circuit.hops).entries()) {
      if (Math.hypot(curve.to.x - curve.from.x, curve.to.y - curve.from.y) < 60) continue;
      const hop = circuit.hops[curve.hop ?? at];
      const { x, y } = onCurve(curve, 0.5);
      if (!takes(taken, x - 22, y - 7, 44, 14)) continue;
      written(context, ms(hop.link_ms || hop.predicted_link_ms), x, y, isPlanned ? this.colours.quiet : own ? this.colours.accent : this.colours.quiet, this.colours.sunk);
    }
  }

  // The lines between the hops of a circuit, from the last back to the first. They bend to one side, so that two hops have two.
  curves(hops) {
    const found = [];
    for (let at = 0; at < hops.length && hops.length > 1; at += 1) {
      const [from, to] = [this.shown.get(hops[at].peer_id), this.shown.get(hops[(at + 1) % hops.length].peer_id)];
      if (!from || !to) continue;
      const share = hops.length === 2 ? 0.22 : 0.1;
      const bend = { x: (from.x + to.x) / 2 - (to.y - from.y) * share, y: (from.y + to.y) / 2 + (to.x - from.x) * share };
      found.push({ from, to, bend, hop: at });
    }
    return found;
  }

  // Draws the steps under way, each a little further than before. Returns whether anything moves.
  drawMoving(now, passed) {
    const [, context] = this.contexts;
    this.begin(context);
    if (this.calm.matches) return false;
    let moves = false;
    for (const one of this.circuits.values()) {
      const { circuit } = one;
      if (!["prefill", "decode"].includes(circuit.phase) || now - one.came > IDLE_MS) continue;
      moves = true;
      one.share = (one.share + passed / this.cycleMs(circuit)) % 1;
      const part = one.parts.find(({ from, to }) => one.share >= from && one.share < to);
      if (part) this.drawStep(context, one, part, (one.share - part.from) / (part.to - part.from));
    }
    return moves;
  }

  cycleMs(circuit) {
    const tpot = circuit.tpot_ms ?? circuit.predicted_tpot_ms ?? FASTEST_MS;
    return Math.min(SLOWEST_MS, Math.max(FASTEST_MS, tpot));
  }

  drawStep(context, { circuit, own }, part, share) {
    const { colours } = this;
    const hop = circuit.hops[part.hop];
    const colour = own ? colours.accent : colours.quiet;
    const place = this.shown.get(hop?.peer_id);
    if (!place) return;
    if (part.kind === "compute") {
      const [start, stop] = this.turns([hop.start, hop.stop]);
      ring(context, place, this.radius, [start, start + (stop - start) * share], colours.bright, Math.max(3, this.radius * 0.5));
      context.globalAlpha = 0.25 * (1 - share);
      context.beginPath();
      context.arc(place.x, place.y, this.radius + 4 + 9 * share, 0, FULL);
      context.strokeStyle = colour;
      context.lineWidth = 2;
      context.stroke();
      context.globalAlpha = 1;
      return;
    }
    const curve = this.curves(circuit.hops).find((one) => one.hop === part.hop);
    if (!curve) return;
    for (let tail = 8; tail >= 0; tail -= 1) {
      const at = share - tail * 0.018;
      if (at < 0) continue;
      const { x, y } = onCurve(curve, at);
      context.globalAlpha = tail ? 0.35 * (1 - tail / 9) : 1;
      context.beginPath();
      context.arc(x, y, (own ? 4.5 : 3.5) * (1 - tail * 0.07), 0, FULL);
      context.fillStyle = own ? colours.bright : colour;
      context.fill();
    }
    context.globalAlpha = 1;
  }
}

function ring(context, { x, y }, radius, [start, stop], colour, width) {
  const whole = stop - start >= 1;
  context.beginPath();
  context.arc(x, y, radius, start * FULL - FULL / 4 + (whole ? 0 : 0.05), stop * FULL - FULL / 4 - (whole ? 0 : 0.05));
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.stroke();
}

function onCurve({ from, bend, to }, share) {
  const rest = 1 - share;
  return {
    x: rest * rest * from.x + 2 * rest * share * bend.x + share * share * to.x,
    y: rest * rest * from.y + 2 * rest * share * bend.y + share * share * to.y,
  };
}

function written(context, text, x, y, colour, halo) {
  context.lineWidth = 4;
  context.lineJoin = "round";
  context.strokeStyle = halo;
  context.strokeText(text, x, y);
  context.fillStyle = colour;
  context.fillText(text, x, y);
}

// Takes that rectangle, if nothing in it is taken.
function takes(taken, x, y, width, height) {
  if (taken.some((one) => x < one.x + one.width && one.x < x + width && y < one.y + one.height && one.y < y + height)) return false;
  taken.push({ x, y, width, height });
  return true;
}

const shortened = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

function coloursOf(element) {
  const style = getComputedStyle(element);
  const named = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    ink: named("ink"), quiet: named("quiet"), faint: named("faint"), line: named("line"), sunk: named("sunk"), gap: named("gap"),
    accent: named("accent"), accentSoft: named("accent-soft"), soft: named("accent-mid"), bright: named("accent-bright"), font: style.fontFamily,
  };
}
