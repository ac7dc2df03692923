// Maps tokens to cells of an attention map, where words may be merged and cells pooled.
import type { Tokens } from "../types";

/** Returns the cell of each token. Words are merged like on the server: tokens outside any word have their own cell. */
export function wordCells(tokens: Tokens | null, isMerged: boolean, poolSize = 1): number[] {
  let cell = -1;
  let previous: number | null = null;
  return (tokens?.word_ids ?? []).map((word) => {
    if (!isMerged || word === null || word !== previous) cell += 1;
    previous = word;
    return Math.floor(cell / poolSize);
  });
}
