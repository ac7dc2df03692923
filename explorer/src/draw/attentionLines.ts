// Draws attention as lines between tokens.

export interface Line {
  from: number;
  to: number;
  weight: number;
  color: string;
}

interface Size {
  width: number;
  rowHeight: number;
  /** Range of visible rows. Lines that lie completely outside this range are not drawn. */
  first: number;
  last: number;
}

export function drawLines(canvas: HTMLCanvasElement, lines: Line[], { width, rowHeight, first, last }: Size): void {
  const height = (last - first) * rowHeight;
  const pixelRatio = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, width * pixelRatio);
  canvas.height = Math.max(1, height * pixelRatio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d")!;
  context.scale(pixelRatio, pixelRatio);
  context.translate(0, -first * rowHeight);
  context.lineCap = "round";
  for (const { from, to, weight, color } of [...lines].sort((a, b) => a.weight - b.weight)) {
    if (Math.max(from, to) < first || Math.min(from, to) >= last) continue;
    const [y, z] = [(from + 0.5) * rowHeight, (to + 0.5) * rowHeight];
    context.strokeStyle = color;
    context.globalAlpha = Math.min(1, 0.25 + 0.75 * Math.sqrt(weight));
    context.lineWidth = 0.5 + 6 * weight;
    context.beginPath();
    context.moveTo(3, y);
    context.bezierCurveTo(width / 2, y, width / 2, z, width - 3, z);
    context.stroke();
  }
}
