// Where peers are drawn. Pure: the same peers are always in the same places.

const FLAT_MS = 2; // a swarm within so many milliseconds is one place, and is drawn by its layers
const COVERED = 0.6; // the share of peers that must have a coordinate
const WITHIN = 0.94; // of peers from the middle that are drawn to scale; those farther out are at the border
const ROUNDS = 24;

// The places of peers in a field of that size: {by, at: Map of id to {x, y}, msAcross}. `wanted` is "auto", "distance" or "layers".
export function places(peers, layerCount, { width, height, apart, margin, foot = 0 }, wanted = "auto") {
  const ids = [...peers.keys()].sort();
  const flat = projected(ids.filter((id) => peers.get(id).coordinate).map((id) => [id, peers.get(id).coordinate.position]));
  const spread = spreadOf(flat);
  const can = flat.length >= Math.max(3, ids.length * COVERED) && spread >= FLAT_MS;
  const by = wanted === "layers" || !can ? "layers" : "distance";
  const field = { width: width - 2 * margin, height: height - 2 * margin - foot, margin };
  if (by === "layers") return { by, can, at: byLayers(ids, peers, layerCount, field), msAcross: null };
  const { at, scale } = byDistance(ids, flat, spread, field);
  keepApart(at, apart, { width, height: height - foot, margin });
  return { by, can, at, msAcross: field.width / scale };
}

// To one scale in both directions, as large as the field allows.
function byDistance(ids, flat, spread, { width, height, margin }) {
  const held = flat.map(([id, [x, y]]) => {
    const within = Math.min(1, (spread * 1.02) / Math.max(1e-9, Math.hypot(x, y)));
    return [id, x * within, y * within];
  });
  const range = (axis) => [Math.min(...held.map((one) => one[axis])), Math.max(...held.map((one) => one[axis]))];
  const [[left, right], [top, bottom]] = [range(1), range(2)];
  const scale = Math.min(width / Math.max(right - left, spread * 0.2), height / Math.max(bottom - top, spread * 0.2));
  const at = new Map();
  for (const [id, x, y] of held) {
    at.set(id, { x: margin + width / 2 + (x - (left + right) / 2) * scale, y: margin + height / 2 + (y - (top + bottom) / 2) * scale });
  }
  // Those that have said nothing of where they are stand below all others.
  const unknown = ids.filter((id) => !at.has(id));
  unknown.forEach((id, index) => at.set(id, { x: margin + (width * (index + 0.5)) / unknown.length, y: margin + height }));
  return { at, scale };
}

// On a ring that is the model: a peer is where the middle of its layers is.
function byLayers(ids, peers, layerCount, { width, height, margin }) {
  const middle = (id) => {
    const spans = peers.get(id).spans ?? [];
    const held = spans.reduce((sum, [start, stop]) => sum + stop - start, 0);
    return held ? spans.reduce((sum, [start, stop]) => sum + ((start + stop) / 2) * (stop - start), 0) / held / Math.max(1, layerCount) : 0;
  };
  const ordered = ids.map((id) => [middle(id), id]).sort((a, b) => a[0] - b[0] || (a[1] < b[1] ? -1 : 1));
  const at = new Map();
  // As many stand on one ring as have room beside each other; of others every second stands further in.
  const rings = Math.min(4, 1 + Math.floor(ordered.length / 28));
  ordered.forEach(([, id], index) => {
    const angle = ((index + 0.5) / ordered.length) * 2 * Math.PI - Math.PI / 2;
    const reach = 1 - (index % rings) * 0.21;
    at.set(id, { x: margin + width / 2 + (Math.cos(angle) * reach * width) / 2, y: margin + height / 2 + (Math.sin(angle) * reach * height) / 2 });
  });
  return at;
}

// The two directions in which coordinates differ most, about their middle: [[id, [x, y]], ...] in milliseconds.
function projected(placed) {
  if (!placed.length) return [];
  const size = placed[0][1].length;
  const mean = Array.from({ length: size }, (_, axis) => placed.reduce((sum, [, p]) => sum + p[axis], 0) / placed.length);
  const centred = placed.map(([id, p]) => [id, p.map((value, axis) => value - mean[axis])]);
  const first = principal(centred, null);
  const second = principal(centred, first);
  return centred.map(([id, p]) => [id, [dot(p, first), dot(p, second)]]);
}

// By power iteration, at a right angle to `beside`. Its largest part is positive, so that the picture does not flip.
function principal(centred, beside) {
  const size = centred[0][1].length;
  let axis = Array.from({ length: size }, (_, at) => 1 / (at + 1 + (beside ? 0.5 : 0)));
  for (let round = 0; round < ROUNDS; round += 1) {
    const next = Array(size).fill(0);
    for (const [, p] of centred) {
      const along = dot(p, axis);
      for (let at = 0; at < size; at += 1) next[at] += along * p[at];
    }
    if (beside) {
      const shared = dot(next, beside);
      for (let at = 0; at < size; at += 1) next[at] -= shared * beside[at];
    }
    const length = Math.hypot(...next);
    if (length < 1e-9) break;
    axis = next.map((value) => value / length);
  }
  const largest = axis.reduce((most, value) => (Math.abs(value) > Math.abs(most) ? value : most), 0);
  return largest < 0 ? axis.map((value) => -value) : axis;
}

const dot = (one, other) => one.reduce((sum, value, at) => sum + value * other[at], 0);

// How far from the middle nearly all are. One peer that claims to be on the moon does not shrink the others to a point.
function spreadOf(flat) {
  if (!flat.length) return 0;
  const away = flat.map(([, [x, y]]) => Math.hypot(x, y)).sort((a, b) => a - b);
  return away[Math.min(away.length - 1, Math.ceil(away.length * WITHIN) - 1)] || away.at(-1);
}

// Peers that would cover each other are moved apart just so far that each can be seen.
function keepApart(at, apart, { width, height, margin }) {
  const all = [...at.values()];
  for (let round = 0; round < ROUNDS; round += 1) {
    let moved = false;
    for (let i = 0; i < all.length; i += 1) {
      for (let j = i + 1; j < all.length; j += 1) moved = push(all[i], all[j], apart, i + j) || moved;
    }
    for (const place of all) {
      place.x = Math.min(width - margin, Math.max(margin, place.x));
      place.y = Math.min(height - margin, Math.max(margin, place.y));
    }
    if (!moved) return;
  }
}

function push(one, other, apart, turn) {
  let dx = (other.x - one.x) / apart.x;
  let dy = (other.y - one.y) / apart.y;
  if (Math.abs(dx) >= 1 || Math.abs(dy) >= 1) return false;
  let away = Math.hypot(dx, dy);
  if (away >= 0.999) return false;
  const by = (1 - away) / 2;
  if (away < 1e-6) {
    dx = Math.cos(turn * 2.4);
    dy = Math.sin(turn * 2.4);
    away = 1;
  }
  one.x -= (dx / away) * by * apart.x;
  one.y -= (dy / away) * by * apart.y;
  other.x += (dx / away) * by * apart.x;
  other.y += (dy / away) * by * apart.y;
  return true;
}

// The parts of one step on a circuit, with the share of its time: [{hop, kind, from, to}, ...] from 0 to 1.
export function stepParts(hops) {
  const parts = hops.flatMap((hop, at) => [
    { hop: at, kind: "compute", ms: Math.max(0.05, (hop.compute_ms ?? hop.predicted_compute_ms ?? 1) + (hop.queue_ms ?? 0)) },
    ...(hops.length > 1 ? [{ hop: at, kind: "link", ms: Math.max(0.05, hop.link_ms || hop.predicted_link_ms || 1) }] : []),
  ]);
  // Each part can be seen, however short it is beside the others.
  const whole = parts.reduce((sum, part) => sum + part.ms, 0);
  const shown = parts.map((part) => Math.max(part.ms / whole, 0.35 / parts.length));
  const sum = shown.reduce((total, share) => total + share, 0);
  let from = 0;
  return parts.map((part, at) => {
    const to = from + shown[at] / sum;
    const placed = { hop: part.hop, kind: part.kind, from, to };
    from = to;
    return placed;
  });
}

// Which layers of a model nobody holds who answers, and by how many each is held: {held: [count, ...], gaps: [[start, stop], ...]}.
export function coverage(peers, model) {
  const held = Array(model?.layers ?? 0).fill(0);
  for (const peer of peers.values()) {
    if (peer.answers === false || peer.model !== model?.model) continue;
    for (const [start, stop] of peer.spans ?? []) for (let layer = start; layer < Math.min(stop, held.length); layer += 1) held[layer] += 1;
  }
  const gaps = [];
  held.forEach((many, layer) => {
    if (many) return;
    if (gaps.length && gaps.at(-1)[1] === layer) gaps.at(-1)[1] = layer + 1;
    else gaps.push([layer, layer + 1]);
  });
  return { held, gaps };
}
