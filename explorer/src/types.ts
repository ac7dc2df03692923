// What the API answers (docs/explorer-api.md), as types.
import type { Grid } from "./wire";

export type Stack = "self" | "encoder" | "decoder" | "cross";
export type Body = Record<string, unknown>;

export interface Model {
  id: string;
  name: string;
  source: "shipped" | "given" | "memory";
  family: "gpt" | "bert" | "seq2seq" | "rnn";
  summary: string;
  stacks: { stack: Stack; layers: number; heads: number }[];
  context_length: number;
  vocab_size: number;
  d_model: number;
  parameters: number;
  positions: string;
  takes_second: null | "pair" | "translation";
  tasks: string[];
  views: string[];
  checkpoints: { id: string; step: number }[];
  best: number | null;
  classes: string[];
  examples: { text: string; second: string | null; about: string }[];
  error: string | null;
}

export interface Side {
  text: string;
  ids: number[];
  tokens: string[];
  labels: string[];
  words: (number | null)[];
  is_special: boolean[];
}

export interface Guess {
  id: number;
  label: string;
  probability: number;
}

export interface Effect {
  position: number;
  guesses: { id: number; label: string; before: number; after: number }[];
  wanted: { position: number; label: string; before: number; after: number }[];
  divergence: number[];
}

export interface Run {
  run: string;
  model: string;
  text: string;
  second: string | null;
  own: Side;
  source: Side | null;
  stacks: { stack: Stack; layers: number; heads: number; queries: number; keys: number }[];
  says: "next" | "here" | null;
  predictions: { position: number; guesses: Guess[]; wanted: Guess | null }[];
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
  thumbs: Grid;
}

export interface Attention {
  stack: Stack;
  layer: number;
  pool: number;
  weights: Grid;
}

export interface MapData {
  title: string;
  queries: string[];
  keys: string[];
  is_share: boolean;
  pool: number;
  weights: Grid;
}
