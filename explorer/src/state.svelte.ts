// What the page shows: one selection for all views, kept in the address.
import { ask, forget, saved, type Asked } from "./ask";
import type { Body, Intervention, Model, Run, Side, Stack } from "./types";

export const VIEWS = [
  { id: "heads", letter: "A", name: "Model", needs: "heads" },
  { id: "head", letter: "B", name: "Head", needs: "head" },
  { id: "map", letter: "C", name: "Heat map", needs: "map" },
  { id: "neuron", letter: "D", name: "Neuron", needs: "neuron" },
  { id: "residual", letter: "E", name: "Residual", needs: "residual" },
  { id: "lens", letter: "F", name: "Lens", needs: "lens" },
  { id: "it", letter: "G", name: "What is “it”?", needs: "it" },
  { id: "embeddings", letter: "H", name: "Embeddings", needs: "embeddings" },
  { id: "live", letter: "I", name: "Live", needs: "generate|translate" },
  { id: "cost", letter: "J", name: "Cost", needs: "cost" },
  { id: "compare", letter: "K", name: "Compare", needs: "compare" },
] as const;
export type ViewId = (typeof VIEWS)[number]["id"];
type Place = { query: number | null; key: number | null };

const OWN_KEYS = ["view", "model", "text", "second", "stack", "layer", "head", "query", "key", "off", "theme"];

const DARK = matchMedia("(prefers-color-scheme: dark)");

class Shown {
  models = $state.raw<Model[]>([]);
  view = $state<ViewId>("heads");
  modelId = $state("");
  text = $state("");
  second = $state<string | null>(null);
  stack = $state<Stack>("self");
  layer = $state(0);
  head = $state(0);
  query = $state<number | null>(null);
  key = $state<number | null>(null);
  off = $state.raw<Intervention[]>([]);
  theme = $state<"auto" | "light" | "dark">("auto");
  systemIsDark = $state(DARK.matches);
  /** What is painted follows it: canvases know nothing of style sheets. */
  isDark = $derived(this.theme === "auto" ? this.systemIsDark : this.theme === "dark");
  /** Settings of single views, by name; text, as in the address. */
  options = $state<Record<string, string>>({});
  hover = $state.raw<Place | null>(null);
  run = $state.raw<Run | null>(null);
  problem = $state("");
  /** What the address asked for and cannot be had. */
  missing = $state("");
  busy = $state(true);
  /** Requests of the view that is open: what an export of it writes. */
  requests = $state.raw<Asked[]>([]);

  model = $derived(this.models.find((one) => one.id === this.modelId.replace(/@\d+$/, "")) ?? null);
  shape = $derived(this.run?.stacks.find((one) => one.stack === this.stack) ?? this.run?.stacks[0] ?? null);
  rows = $derived<Side | null>(this.run ? (this.stack === "encoder" ? this.run.source : this.run.own) : null);
  columns = $derived<Side | null>(
    this.run ? (this.stack === "encoder" || this.stack === "cross" ? this.run.source : this.run.own) : null,
  );
  /** The query looked at: under the pointer, chosen, or the last; of a BERT the first [MASK]. */
  q = $derived(within(this.hover?.query ?? this.query ?? this.#lastRow(), this.rows));
  k = $derived.by(() => {
    const key = this.hover ? this.hover.key : this.key;
    return key === null ? null : within(key, this.columns);
  });

  /** What this text is compared with or patched from: its minimal pair, else another example. */
  otherText = $derived(this.option("other_text", minimal(this.text) ?? this.model?.examples?.find((one) => one.text !== this.text)?.text ?? ""));

  #lastRow(): number {
    const n = this.rows?.ids.length ?? 1;
    if (this.run?.says === "here" && this.run.predictions.length) return this.run.predictions[0].position;
    return n > 2 && this.rows?.is_special[n - 1] ? n - 2 : n - 1;
  }

  asked(off = this.off): Body {
    return {
      model: this.modelId,
      text: this.text,
      ...(this.second !== null ? { second: this.second } : {}),
      ...(off.length ? { interventions: off } : {}),
    };
  }

  option(name: string, otherwise: string): string {
    return this.options[name] ?? otherwise;
  }

  choose(name: string, value: string, otherwise: string): void {
    if (value === otherwise) delete this.options[name];
    else this.options[name] = value;
  }

  openModel(id: string): void {
    this.missing = "";
    const before = this.model;
    this.modelId = id;
    const after = this.model;
    if (!after || after.error || after === before) return;
    const isExample = before?.examples?.some((one) => one.text === this.text) ?? true;
    if (isExample || !this.text || before?.family !== after.family) {
      this.text = after.examples[0].text;
      this.second = after.examples[0].second;
    }
    // A translator is first asked which source words it looks at.
    this.stack = after.stacks.find((one) => one.stack === "cross")?.stack ?? after.stacks[0]?.stack ?? "self";
    Object.assign(this, { layer: 0, head: 0, query: null, key: null, off: [] });
    if (!has(after, this.view)) this.view = after.stacks.length ? "heads" : "lens";
  }

  read(text: string, second: string | null): void {
    if (text === this.text && second === this.second) return;
    // Places and pronouns mean other tokens now.
    for (const name of ["pronoun", "candidates"]) delete this.options[name];
    Object.assign(this, { text, second, query: null, key: null, off: this.off.filter((one) => one.kind === "head") });
  }

  select(place: Partial<{ stack: Stack; layer: number; head: number; query: number | null; key: number | null }>): void {
    Object.assign(this, place);
  }

  isOff(stack: Stack, layer: number, head: number): boolean {
    return this.off.some((one) => one.kind === "head" && one.stack === stack && one.layer === layer && one.head === head);
  }

  toggle(one: Intervention): void {
    const name = JSON.stringify(one);
    const left = this.off.filter((other) => JSON.stringify(other) !== name);
    this.off = left.length < this.off.length ? left : [...this.off, one];
  }

  toggleHead(stack: Stack, layer: number, head: number): void {
    this.toggle({ kind: "head", stack, layer, head });
  }

  /** In the open head alone, or everywhere. */
  cut(query: number, key: number, everywhere = false): void {
    const place = everywhere ? {} : { layer: this.layer, head: this.head };
    this.toggle({ kind: "edge", stack: this.stack, query, key, ...place });
  }

  async addModel(path: string): Promise<void> {
    const made = await ask<Model>("/api/models/add", { path });
    forget("/api/models");
    this.models = [...this.models.filter((one) => one.id !== made.id), made];
    if (made.error) throw new Error(made.error);
    this.openModel(made.id);
  }

  async begin(): Promise<void> {
    const told = await ask<{ models: Model[]; first: string | null }>("/api/models", null);
    this.models = told.models;
    const first = told.models.find((one) => one.id === told.first && !one.error) ?? told.models.find((one) => !one.error);
    if (!first) throw new Error("No model is open. Start with one: qkv explore MODEL");
    this.openModel(first.id);
    const held = saved?.answers.find((one) => one.path === "/api/run");
    if (held) this.read(String(held.body?.text), (held.body?.second as string | undefined) ?? null);
    this.fromHash(currentHash() || saved?.state || "");
  }

  async load(signal: AbortSignal): Promise<void> {
    this.busy = true;
    try {
      const run = await ask<Run>("/api/run", this.asked(), signal);
      if (signal.aborted) return;
      this.run = run;
      this.problem = "";
      if (!run.stacks.some((one) => one.stack === this.stack) && run.stacks[0]) this.stack = run.stacks[0].stack;
      const shape = run.stacks.find((one) => one.stack === this.stack);
      this.layer = Math.min(this.layer, (shape?.layers ?? 1) - 1);
      this.head = Math.min(this.head, (shape?.heads ?? 1) - 1);
    } catch (error) {
      if (signal.aborted) return;
      this.problem = (error as Error).message;
      // What was read before must not pass for this text.
      this.run = null;
    }
    this.busy = false;
  }

  toHash(): string {
    const put = new URLSearchParams();
    put.set("view", this.view);
    put.set("model", this.modelId);
    put.set("text", this.text);
    if (this.second !== null) put.set("second", this.second);
    put.set("stack", this.stack);
    put.set("layer", String(this.layer));
    put.set("head", String(this.head));
    if (this.query !== null) put.set("query", String(this.query));
    if (this.key !== null) put.set("key", String(this.key));
    if (this.off.length) put.set("off", JSON.stringify(this.off));
    if (this.theme !== "auto") put.set("theme", this.theme);
    for (const [name, value] of Object.entries(this.options)) put.set(name, value);
    return "#" + put.toString();
  }

  fromHash(hash: string): void {
    const got = new URLSearchParams(hash.replace(/^#/, ""));
    if (![...got.keys()].length) return;
    const model = got.get("model");
    if (model && this.models.some((one) => one.id === model.replace(/@\d+$/, "") && !one.error)) this.openModel(model);
    else if (model) this.missing = `The address names the model ${model}, which is not open here.`;
    const view = got.get("view") as ViewId | null;
    if (view && this.model && has(this.model, view)) this.view = view;
    if (got.has("text")) this.text = got.get("text")!;
    if (got.has("text")) this.second = got.get("second");
    if (got.has("stack")) this.stack = got.get("stack") as Stack;
    this.layer = whole(got.get("layer")) ?? 0;
    this.head = whole(got.get("head")) ?? 0;
    this.query = whole(got.get("query"));
    this.key = whole(got.get("key"));
    this.off = listed(got.get("off"));
    const theme = got.get("theme");
    this.theme = theme === "light" || theme === "dark" ? theme : "auto";
    this.options = Object.fromEntries([...got].filter(([name]) => !OWN_KEYS.includes(name)));
  }
}

/** Words of one kind, so that the two texts are as a rule equally long in tokens. */
const SWAPS = [["tired", "wide"], ["red", "blue"], ["dog", "cow"], ["cat", "dog"], ["gato", "perro"], ["grande", "buena"], ["café", "agua"]];

/** The same text with one word for another. */
function minimal(text: string): string | null {
  for (const [one, other] of [...SWAPS, ...SWAPS.map(([a, b]) => [b, a])]) {
    const swapped = text.replace(new RegExp(`\\b${one}(?![\\p{L}])`, "u"), other);
    if (swapped !== text) return swapped;
  }
  return null;
}

function within(place: number, side: Side | null): number {
  return Math.max(0, Math.min(place, (side?.ids.length ?? 1) - 1));
}

function whole(text: string | null): number | null {
  return text !== null && /^\d{1,6}$/.test(text) ? Number(text) : null;
}

function listed(text: string | null): Intervention[] {
  try {
    const found = JSON.parse(text ?? "[]");
    return Array.isArray(found) ? found : [];
  } catch {
    return [];
  }
}

export function has(model: Model, view: string): boolean {
  const needs = VIEWS.find((one) => one.id === view)?.needs.split("|") ?? [];
  return needs.some((one) => model.views.includes(one));
}

export function currentHash(): string {
  return location.hash;
}

export const shown = new Shown();
DARK.addEventListener("change", () => (shown.systemIsDark = DARK.matches));
