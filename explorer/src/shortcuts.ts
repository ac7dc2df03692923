// Keyboard shortcuts. The same table is used to handle key presses and to show the list that `?` opens.
import { wordCells } from "./draw/wordCells";
import { app, supportsView, VIEWS } from "./state.svelte";

export interface Shortcut {
  keys: string[];
  description: string;
  run: (event: KeyboardEvent) => void;
}

const listeners = new Map<string, () => void>();

/** Registers a shortcut of a view while the view is open. */
export function onShortcut(key: string, run: () => void): () => void {
  listeners.set(key, run);
  return () => listeners.delete(key);
}

function move(step: number, axis: "query" | "key"): void {
  const tokens = axis === "query" ? app.rows : app.columns;
  const n = tokens?.ids.length ?? 1;
  const at = axis === "query" ? app.q : (app.k ?? (step > 0 ? -1 : n));
  const isMerged = app.option("words", "no") === "yes" && (app.view === "map" || app.view === "compare");
  const cells = wordCells(tokens, isMerged);
  let next = at + step;
  while (next > 0 && next < n - 1 && cells[next] === cells[at]) next += step;
  app.hover = null;
  app[axis] = Math.max(0, Math.min(n - 1, next));
}

function cycle(axis: "layer" | "head", step: number): void {
  const n = (axis === "layer" ? app.shape?.n_layers : app.shape?.n_heads) ?? 1;
  app[axis] = (app[axis] + step + n) % n;
}

function nextStack(): void {
  const all = app.run?.stacks.map((item) => item.stack) ?? [];
  if (all.length) app.select({ stack: all[(all.indexOf(app.stack) + 1) % all.length], query: null, key: null });
}

function focus(selector: string): void {
  document.querySelector<HTMLElement>(selector)?.focus();
}

export function toggleTheme(): void {
  app.theme = app.isDark ? "light" : "dark";
}

const viewShortcuts: Shortcut[] = VIEWS.map((view) => ({
  keys: [view.letter.toLowerCase()],
  description: `open view ${view.letter}: ${view.name}`,
  run: () => {
    if (app.model && supportsView(app.model, view.id)) app.view = view.id;
  },
}));

export const SHORTCUTS: Shortcut[] = [
  ...viewShortcuts,
  { keys: ["ArrowUp", "ArrowDown"], description: "select the previous or next query (the token that attends)", run: (e) => move(e.key === "ArrowUp" ? -1 : 1, "query") },
  { keys: ["ArrowLeft", "ArrowRight"], description: "select the previous or next key (the token that is attended to)", run: (e) => move(e.key === "ArrowLeft" ? -1 : 1, "key") },
  { keys: ["[", "]"], description: "previous or next layer", run: (e) => cycle("layer", e.key === "[" ? -1 : 1) },
  { keys: [",", "."], description: "previous or next head", run: (e) => cycle("head", e.key === "," ? -1 : 1) },
  { keys: ["s"], description: "next attention stack (encoder, decoder or cross-attention)", run: nextStack },
  { keys: ["o"], description: "ablate (switch off) or restore the selected head", run: () => app.toggleHead(app.stack, app.layer, app.head) },
  { keys: ["x"], description: "mask or unmask attention from the selected query to the selected key in the selected head", run: () => app.k !== null && app.maskEdge(app.q, app.k) },
  { keys: ["X"], description: "mask or unmask attention from the selected query to the selected key in all layers and heads", run: () => app.k !== null && app.maskEdge(app.q, app.k, true) },
  { keys: ["u"], description: "undo the last intervention", run: () => (app.interventions = app.interventions.slice(0, -1)) },
  { keys: ["z"], description: "undo all interventions", run: () => (app.interventions = []) },
  { keys: ["t"], description: "move to the text field", run: () => focus("#text") },
  { keys: ["m"], description: "move to the list of models", run: () => focus("#model") },
  { keys: ["l"], description: "switch between light and dark themes", run: toggleTheme },
  { keys: ["p"], description: "Live view: play or pause", run: () => listeners.get("p")?.() },
  { keys: ["n"], description: "Live view: generate one token", run: () => listeners.get("n")?.() },
];

/** Handles a key press. Keys typed into a field are text, and a focused button handles Enter and space itself. */
export function handleKey(event: KeyboardEvent, help: () => void): void {
  const target = event.target as HTMLElement;
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") return target.blur();
  if (target.matches("textarea, select, input:not([type=checkbox])")) return;
  if (event.key === "?") return help();
  const key = SHORTCUTS.find((item) => item.keys.includes(event.key));
  if (!key) return;
  event.preventDefault();
  key.run(event);
}
