// Requests to this server: the key, errors as their message, and server-sent events read from a fetch, since an
// EventSource cannot send an Authorization header.

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const key = {
  get: () => sessionStorage.getItem("key") ?? "",
  set: (value) => (value ? sessionStorage.setItem("key", value) : sessionStorage.removeItem("key")),
};

// Others cannot stand in a header: fetch would fail as if there were no server.
const SENDABLE = /^[\x20-\x7e]*$/;

/** Fetch `path`; throws ApiError with the server's message for any status but 2xx. */
export async function call(path, options = {}) {
  const headers = new Headers(options.headers);
  if (!SENDABLE.test(key.get())) throw new ApiError(401, "the API key is not one of this server's: those are of ASCII characters");
  if (key.get()) headers.set("Authorization", `Bearer ${key.get()}`);
  const response = await fetch(path, { ...options, headers });
  if (!response.ok) throw new ApiError(response.status, await messageOf(response));
  return response;
}

async function messageOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered with status ${response.status}`;
  }
}

/** The events of a text/event-stream response: {event, data} each, data as text. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (text + value).split(/\r?\n\r?\n/);
      text = parts.pop();
      for (const part of parts) {
        const found = parse(part);
        if (found.data) yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parse(part) {
  const data = [];
  let event = "message";
  for (const line of part.split(/\r?\n/)) {
    const [, field, value] = /^([^:]*):? ?(.*)$/.exec(line);
    if (field === "data") data.push(value);
    if (field === "event") event = value;
  }
  return { event, data: data.join("\n") };
}
