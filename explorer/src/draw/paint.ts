// Paints a table of numbers on a canvas with one pixel per cell. The browser scales the canvas up.
import type { Grid } from "../frames";
import { colors, step, divergingStep, type Scale } from "./colors";

export interface PaintOptions {
  scale?: Scale;
  /** The value with the strongest color. */
  max?: number;
  /** Whether values can be negative. If so, 0 is in the middle of the color scale. */
  isDiverging?: boolean;
}

/** Paints one pixel per cell and sets the canvas to the size of the table. */
export function paint(canvas: HTMLCanvasElement, table: Grid, options: PaintOptions = {}): void {
  const [rows, columns] = table.shape;
  if (!rows || !columns) return;
  canvas.width = columns;
  canvas.height = rows;
  const image = new ImageData(columns, rows);
  const palette = colors(options.isDiverging ?? false);
  const max = options.max ?? 1;
  for (let i = 0; i < rows * columns; i++) {
    const fraction = max > 0 ? table.flat(i) / max : 0;
    const offset = 3 * (options.isDiverging ? divergingStep(fraction) : step(fraction, options.scale ?? "root"));
    image.data[4 * i] = palette[offset];
    image.data[4 * i + 1] = palette[offset + 1];
    image.data[4 * i + 2] = palette[offset + 2];
    image.data[4 * i + 3] = 255;
  }
  canvas.getContext("2d")!.putImageData(image, 0, 0);
}
