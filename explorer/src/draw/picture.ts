// The view as one SVG: every text, box and canvas that is seen, where it is seen.
// Attributes alone, no style="…": the page's own policy forbids it here too.

const DRAWN = ["fill", "stroke", "stroke-width", "opacity", "font-family", "font-size", "font-weight", "text-anchor", "stroke-dasharray", "fill-opacity"];

export function pictureOf(root: HTMLElement): { svg: string; width: number; height: number } {
  const box = root.getBoundingClientRect();
  const width = Math.ceil(Math.max(box.width, root.scrollWidth)) + 20;
  const height = Math.ceil(Math.max(box.height, root.scrollHeight)) + 20;
  const page = document.implementation.createDocument("http://www.w3.org/2000/svg", "svg", null);
  const svg = page.documentElement;
  put(svg, { width, height, viewBox: `0 0 ${width} ${height}` });
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
  const place = { x: box.left - origin.x, y: box.top - origin.y, width: box.width, height: box.height };
  if (node instanceof HTMLCanvasElement) {
    const href = node.toDataURL();
    add(to, "image", { ...place, href, preserveAspectRatio: "none", "image-rendering": "pixelated" });
    return;
  }
  if (node instanceof SVGSVGElement) {
    const copy = to.ownerDocument.importNode(node, true);
    inline(node, copy);
    put(copy, { ...place, overflow: "visible" });
    to.append(copy);
    return;
  }
  drawBox(style, place, to);
  node.childNodes.forEach((child) => walk(child, to, origin));
}

function drawBox(style: CSSStyleDeclaration, place: Record<string, number>, to: Element): void {
  const filled = style.backgroundColor !== "rgba(0, 0, 0, 0)";
  const edge = parseFloat(style.borderTopWidth) > 0 && style.borderTopStyle !== "none";
  if (!filled && !edge) return;
  const rx = Math.min(parseFloat(style.borderTopLeftRadius) || 0, place.height / 2);
  add(to, "rect", {
    ...place, rx, fill: filled ? style.backgroundColor : "none", stroke: edge ? style.borderTopColor : "none", opacity: style.opacity,
  });
}

function writeText(node: Text, to: Element, origin: Origin): void {
  if (!node.data.trim() || !node.parentElement) return;
  const style = getComputedStyle(node.parentElement);
  for (const [line, box] of linesOf(node)) {
    const made = add(to, "text", {
      x: box.left - origin.x, y: box.top - origin.y + box.height * 0.78, fill: style.color, "font-size": style.fontSize,
      "font-family": style.fontFamily, "font-weight": style.fontWeight, "xml:space": "preserve",
    });
    made.textContent = line;
  }
}

/** A text's lines as the browser broke them. */
function linesOf(node: Text): [string, DOMRect][] {
  const range = document.createRange();
  const found: [string, DOMRect][] = [];
  for (let i = 0; i < node.data.length; i++) {
    range.setStart(node, i);
    range.setEnd(node, i + 1);
    const box = range.getBoundingClientRect();
    if (!box.width && !box.height) continue;
    const last = found.at(-1);
    if (last && Math.abs(last[1].top - box.top) < 3) last[0] += node.data[i];
    else found.push([node.data[i], box]);
  }
  return found.map(([line, box]) => [line.replace(/\n/g, " "), box]);
}

function inline(from: Element, to: Element): void {
  const style = getComputedStyle(from);
  for (const name of DRAWN) to.setAttribute(name, style.getPropertyValue(name));
  Array.from(from.children).forEach((child, i) => inline(child, to.children[i]));
}

function add(to: Element, name: string, attributes: Record<string, string | number>): Element {
  const made = to.ownerDocument.createElementNS("http://www.w3.org/2000/svg", name);
  put(made, attributes);
  to.append(made);
  return made;
}

function put(element: Element, attributes: Record<string, string | number>): void {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
}

/** The same as pixels, two for one. */
export async function pixelsOf(root: HTMLElement): Promise<Blob> {
  const { svg, width, height } = pictureOf(root);
  const image = new Image();
  image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(svg);
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [2 * width, 2 * height];
  canvas.getContext("2d")!.drawImage(image, 0, 0, 2 * width, 2 * height);
  return new Promise((resolve, reject) => canvas.toBlob((made) => (made ? resolve(made) : reject(new Error("the picture is too large")))));
}
