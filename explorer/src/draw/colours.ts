// Which colour a number has: scales whose lightness alone tells the order, so that every eye can read them.
import { shown } from "../state.svelte";

export type Scale = "root" | "linear" | "log";
type Colour = [number, number, number];

const LIGHT: Colour[] = [[255, 255, 255], [198, 219, 239], [107, 174, 214], [33, 113, 181], [8, 38, 84]];
const DARK: Colour[] = [[20, 25, 34], [26, 62, 104], [38, 119, 178], [111, 190, 227], [240, 250, 255]];
/** Blue against orange, which no common colour blindness confuses; the middle is the paper. */
const APART_LIGHT: Colour[] = [[179, 88, 6], [241, 163, 64], [250, 250, 250], [92, 156, 207], [8, 58, 128]];
const APART_DARK: Colour[] = [[255, 190, 110], [190, 106, 24], [20, 25, 34], [48, 122, 190], [160, 214, 255]];
/** Okabe and Ito's eight, told apart by every eye; the blue is lighter than theirs, to be seen on dark paper too. */
export const KINDS = ["#2b8cd0", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8a7f00", "#7a7a7a"];

function table(stops: Colour[]): Uint8ClampedArray {
  const made = new Uint8ClampedArray(256 * 3);
  for (let i = 0; i < 256; i++) {
    const place = (i / 255) * (stops.length - 1);
    const at = Math.min(Math.floor(place), stops.length - 2);
    for (let c = 0; c < 3; c++) made[3 * i + c] = stops[at][c] + (place - at) * (stops[at + 1][c] - stops[at][c]);
  }
  return made;
}

const tables = { light: table(LIGHT), dark: table(DARK), apartLight: table(APART_LIGHT), apartDark: table(APART_DARK) };

export function colours(isApart: boolean): Uint8ClampedArray {
  if (isApart) return shown.isDark ? tables.apartDark : tables.apartLight;
  return shown.isDark ? tables.dark : tables.light;
}

/** 0 … 1 → 0 … 255. Log: three decades. */
export function step(share: number, scale: Scale): number {
  if (!(share > 0)) return 0;
  if (scale === "linear") return Math.min(255, Math.round(255 * share));
  if (scale === "root") return Math.min(255, Math.round(255 * Math.sqrt(share)));
  return Math.max(0, Math.min(255, Math.round((255 * (Math.log10(share) + 3)) / 3)));
}

/** −1 … 1 → 0 … 255. */
export function stepApart(share: number): number {
  return Math.max(0, Math.min(255, Math.round(127.5 + 127.5 * share)));
}

export function css(share: number, isApart = false): string {
  const found = colours(isApart);
  const i = 3 * (isApart ? stepApart(share) : step(share, "linear"));
  return `rgb(${found[i]} ${found[i + 1]} ${found[i + 2]})`;
}

/** Black or white, whichever can be read on that colour. */
export function ink(share: number): string {
  const found = colours(false);
  const i = 3 * step(share, "linear");
  return 0.299 * found[i] + 0.587 * found[i + 1] + 0.114 * found[i + 2] > 140 ? "#0b1220" : "#ffffff";
}
