// Which key does what: the one table the page acts on and `?` shows.
import { cellsOf } from "./draw/places";
import { has, shown, VIEWS } from "./state.svelte";

export interface Key {
  keys: string[];
  does: string;
  act: (event: KeyboardEvent) => void;
}

const listeners = new Map<string, () => void>();

/** A view's own use of a key while it is open. */
export function whenPressed(key: string, act: () => void): () => void {
  listeners.set(key, act);
  return () => listeners.delete(key);
}

function move(by: number, what: "query" | "key"): void {
  const side = what === "query" ? shown.rows : shown.columns;
  const n = side?.ids.length ?? 1;
  const at = what === "query" ? shown.q : (shown.k ?? (by > 0 ? -1 : n));
  const isMerged = shown.option("words", "no") === "yes" && (shown.view === "map" || shown.view === "compare");
  const cells = cellsOf(side, isMerged);
  let next = at + by;
  while (next > 0 && next < n - 1 && cells[next] === cells[at]) next += by;
  shown.hover = null;
  shown[what] = Math.max(0, Math.min(n - 1, next));
}

function turn(what: "layer" | "head", by: number): void {
  const n = (what === "layer" ? shown.shape?.layers : shown.shape?.heads) ?? 1;
  shown[what] = (shown[what] + by + n) % n;
}

function nextStack(): void {
  const all = shown.run?.stacks.map((one) => one.stack) ?? [];
  if (all.length) shown.select({ stack: all[(all.indexOf(shown.stack) + 1) % all.length], query: null, key: null });
}

function focus(selector: string): void {
  document.querySelector<HTMLElement>(selector)?.focus();
}

export function darken(): void {
  shown.theme = shown.isDark ? "light" : "dark";
}

const openers: Key[] = VIEWS.map((view) => ({
  keys: [view.letter.toLowerCase()],
  does: `view ${view.letter}: ${view.name}`,
  act: () => {
    if (shown.model && has(shown.model, view.id)) shown.view = view.id;
  },
}));

export const KEYS: Key[] = [
  ...openers,
  { keys: ["ArrowUp", "ArrowDown"], does: "the token that looks (query)", act: (e) => move(e.key === "ArrowUp" ? -1 : 1, "query") },
  { keys: ["ArrowLeft", "ArrowRight"], does: "the token looked at (key)", act: (e) => move(e.key === "ArrowLeft" ? -1 : 1, "key") },
  { keys: ["[", "]"], does: "layer down, up", act: (e) => turn("layer", e.key === "[" ? -1 : 1) },
  { keys: [",", "."], does: "head before, after", act: (e) => turn("head", e.key === "," ? -1 : 1) },
  { keys: ["s"], does: "next stack: encoder, decoder, cross", act: nextStack },
  { keys: ["o"], does: "switch the chosen head off or on", act: () => shown.toggleHead(shown.stack, shown.layer, shown.head) },
  { keys: ["x"], does: "cut the edge query → key in this head, or mend it", act: () => shown.k !== null && shown.cut(shown.q, shown.k) },
  { keys: ["X"], does: "cut that edge in every head", act: () => shown.k !== null && shown.cut(shown.q, shown.k, true) },
  { keys: ["u"], does: "undo the last intervention", act: () => (shown.off = shown.off.slice(0, -1)) },
  { keys: ["z"], does: "undo all interventions", act: () => (shown.off = []) },
  { keys: ["t"], does: "to the text", act: () => focus("#text") },
  { keys: ["m"], does: "to the models", act: () => focus("#model") },
  { keys: ["l"], does: "light or dark", act: darken },
  { keys: ["p"], does: "Live: play or pause", act: () => listeners.get("p")?.() },
  { keys: ["n"], does: "Live: one step", act: () => listeners.get("n")?.() },
];

/** Keys typed into a field are text; a button keeps Enter and the blank for itself. */
export function press(event: KeyboardEvent, help: () => void): void {
  const target = event.target as HTMLElement;
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") return target.blur();
  if (target.matches("textarea, select, input:not([type=checkbox])")) return;
  if (event.key === "?") return help();
  const key = KEYS.find((one) => one.keys.includes(event.key));
  if (!key) return;
  event.preventDefault();
  key.act(event);
}
