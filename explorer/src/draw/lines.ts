// How attention is drawn as lines from token to token.

export interface Line {
  from: number;
  to: number;
  weight: number;
  colour: string;
}

interface Size {
  width: number;
  rowHeight: number;
  /** The rows that are in sight: a line that comes from elsewhere is drawn as far as it is seen. */
  first: number;
  last: number;
}

export function drawLines(canvas: HTMLCanvasElement, lines: Line[], { width, rowHeight, first, last }: Size): void {
  const height = (last - first) * rowHeight;
  const dense = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, width * dense);
  canvas.height = Math.max(1, height * dense);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d")!;
  pen.scale(dense, dense);
  pen.translate(0, -first * rowHeight);
  pen.lineCap = "round";
  for (const { from, to, weight, colour } of [...lines].sort((a, b) => a.weight - b.weight)) {
    if (Math.max(from, to) < first || Math.min(from, to) >= last) continue;
    const [y, z] = [(from + 0.5) * rowHeight, (to + 0.5) * rowHeight];
    pen.strokeStyle = colour;
    pen.globalAlpha = Math.min(1, 0.25 + 0.75 * Math.sqrt(weight));
    pen.lineWidth = 0.5 + 6 * weight;
    pen.beginPath();
    pen.moveTo(3, y);
    pen.bezierCurveTo(width / 2, y, width / 2, z, width - 3, z);
    pen.stroke();
  }
}
