// Cursor in a heatmap whose cells are not tokens: the cell under the pointer, or the one selected by arrow keys or a click.
import { app } from "../state.svelte";

export interface Cell {
  row: number;
  column: number;
}

export class Cursor {
  #hovered = $state.raw<Cell | null>(null);

  /** The selected cell is stored in the URL parameter `name`. */
  constructor(readonly name: string) {}

  get cell(): Cell | null {
    const match = /^(\d+)\.(\d+)$/.exec(app.option(this.name, ""));
    return this.#hovered ?? (match ? { row: Number(match[1]), column: Number(match[2]) } : null);
  }

  hover(row: number | null, column: number | null): void {
    this.#hovered = row === null || column === null ? null : { row, column };
  }

  select(row: number, column: number): void {
    this.#hovered = null;
    app.options[this.name] = `${row}.${column}`;
  }
}
