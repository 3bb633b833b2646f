// A value that components watch, and the hook that has them drawn again when it changes.
import { useEffect, useState } from "./vendor/htm-preact.js";

export function createStore(value) {
  const watchers = new Set();
  return {
    get: () => value,
    set(next) {
      if (next === value) return;
      value = next;
      for (const watch of [...watchers]) watch(value);
    },
    update(change) {
      this.set(change(value));
    },
    watch(watcher) {
      watchers.add(watcher);
      return () => watchers.delete(watcher);
    },
  };
}

export function useStore(store) {
  const [, draw] = useState(0);
  useEffect(() => {
    let frame = 0;
    // However often the value changes, it is drawn once a frame. A page that nobody sees has no frames.
    const schedule = () => {
      if (!frame) frame = requestAnimationFrame(() => { frame = 0; draw((count) => count + 1); });
    };
    const unwatch = store.watch(schedule);
    schedule();
    return () => { unwatch(); cancelAnimationFrame(frame); };
  }, [store]);
  return store.get();
}

// What a browser keeps between visits. Where it keeps nothing, the page works without.
export function recall(key, otherwise) {
  try {
    const kept = localStorage.getItem(key);
    return kept === null ? otherwise : JSON.parse(kept);
  } catch {
    return otherwise;
  }
}

export function remember(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}
