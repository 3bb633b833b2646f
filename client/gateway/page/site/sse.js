// Server-sent events out of a fetch, which can send the headers that an EventSource cannot.

const MOST_CHARACTERS = 32 * 1024 * 1024;

export class EventParser {
  #text = "";

  // Takes a piece of the stream, and returns the events that it completes.
  push(piece) {
    this.#text += piece.replaceAll("\r", "");
    if (this.#text.length > MOST_CHARACTERS) throw new Error("an event is too long");
    const blocks = this.#text.split("\n\n");
    this.#text = blocks.pop();
    return blocks.map(parseBlock).filter((event) => event.data !== null);
  }
}

function parseBlock(block) {
  const event = { name: "message", data: null };
  for (const line of block.split("\n")) {
    const colon = line.indexOf(":");
    if (colon <= 0) continue; // a comment
    const value = line.slice(colon + 1).replace(/^ /, "");
    const field = line.slice(0, colon);
    if (field === "event") event.name = value;
    if (field === "data") event.data = event.data === null ? value : `${event.data}\n${value}`;
  }
  return event;
}

export async function* events(response) {
  const parser = new EventParser();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.push(value);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
