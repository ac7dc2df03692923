// Types of the API responses. The API is specified in docs/explorer-api.md.
import type { Grid } from "./frames";

export type Stack = "self" | "encoder" | "decoder" | "cross";
export type Body = Record<string, unknown>;

export interface Model {
  id: string;
  name: string;
  source: "shipped" | "user" | "memory";
  family: "gpt" | "bert" | "seq2seq" | "rnn";
  summary: string;
  stacks: { stack: Stack; n_layers: number; n_heads: number }[];
  context_length: number;
  vocab_size: number;
  d_model: number;
  n_parameters: number;
  positions: string;
  second_text: null | "pair" | "translation";
  tasks: string[];
  views: string[];
  checkpoints: { id: string; step: number }[];
  best_step: number | null;
  classes: string[];
  examples: { text: string; second: string | null; description: string }[];
  error: string | null;
}

export interface Tokens {
  text: string;
  ids: number[];
  tokens: string[];
  labels: string[];
  word_ids: (number | null)[];
  is_special: boolean[];
}

export interface TokenPrediction {
  id: number;
  label: string;
  probability: number;
}

export interface Effect {
  position: number;
  top_tokens: { id: number; label: string; before: number; after: number }[];
  targets: { position: number; label: string; before: number; after: number }[];
  kl_divergence: number[];
}

export interface Run {
  run: string;
  model: string;
  text: string;
  second: string | null;
  sequence: Tokens;
  source: Tokens | null;
  stacks: { stack: Stack; n_layers: number; n_heads: number; n_queries: number; n_keys: number }[];
  predicts: "next_token" | "this_token" | null;
  predictions: { position: number; top_tokens: TokenPrediction[]; target: TokenPrediction | null }[];
  classes: { label: string; probability: number; before: number }[];
  effect: Effect | null;
  error: number;
  milliseconds: number;
  remarks: string[];
}

export type Intervention =
  | { kind: "head"; stack: Stack; layer: number; head: number }
  | { kind: "edge"; stack: Stack; query: number; key: number; layer?: number; head?: number }
  | { kind: "patch"; tap: string; text: string; second?: string; positions?: number[] };

export interface Heads {
  stack: Stack;
  patterns: string[];
  scores: Grid;
  n_queries: number[];
  labels: (string | null)[][];
  entropy: Grid;
  distance: Grid;
  error: number;
  thumbnails: Grid;
}

export interface Attention {
  stack: Stack;
  layer: number;
  pool_size: number;
  weights: Grid;
}

export interface MapData {
  title: string;
  queries: string[];
  keys: string[];
  is_share: boolean;
  pool_size: number;
  weights: Grid;
}
