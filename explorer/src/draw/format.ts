// Formatting of numbers and tokens.

export function percent(p: number): string {
  if (!Number.isFinite(p)) return "–";
  if (p > 0 && p < 0.0005) return "<0.1 %";
  return `${(100 * p).toFixed(p < 0.1 ? 1 : 0)} %`;
}

export function formatNumber(value: number, digits = 3): string {
  if (!Number.isFinite(value)) return value === -Infinity ? "−∞" : "–";
  if (value !== 0 && Math.abs(value) < 0.001) return value.toExponential(0).replace("-", "−");
  if (Math.abs(value) >= 10 ** (digits - 1)) return Math.round(value).toLocaleString("en").replace("-", "−");
  return value.toPrecision(digits).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "").replace(/^-/, "−").replace(/e\+?/, "e");
}

const PREFIXES: [number, string][] = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

export function formatLarge(value: number, unit = ""): string {
  const [by, letter] = PREFIXES.find(([size]) => Math.abs(value) >= size) ?? [1, ""];
  const scaled = value / by;
  return `${by === 1 && Number.isInteger(scaled) ? scaled : scaled.toPrecision(3)} ${letter}${unit}`.trim();
}

export function bytes(n: number): string {
  return n < 1000 ? `${n} B` : formatLarge(n, "B");
}

export function pluralize(n: number, noun: string): string {
  return `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
}

/** Shortens a token so that it does not overlap its neighbors. */
export function truncate(label: string, maxLength = 14): string {
  const letters = [...label];
  return letters.length > maxLength ? letters.slice(0, maxLength - 1).join("") + "…" : label;
}
