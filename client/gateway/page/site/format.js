// Numbers as people read them.

export function ms(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value >= 10000) return `${(value / 1000).toFixed(0)} s`;
  if (value >= 1000) return `${(value / 1000).toFixed(1)} s`;
  return `${value >= 10 ? value.toFixed(0) : value.toFixed(1)} ms`;
}

export function count(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  return String(value ?? 0);
}

export const counted = (value, one, several = `${one}s`) => `${value} ${value === 1 ? one : several}`;

export const rate = (tpotMs) => (tpotMs ? `${(1000 / tpotMs).toFixed(1)} tokens/s` : "");

// Layers [start, stop) as people count them: from the first to the last.
export const layers = (start, stop) => (stop - start === 1 ? `${start}` : `${start}–${stop - 1}`);

export const shortName = (peer, id) => (peer?.name || `…${id.slice(-6)}`);

export function ago(at, now) {
  const seconds = Math.max(0, Math.round((now - at) / 1000));
  if (seconds < 60) return seconds < 5 ? "now" : `${seconds} s`;
  return seconds < 3600 ? `${Math.floor(seconds / 60)} min` : `${Math.floor(seconds / 3600)} h`;
}
