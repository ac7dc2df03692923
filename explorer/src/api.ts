// API client. Requests are answered by the server, by the responses saved in a standalone page, or by the notebook in which
// the page is embedded.
import { readFrame, readFrames } from "./frames";
import type { Body } from "./types";

export interface ApiRequest {
  path: string;
  body: Body | null;
}

interface RawResponse {
  status: number;
  contentType: string;
  bytes: Uint8Array;
}

const FRAME = "application/x-qkv-frame";
const FRAMES = "application/x-qkv-frames";
/** Maximum number of cached responses. This is enough to visit every layer of a model and go back. */
const MAX_CACHED = 160;

const cache = new Map<string, unknown>();
/** The request body of each run id. The request is sent again if the server has been restarted. */
const runRequests = new Map<string, Body>();

interface SavedPage {
  state: string;
  live: boolean;
  responses: { path: string; body: Body | null; status: number; content_type: string; response: string }[];
}

const dataElement = document.getElementById("qkv-data");
export const saved: SavedPage | null = dataElement ? JSON.parse(dataElement.textContent ?? "null") : null;
const recorded = new Map(saved?.responses.map((item) => [requestKey(item.path, item.body), item]));

/** Returns a cache key. Equal requests have equal keys, regardless of the order of their fields. */
export function requestKey(path: string, body: Body | null): string {
  return path + canonicalJson(body);
}

function canonicalJson(value: unknown): string {
  if (Array.isArray(value)) return `[${value.map(canonicalJson).join()}]`;
  if (value === null || typeof value !== "object") return JSON.stringify(value);
  const entries = Object.entries(value).sort(([a], [b]) => (a < b ? -1 : 1));
  return `{${entries.map(([key, item]) => JSON.stringify(key) + ":" + canonicalJson(item)).join()}}`;
}

/** Returns the decoded response. Throws an Error with the server's message if the request fails. */
export async function request<T>(path: string, body: Body | null, signal?: AbortSignal): Promise<T> {
  const key = requestKey(path, body);
  if (cache.has(key)) {
    // Moving the entry to the end makes the map a least-recently-used cache.
    const cached = cache.get(key);
    cache.delete(key);
    cache.set(key, cached);
    return cached as T;
  }
  let raw = await fetchRaw(path, body, signal);
  const run = typeof body?.run === "string" ? runRequests.get(body.run) : undefined;
  if (raw.status === 404 && run) {
    await fetchRaw("/api/run", run, signal);
    raw = await fetchRaw(path, body, signal);
  }
  const response = decode(raw) as T;
  if (path === "/api/run" && body) runRequests.set((response as { run: string }).run, body);
  cache.set(key, response);
  if (cache.size > MAX_CACHED) cache.delete(cache.keys().next().value!);
  return response;
}

/** Removes the cached responses of a path, for example after a model is added. */
export function invalidate(path: string): void {
  for (const key of cache.keys()) if (key.startsWith(path)) cache.delete(key);
}

function decode(raw: RawResponse): unknown {
  if (raw.status >= 400) throw new Error(errorMessage(raw));
  return raw.contentType.startsWith(FRAME) ? readFrame(raw.bytes) : JSON.parse(new TextDecoder().decode(raw.bytes));
}

/** Returns the server's error message. A proxy in front of the server may return something other than JSON. */
function errorMessage(raw: RawResponse): string {
  try {
    return JSON.parse(new TextDecoder().decode(raw.bytes)).error;
  } catch {
    return `The server returned status ${raw.status}. Try again.`;
  }
}

async function fetchRaw(path: string, body: Body | null, signal?: AbortSignal): Promise<RawResponse> {
  const match = recorded.get(requestKey(path, body));
  if (match) return { status: match.status, contentType: match.content_type, bytes: fromBase64(match.response) };
  if (saved?.live) return requestFromParent(path, body, signal);
  const response = await send(path, body, signal);
  const bytes = new Uint8Array(await response.arrayBuffer());
  return { status: response.status, contentType: response.headers.get("content-type") ?? "", bytes };
}

async function send(path: string, body: Body | null, signal?: AbortSignal): Promise<Response> {
  if (saved) throw new Error("This result is not in the saved file. To compute it, run `qkv explore`.");
  const post = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  try {
    return await fetch("." + path, { ...(body ? post : {}), signal });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Error("The server is not responding. Is `qkv explore` still running?");
  }
}

let nextMessageId = 0;
function requestFromParent(path: string, body: Body | null, signal?: AbortSignal): Promise<RawResponse> {
  const id = nextMessageId++;
  return new Promise((resolve, reject) => {
    const stopListening = () => window.removeEventListener("message", listen);
    const listen = (event: MessageEvent) => {
      if (event.data?.qkv !== id || event.data.response === undefined) return;
      stopListening();
      resolve({ status: event.data.status, contentType: event.data.content_type, bytes: new Uint8Array(event.data.response) });
    };
    signal?.addEventListener("abort", () => (stopListening(), reject(new Error("aborted"))));
    window.addEventListener("message", listen);
    // postMessage cannot clone Svelte's proxy objects, so the body is copied through JSON.
    parent.postMessage({ qkv: id, path, body: body && JSON.parse(JSON.stringify(body)) }, "*");
  });
}

function fromBase64(text: string): Uint8Array {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

/** Yields the frames of a stream. Aborting the signal stops the work on the server. */
export async function* stream<T extends { kind: string }>(path: string, body: Body, signal: AbortSignal): AsyncGenerator<T> {
  for await (const frame of readFrames(fetchChunks(path, body, signal))) {
    const message = frame as T & { error?: string };
    if (message.kind === "error") throw new Error(message.error);
    yield message;
  }
}

async function* fetchChunks(path: string, body: Body, signal: AbortSignal): AsyncGenerator<Uint8Array> {
  if (saved) {
    const raw = await fetchRaw(path, body, signal);
    if (!raw.contentType.startsWith(FRAMES)) decode(raw);
    yield raw.bytes;
    return;
  }
  const response = await send(path, body, signal);
  if (!response.ok) decode({ status: response.status, contentType: "", bytes: new Uint8Array(await response.arrayBuffer()) });
  const reader = response.body!.getReader();
  for (let chunk = await reader.read(); !chunk.done; chunk = await reader.read()) yield chunk.value;
}

/** Downloads a file that the server exports. */
export async function download(format: string, requests: ApiRequest[], state: string): Promise<void> {
  const withoutNull = requests.map((item) => (item.body ? item : { path: item.path }));
  const response = await send("/api/export", { format, requests: withoutNull, ...(state ? { state } : {}) });
  if (!response.ok) decode({ status: response.status, contentType: "", bytes: new Uint8Array(await response.arrayBuffer()) });
  saveAs(await response.blob(), `qkv.${format}`);
}

export function saveAs(blob: Blob, name: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
