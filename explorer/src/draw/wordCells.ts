// Maps tokens to cells of an attention map, in which the tokens of a word may be merged and cells may be pooled.
import type { Tokens } from "../types";

/** Returns the cell of each token. As on the server, tokens outside any word are not merged. */
export function wordCells(tokens: Tokens | null, isMerged: boolean, poolSize = 1): number[] {
  let cell = -1;
  let previous: number | null = null;
  return (tokens?.word_ids ?? []).map((word) => {
    if (!isMerged || word === null || word !== previous) cell += 1;
    previous = word;
    return Math.floor(cell / poolSize);
  });
}
