// How the page asks: the server, the answers saved in a file, or the notebook that embeds it.
import type { Body } from "./types";
import { readFrame, readFrames } from "./wire";

export interface Asked {
  path: string;
  body: Body | null;
}

interface Raw {
  status: number;
  type: string;
  bytes: Uint8Array;
}

const FRAME = "application/x-qkv-frame";
const FRAMES = "application/x-qkv-frames";
/** Answers kept: enough to walk through every layer of a model and back. */
const MOST_KEPT = 160;

const kept = new Map<string, unknown>();
/** How each run was asked for, so that it can be asked for again where a server began anew. */
const runs = new Map<string, Body>();

interface Saved {
  state: string;
  live: boolean;
  answers: { path: string; body: Body | null; status: number; type: string; answer: string }[];
}

const held = document.getElementById("qkv-data");
export const saved: Saved | null = held ? JSON.parse(held.textContent ?? "null") : null;
const inFile = new Map(saved?.answers.map((one) => [named(one.path, one.body), one]));

/** Equal requests have equal names, whatever the order of their keys. */
export function named(path: string, body: Body | null): string {
  return path + sorted(body);
}

function sorted(value: unknown): string {
  if (Array.isArray(value)) return `[${value.map(sorted).join()}]`;
  if (value === null || typeof value !== "object") return JSON.stringify(value);
  const entries = Object.entries(value).sort(([a], [b]) => (a < b ? -1 : 1));
  return `{${entries.map(([key, one]) => JSON.stringify(key) + ":" + sorted(one)).join()}}`;
}

/** An answer, or an Error whose message is the server's own line. */
export async function ask<T>(path: string, body: Body | null, signal?: AbortSignal): Promise<T> {
  const name = named(path, body);
  if (kept.has(name)) {
    const found = kept.get(name);
    kept.delete(name);
    kept.set(name, found);
    return found as T;
  }
  let raw = await fetchRaw(path, body, signal);
  const run = typeof body?.run === "string" ? runs.get(body.run) : undefined;
  if (raw.status === 404 && run) {
    await fetchRaw("/api/run", run, signal);
    raw = await fetchRaw(path, body, signal);
  }
  const answer = read(raw) as T;
  if (path === "/api/run" && body) runs.set((answer as { run: string }).run, body);
  kept.set(name, answer);
  if (kept.size > MOST_KEPT) kept.delete(kept.keys().next().value!);
  return answer;
}

/** Models may have been added, so what is known of them is asked again. */
export function forget(path: string): void {
  for (const name of kept.keys()) if (name.startsWith(path)) kept.delete(name);
}

function read(raw: Raw): unknown {
  if (raw.status >= 400) throw new Error(lineOf(raw));
  return raw.type.startsWith(FRAME) ? readFrame(raw.bytes) : JSON.parse(new TextDecoder().decode(raw.bytes));
}

/** Why not, in the server's own words; what stands before it may answer in others. */
function lineOf(raw: Raw): string {
  try {
    return JSON.parse(new TextDecoder().decode(raw.bytes)).error;
  } catch {
    return `The server answered ${raw.status}: try again.`;
  }
}

async function fetchRaw(path: string, body: Body | null, signal?: AbortSignal): Promise<Raw> {
  const found = inFile.get(named(path, body));
  if (found) return { status: found.status, type: found.type, bytes: fromBase64(found.answer) };
  if (saved?.live) return askParent(path, body, signal);
  const response = await send(path, body, signal);
  const bytes = new Uint8Array(await response.arrayBuffer());
  return { status: response.status, type: response.headers.get("content-type") ?? "", bytes };
}

async function send(path: string, body: Body | null, signal?: AbortSignal): Promise<Response> {
  if (saved) throw new Error("This is not in the saved file; `qkv explore` can show it.");
  const post = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  try {
    return await fetch("." + path, { ...(body ? post : {}), signal });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Error("The server does not answer: is `qkv explore` still running?");
  }
}

let number = 0;
function askParent(path: string, body: Body | null, signal?: AbortSignal): Promise<Raw> {
  const mine = number++;
  return new Promise((resolve, reject) => {
    const done = () => window.removeEventListener("message", listen);
    const listen = (event: MessageEvent) => {
      if (event.data?.qkv !== mine || event.data.answer === undefined) return;
      done();
      resolve({ status: event.data.status, type: event.data.type, bytes: new Uint8Array(event.data.answer) });
    };
    signal?.addEventListener("abort", () => (done(), reject(new Error("left"))));
    window.addEventListener("message", listen);
    parent.postMessage({ qkv: mine, path, body: body && JSON.parse(JSON.stringify(body)) }, "*");
  });
}

function fromBase64(text: string): Uint8Array {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

/** The frames of a stream as they come; aborting the signal stops the work on the server. */
export async function* stream<T extends { kind: string }>(path: string, body: Body, signal: AbortSignal): AsyncGenerator<T> {
  for await (const frame of readFrames(parts(path, body, signal))) {
    const told = frame as T & { error?: string };
    if (told.kind === "error") throw new Error(told.error);
    yield told;
  }
}

async function* parts(path: string, body: Body, signal: AbortSignal): AsyncGenerator<Uint8Array> {
  if (saved) {
    const raw = await fetchRaw(path, body, signal);
    if (!raw.type.startsWith(FRAMES)) read(raw);
    yield raw.bytes;
    return;
  }
  const response = await send(path, body, signal);
  if (!response.ok) read({ status: response.status, type: "", bytes: new Uint8Array(await response.arrayBuffer()) });
  const reader = response.body!.getReader();
  for (let got = await reader.read(); !got.done; got = await reader.read()) yield got.value;
}

/** A file made by the server, saved by the browser. */
export async function download(format: string, requests: Asked[], state: string): Promise<void> {
  const told = requests.map((one) => (one.body ? one : { path: one.path }));
  const response = await send("/api/export", { format, requests: told, ...(state ? { state } : {}) });
  if (!response.ok) read({ status: response.status, type: "", bytes: new Uint8Array(await response.arrayBuffer()) });
  saveAs(await response.blob(), `qkv.${format}`);
}

export function saveAs(blob: Blob, name: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
