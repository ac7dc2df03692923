// A streamed text generation. The steps are buffered so that the page can show them one at a time.
import { stream } from "./api";
import type { Body, Tokens } from "./types";
import type { Grid } from "./frames";

export interface Start {
  kind: "start";
  prompt: Tokens;
  n_layers: number;
  n_heads: number;
  n_kv_heads: number;
  bytes_per_token: number;
  context_length: number;
}
export interface Step {
  kind: "step";
  index: number;
  position: number;
  id: number;
  label: string;
  text: string;
  probability: number;
  candidates: { id: number; label: string; probability: number; sampling_probability: number; is_chosen: boolean }[];
  attention: Grid;
  n_computed: number;
  n_cached: number;
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

export class Generation {
  start = $state.raw<Start | null>(null);
  steps = $state.raw<Step[]>([]);
  end = $state.raw<End | null>(null);
  error = $state("");
  #controller: AbortController | null = null;

  get hasStarted(): boolean {
    return this.#controller !== null;
  }

  async run(body: Body): Promise<void> {
    this.clear();
    const controller = (this.#controller = new AbortController());
    try {
      for await (const frame of stream<Start | Step | End>("/api/generate", body, controller.signal)) {
        if (controller.signal.aborted) return;
        if (frame.kind === "start") this.start = frame;
        else if (frame.kind === "step") this.steps = [...this.steps, frame];
        else this.end = frame;
      }
    } catch (error) {
      if (!controller.signal.aborted) this.error = (error as Error).message;
    }
  }

  clear(): void {
    this.#controller?.abort();
    this.#controller = null;
    [this.start, this.steps, this.end, this.error] = [null, [], null, ""];
  }
}
