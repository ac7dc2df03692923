// Color scales that are ordered by lightness so that they are readable with any type of color vision.
import { app } from "../state.svelte";

export type Scale = "root" | "linear" | "log";
type Color = [number, number, number];

const LIGHT: Color[] = [[255, 255, 255], [198, 219, 239], [107, 174, 214], [33, 113, 181], [8, 38, 84]];
const DARK: Color[] = [[20, 25, 34], [26, 62, 104], [38, 119, 178], [111, 190, 227], [240, 250, 255]];
/** Blue and orange are distinguishable with all common color vision deficiencies. The middle color is the background color. */
const DIVERGING_LIGHT: Color[] = [[179, 88, 6], [241, 163, 64], [250, 250, 250], [92, 156, 207], [8, 58, 128]];
const DIVERGING_DARK: Color[] = [[255, 190, 110], [190, 106, 24], [20, 25, 34], [48, 122, 190], [160, 214, 255]];
/** Based on the Okabe–Ito palette, which is designed for any type of color vision. The blue is lighter for the dark theme. */
export const CATEGORY_COLORS = ["#2b8cd0", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8a7f00", "#7a7a7a"];

function table(stops: Color[]): Uint8ClampedArray {
  const rgb = new Uint8ClampedArray(256 * 3);
  for (let i = 0; i < 256; i++) {
    const scaled = (i / 255) * (stops.length - 1);
    const at = Math.min(Math.floor(scaled), stops.length - 2);
    for (let c = 0; c < 3; c++) rgb[3 * i + c] = stops[at][c] + (scaled - at) * (stops[at + 1][c] - stops[at][c]);
  }
  return rgb;
}

const tables = { light: table(LIGHT), dark: table(DARK), divergingLight: table(DIVERGING_LIGHT), divergingDark: table(DIVERGING_DARK) };

export function colors(isDiverging: boolean): Uint8ClampedArray {
  if (isDiverging) return app.isDark ? tables.divergingDark : tables.divergingLight;
  return app.isDark ? tables.dark : tables.light;
}

/** Maps 0 … 1 to 0 … 255. The log scale covers three decades. */
export function step(fraction: number, scale: Scale): number {
  if (!(fraction > 0)) return 0;
  if (scale === "linear") return Math.min(255, Math.round(255 * fraction));
  if (scale === "root") return Math.min(255, Math.round(255 * Math.sqrt(fraction)));
  return Math.max(0, Math.min(255, Math.round((255 * (Math.log10(fraction) + 3)) / 3)));
}

/** Maps −1 … 1 to 0 … 255. */
export function divergingStep(fraction: number): number {
  return Math.max(0, Math.min(255, Math.round(127.5 + 127.5 * fraction)));
}

export function css(fraction: number, isDiverging = false): string {
  const rgb = colors(isDiverging);
  const i = 3 * (isDiverging ? divergingStep(fraction) : step(fraction, "linear"));
  return `rgb(${rgb[i]} ${rgb[i + 1]} ${rgb[i + 2]})`;
}

/** Returns black or white, whichever is more readable on the color. */
export function ink(fraction: number): string {
  const rgb = colors(false);
  const i = 3 * step(fraction, "linear");
  return 0.299 * rgb[i] + 0.587 * rgb[i + 1] + 0.114 * rgb[i + 2] > 140 ? "#0b1220" : "#ffffff";
}
