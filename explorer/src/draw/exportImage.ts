// Renders the view as an SVG or PNG image: every visible text, box and canvas at its position.
// Uses attributes instead of style="…", which the page's content security policy forbids.

const SVG_ATTRIBUTES = ["fill", "stroke", "stroke-width", "opacity", "font-family", "font-size", "font-weight", "text-anchor", "stroke-dasharray", "fill-opacity"];

export function renderSvg(root: HTMLElement): { svg: string; width: number; height: number } {
  const box = root.getBoundingClientRect();
  const width = Math.ceil(Math.max(box.width, root.scrollWidth)) + 20;
  const height = Math.ceil(Math.max(box.height, root.scrollHeight)) + 20;
  const page = document.implementation.createDocument("http://www.w3.org/2000/svg", "svg", null);
  const svg = page.documentElement;
  setAttributes(svg, { width, height, viewBox: `0 0 ${width} ${height}` });
  const paper = getComputedStyle(document.body).backgroundColor;
  add(svg, "rect", { width, height, fill: paper });
  walk(root, svg, { x: box.left - 10, y: box.top - 10 });
  return { svg: new XMLSerializer().serializeToString(page), width, height };
}

type Origin = { x: number; y: number };

function walk(node: Node, to: Element, origin: Origin): void {
  if (node.nodeType === Node.TEXT_NODE) return writeText(node as Text, to, origin);
  if (!(node instanceof Element)) return;
  if (node.matches(".controls, .hidden, option, .no-picture")) return;
  const style = getComputedStyle(node);
  if (style.display === "none" || style.visibility === "hidden") return;
  const box = node.getBoundingClientRect();
  const bounds = { x: box.left - origin.x, y: box.top - origin.y, width: box.width, height: box.height };
  if (node instanceof HTMLCanvasElement) {
    const href = node.toDataURL();
    add(to, "image", { ...bounds, href, preserveAspectRatio: "none", "image-rendering": "pixelated" });
    return;
  }
  if (node instanceof SVGSVGElement) {
    const copy = to.ownerDocument.importNode(node, true);
    inline(node, copy);
    setAttributes(copy, { ...bounds, overflow: "visible" });
    to.append(copy);
    return;
  }
  drawBox(style, bounds, to);
  node.childNodes.forEach((child) => walk(child, to, origin));
}

function drawBox(style: CSSStyleDeclaration, bounds: Record<string, number>, to: Element): void {
  const filled = style.backgroundColor !== "rgba(0, 0, 0, 0)";
  const edge = parseFloat(style.borderTopWidth) > 0 && style.borderTopStyle !== "none";
  if (!filled && !edge) return;
  const rx = Math.min(parseFloat(style.borderTopLeftRadius) || 0, bounds.height / 2);
  add(to, "rect", {
    ...bounds, rx, fill: filled ? style.backgroundColor : "none", stroke: edge ? style.borderTopColor : "none", opacity: style.opacity,
  });
}

function writeText(node: Text, to: Element, origin: Origin): void {
  if (!node.data.trim() || !node.parentElement) return;
  const style = getComputedStyle(node.parentElement);
  for (const [line, box] of linesOf(node)) {
    const element = add(to, "text", {
      x: box.left - origin.x, y: box.top - origin.y + box.height * 0.78, fill: style.color, "font-size": style.fontSize,
      "font-family": style.fontFamily, "font-weight": style.fontWeight, "xml:space": "preserve",
    });
    element.textContent = line;
  }
}

/** Returns the lines of a text as the browser wrapped them. */
function linesOf(node: Text): [string, DOMRect][] {
  const range = document.createRange();
  const lines: [string, DOMRect][] = [];
  for (let i = 0; i < node.data.length; i++) {
    range.setStart(node, i);
    range.setEnd(node, i + 1);
    const box = range.getBoundingClientRect();
    if (!box.width && !box.height) continue;
    const last = lines.at(-1);
    if (last && Math.abs(last[1].top - box.top) < 3) last[0] += node.data[i];
    else lines.push([node.data[i], box]);
  }
  return lines.map(([line, box]) => [line.replace(/\n/g, " "), box]);
}

function inline(from: Element, to: Element): void {
  const style = getComputedStyle(from);
  for (const name of SVG_ATTRIBUTES) to.setAttribute(name, style.getPropertyValue(name));
  Array.from(from.children).forEach((child, i) => inline(child, to.children[i]));
}

function add(to: Element, name: string, attributes: Record<string, string | number>): Element {
  const element = to.ownerDocument.createElementNS("http://www.w3.org/2000/svg", name);
  setAttributes(element, attributes);
  to.append(element);
  return element;
}

function setAttributes(element: Element, attributes: Record<string, string | number>): void {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
}

/** Renders a PNG with two pixels per CSS pixel. */
export async function renderPng(root: HTMLElement): Promise<Blob> {
  const { svg, width, height } = renderSvg(root);
  const image = new Image();
  image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(svg);
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [2 * width, 2 * height];
  canvas.getContext("2d")!.drawImage(image, 0, 0, 2 * width, 2 * height);
  return new Promise((resolve, reject) => canvas.toBlob((blob) => (blob ? resolve(blob) : reject(new Error("The image is too large to export as PNG")))));
}
