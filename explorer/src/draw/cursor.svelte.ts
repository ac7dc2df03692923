// Where one looks in a map whose cells are not tokens: under the pointer, or where the arrow keys or a click left it.
import { shown } from "../state.svelte";

export interface Cell {
  row: number;
  column: number;
}

export class Cursor {
  #over = $state.raw<Cell | null>(null);

  /** `name`: under which the kept place stands in the address. */
  constructor(readonly name: string) {}

  get place(): Cell | null {
    const kept = /^(\d+)\.(\d+)$/.exec(shown.option(this.name, ""));
    return this.#over ?? (kept ? { row: Number(kept[1]), column: Number(kept[2]) } : null);
  }

  hover(row: number | null, column: number | null): void {
    this.#over = row === null || column === null ? null : { row, column };
  }

  keep(row: number, column: number): void {
    this.#over = null;
    shown.options[this.name] = `${row}.${column}`;
  }
}
