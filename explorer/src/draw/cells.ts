// How a table of numbers becomes pixels: one cell, one pixel, made larger by the browser.
import type { Grid } from "../wire";
import { colours, step, stepApart, type Scale } from "./colours";

export interface Painting {
  scale?: Scale;
  /** The number that is darkest. */
  most?: number;
  /** Numbers on both sides of 0. */
  isApart?: boolean;
}

/** Paints one pixel a cell; the canvas gets the table's own size. */
export function paint(canvas: HTMLCanvasElement, table: Grid, how: Painting = {}): void {
  const [rows, columns] = table.shape;
  if (!rows || !columns) return;
  canvas.width = columns;
  canvas.height = rows;
  const image = new ImageData(columns, rows);
  const found = colours(how.isApart ?? false);
  const most = how.most ?? 1;
  for (let i = 0; i < rows * columns; i++) {
    const share = most > 0 ? table.flat(i) / most : 0;
    const at = 3 * (how.isApart ? stepApart(share) : step(share, how.scale ?? "root"));
    image.data[4 * i] = found[at];
    image.data[4 * i + 1] = found[at + 1];
    image.data[4 * i + 2] = found[at + 2];
    image.data[4 * i + 3] = 255;
  }
  canvas.getContext("2d")!.putImageData(image, 0, 0);
}
