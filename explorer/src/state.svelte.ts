// State of the page. All views share this state, and it is stored in the URL.
import { invalidate, request, saved, type ApiRequest } from "./api";
import type { Body, Intervention, Model, Run, Tokens, Stack } from "./types";

export const VIEWS = [
  { id: "heads", letter: "A", name: "All heads", needs: "heads" },
  { id: "head", letter: "B", name: "Head", needs: "head" },
  { id: "map", letter: "C", name: "Heatmap", needs: "map" },
  { id: "neuron", letter: "D", name: "Neuron", needs: "neuron" },
  { id: "residual", letter: "E", name: "Residual", needs: "residual" },
  { id: "lens", letter: "F", name: "Logit lens", needs: "lens" },
  { id: "coreference", letter: "G", name: "Coreference", needs: "coreference" },
  { id: "embeddings", letter: "H", name: "Embeddings", needs: "embeddings" },
  { id: "live", letter: "I", name: "Live", needs: "generate|translate" },
  { id: "cost", letter: "J", name: "Cost", needs: "cost" },
  { id: "compare", letter: "K", name: "Compare", needs: "compare" },
] as const;
export type ViewId = (typeof VIEWS)[number]["id"];
type QueryKey = { query: number | null; key: number | null };

/** URL parameters that are shared by all views. All other parameters are options of individual views. */
const STATE_PARAMETERS = ["view", "model", "text", "second", "stack", "layer", "head", "query", "key", "interventions", "theme"];

const DARK = matchMedia("(prefers-color-scheme: dark)");

class AppState {
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
  interventions = $state.raw<Intervention[]>([]);
  theme = $state<"auto" | "light" | "dark">("auto");
  systemIsDark = $state(DARK.matches);
  /** Canvases are repainted when this value changes because style sheets do not affect them. */
  isDark = $derived(this.theme === "auto" ? this.systemIsDark : this.theme === "dark");
  /** Options of individual views by name. The values are strings, as in the URL. */
  options = $state<Record<string, string>>({});
  hover = $state.raw<QueryKey | null>(null);
  run = $state.raw<Run | null>(null);
  problem = $state("");
  /** Error message if the URL refers to a model that is not open. */
  missing = $state("");
  busy = $state(true);
  /** Requests of the open view. Exports include the responses to these requests. */
  requests = $state.raw<ApiRequest[]>([]);

  model = $derived(this.models.find((item) => item.id === this.modelId.replace(/@\d+$/, "")) ?? null);
  shape = $derived(this.run?.stacks.find((item) => item.stack === this.stack) ?? this.run?.stacks[0] ?? null);
  rows = $derived<Tokens | null>(this.run ? (this.stack === "encoder" ? this.run.source : this.run.sequence) : null);
  columns = $derived<Tokens | null>(
    this.run ? (this.stack === "encoder" || this.stack === "cross" ? this.run.source : this.run.sequence) : null,
  );
  /** The query under the pointer or, if there is none, the selected query. The default is the first [MASK] or the last token. */
  q = $derived(clampIndex(this.hover?.query ?? this.query ?? this.#defaultQuery(), this.rows));
  k = $derived.by(() => {
    const key = this.hover ? this.hover.key : this.key;
    return key === null ? null : clampIndex(key, this.columns);
  });

  /** The text to compare with or to patch from. The default differs from the text in one word, or is another example. */
  otherText = $derived(this.option("other_text", minimalPair(this.text) ?? this.model?.examples?.find((item) => item.text !== this.text)?.text ?? ""));

  #defaultQuery(): number {
    const n = this.rows?.ids.length ?? 1;
    if (this.run?.predicts === "this_token" && this.run.predictions.length) return this.run.predictions[0].position;
    return n > 2 && this.rows?.is_special[n - 1] ? n - 2 : n - 1;
  }

  runRequest(interventions = this.interventions): Body {
    return {
      model: this.modelId,
      text: this.text,
      ...(this.second !== null ? { second: this.second } : {}),
      ...(interventions.length ? { interventions } : {}),
    };
  }

  option(name: string, fallback: string): string {
    return this.options[name] ?? fallback;
  }

  setOption(name: string, value: string, fallback: string): void {
    if (value === fallback) delete this.options[name];
    else this.options[name] = value;
  }

  openModel(id: string): void {
    this.missing = "";
    const before = this.model;
    this.modelId = id;
    const after = this.model;
    if (!after || after.error || after === before) return;
    const isExample = before?.examples?.some((item) => item.text === this.text) ?? true;
    if (isExample || !this.text || before?.family !== after.family) {
      this.text = after.examples[0].text;
      this.second = after.examples[0].second;
    }
    // Cross-attention is the most interesting stack of a translation model.
    this.stack = after.stacks.find((item) => item.stack === "cross")?.stack ?? after.stacks[0]?.stack ?? "self";
    Object.assign(this, { layer: 0, head: 0, query: null, key: null, interventions: [] });
    if (!supportsView(after, this.view)) this.view = after.stacks.length ? "heads" : "lens";
  }

  setText(text: string, second: string | null): void {
    if (text === this.text && second === this.second) return;
    // Reset everything that refers to positions or words of the previous text.
    for (const name of ["pronoun", "candidates"]) delete this.options[name];
    Object.assign(this, { text, second, query: null, key: null, interventions: this.interventions.filter((item) => item.kind === "head") });
  }

  select(selection: Partial<{ stack: Stack; layer: number; head: number; query: number | null; key: number | null }>): void {
    Object.assign(this, selection);
  }

  isAblated(stack: Stack, layer: number, head: number): boolean {
    return this.interventions.some((item) => item.kind === "head" && item.stack === stack && item.layer === layer && item.head === head);
  }

  toggle(intervention: Intervention): void {
    const name = JSON.stringify(intervention);
    const others = this.interventions.filter((other) => JSON.stringify(other) !== name);
    this.interventions = others.length < this.interventions.length ? others : [...this.interventions, intervention];
  }

  toggleHead(stack: Stack, layer: number, head: number): void {
    this.toggle({ kind: "head", stack, layer, head });
  }

  /** Masks or unmasks attention from a query to a key, in the selected head or in all layers and heads. */
  maskEdge(query: number, key: number, everywhere = false): void {
    const scope = everywhere ? {} : { layer: this.layer, head: this.head };
    this.toggle({ kind: "edge", stack: this.stack, query, key, ...scope });
  }

  async addModel(path: string): Promise<void> {
    const added = await request<Model>("/api/models/add", { path });
    invalidate("/api/models");
    this.models = [...this.models.filter((item) => item.id !== added.id), added];
    if (added.error) throw new Error(added.error);
    this.openModel(added.id);
  }

  async initialize(): Promise<void> {
    const response = await request<{ models: Model[]; default_model: string | null }>("/api/models", null);
    this.models = response.models;
    const first = response.models.find((item) => item.id === response.default_model && !item.error) ?? response.models.find((item) => !item.error);
    if (!first) throw new Error("No model is open. Start the server with a model: qkv explore MODEL");
    this.openModel(first.id);
    const savedRun = saved?.responses.find((item) => item.path === "/api/run");
    if (savedRun) this.setText(String(savedRun.body?.text), (savedRun.body?.second as string | undefined) ?? null);
    this.fromHash(currentHash() || saved?.state || "");
  }

  async load(signal: AbortSignal): Promise<void> {
    this.busy = true;
    try {
      const run = await request<Run>("/api/run", this.runRequest(), signal);
      if (signal.aborted) return;
      this.run = run;
      this.problem = "";
      if (!run.stacks.some((item) => item.stack === this.stack) && run.stacks[0]) this.stack = run.stacks[0].stack;
      const shape = run.stacks.find((item) => item.stack === this.stack);
      this.layer = Math.min(this.layer, (shape?.n_layers ?? 1) - 1);
      this.head = Math.min(this.head, (shape?.n_heads ?? 1) - 1);
    } catch (error) {
      if (signal.aborted) return;
      this.problem = (error as Error).message;
      // Do not show the previous run for this text.
      this.run = null;
    }
    this.busy = false;
  }

  toHash(): string {
    const parameters = new URLSearchParams();
    parameters.set("view", this.view);
    parameters.set("model", this.modelId);
    parameters.set("text", this.text);
    if (this.second !== null) parameters.set("second", this.second);
    parameters.set("stack", this.stack);
    parameters.set("layer", String(this.layer));
    parameters.set("head", String(this.head));
    if (this.query !== null) parameters.set("query", String(this.query));
    if (this.key !== null) parameters.set("key", String(this.key));
    if (this.interventions.length) parameters.set("interventions", JSON.stringify(this.interventions));
    if (this.theme !== "auto") parameters.set("theme", this.theme);
    for (const [name, value] of Object.entries(this.options)) parameters.set(name, value);
    return "#" + parameters.toString();
  }

  fromHash(hash: string): void {
    const parameters = new URLSearchParams(hash.replace(/^#/, ""));
    if (![...parameters.keys()].length) return;
    const model = parameters.get("model");
    if (model && this.models.some((item) => item.id === model.replace(/@\d+$/, "") && !item.error)) this.openModel(model);
    else if (model) this.missing = `The URL refers to the model ${model}, which is not open`;
    const view = parameters.get("view") as ViewId | null;
    if (view && this.model && supportsView(this.model, view)) this.view = view;
    if (parameters.has("text")) this.text = parameters.get("text")!;
    if (parameters.has("text")) this.second = parameters.get("second");
    if (parameters.has("stack")) this.stack = parameters.get("stack") as Stack;
    this.layer = parseIndex(parameters.get("layer")) ?? 0;
    this.head = parseIndex(parameters.get("head")) ?? 0;
    this.query = parseIndex(parameters.get("query"));
    this.key = parseIndex(parameters.get("key"));
    this.interventions = parseInterventions(parameters.get("interventions"));
    const theme = parameters.get("theme");
    this.theme = theme === "light" || theme === "dark" ? theme : "auto";
    this.options = Object.fromEntries([...parameters].filter(([name]) => !STATE_PARAMETERS.includes(name)));
  }
}

/** Pairs of interchangeable words. Swapping the words of a pair usually does not change the number of tokens. */
const SWAPS = [["tired", "wide"], ["red", "blue"], ["dog", "cow"], ["cat", "dog"], ["gato", "perro"], ["grande", "buena"], ["café", "agua"]];

/** Returns the text with one word replaced, or null if the text contains none of the words. */
function minimalPair(text: string): string | null {
  for (const [word, other] of [...SWAPS, ...SWAPS.map(([a, b]) => [b, a])]) {
    const swapped = text.replace(new RegExp(`\\b${word}(?![\\p{L}])`, "u"), other);
    if (swapped !== text) return swapped;
  }
  return null;
}

function clampIndex(index: number, tokens: Tokens | null): number {
  return Math.max(0, Math.min(index, (tokens?.ids.length ?? 1) - 1));
}

function parseIndex(text: string | null): number | null {
  return text !== null && /^\d{1,6}$/.test(text) ? Number(text) : null;
}

function parseInterventions(text: string | null): Intervention[] {
  try {
    const parsed = JSON.parse(text ?? "[]");
    return Array.isArray(parsed) ? parsed : [];
  } catch {
    return [];
  }
}

export function supportsView(model: Model, view: string): boolean {
  const needs = VIEWS.find((item) => item.id === view)?.needs.split("|") ?? [];
  return needs.some((item) => model.views.includes(item));
}

export function currentHash(): string {
  return location.hash;
}

export const app = new AppState();
DARK.addEventListener("change", () => (app.systemIsDark = DARK.matches));
