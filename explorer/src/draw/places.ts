// Which cell of a map a token stands in: its own, its word's, or one that several share.
import type { Side } from "../types";

/** A cell for each token. Words as the server merges them: a token of no word is by itself. */
export function cellsOf(side: Side | null, isMerged: boolean, pool = 1): number[] {
  let at = -1;
  let before: number | null = null;
  return (side?.words ?? []).map((word) => {
    if (!isMerged || word === null || word !== before) at += 1;
    before = word;
    return Math.floor(at / pool);
  });
}
