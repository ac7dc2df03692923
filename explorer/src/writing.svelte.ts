// A generation as it comes from the server: buffered, and shown step by step.
import { stream } from "./ask";
import type { Body, Side } from "./types";
import type { Grid } from "./wire";

export interface Start {
  kind: "start";
  prompt: Side;
  layers: number;
  heads: number;
  kv_heads: number;
  bytes_per_token: number;
  context_length: number;
}
export interface Step {
  kind: "step";
  index: number;
  position: number;
  id: number;
  label: string;
  piece: string;
  probability: number;
  candidates: { id: number; label: string; probability: number; revised: number; is_chosen: boolean }[];
  attention: Grid;
  computed: number;
  cache_tokens: number;
  cache_bytes: number;
  flops: number;
  bytes: number;
  predicted_ms: number | null;
  bound_ms: number;
  measured_ms: number;
}
interface End {
  kind: "end";
  finish_reason: "stop" | "length" | "context";
  text: string;
  remarks: string[];
}

export class Writing {
  start = $state.raw<Start | null>(null);
  steps = $state.raw<Step[]>([]);
  end = $state.raw<End | null>(null);
  error = $state("");
  #stop: AbortController | null = null;

  get isBegun(): boolean {
    return this.#stop !== null;
  }

  async begin(body: Body): Promise<void> {
    this.clear();
    const stop = (this.#stop = new AbortController());
    try {
      for await (const frame of stream<Start | Step | End>("/api/generate", body, stop.signal)) {
        if (stop.signal.aborted) return;
        if (frame.kind === "start") this.start = frame;
        else if (frame.kind === "step") this.steps = [...this.steps, frame];
        else this.end = frame;
      }
    } catch (error) {
      if (!stop.signal.aborted) this.error = (error as Error).message;
    }
  }

  clear(): void {
    this.#stop?.abort();
    this.#stop = null;
    [this.start, this.steps, this.end, this.error] = [null, [], null, ""];
  }
}
