// Speed of the page: node times.mjs ADDRESS MODEL. Prints the milliseconds until every head is painted, and from a
// pointer move to the repainted view B (and to its exact row) and view C: the median of nine, and the maximum.
import { launch } from "./browser.mjs";

const [address, model] = process.argv.slice(2);
const browser = await launch();
const page = await browser.newPage({ viewport: { width: 1440, height: 900 } });
await page.goto(address);
const story = "Once upon a time there was a little cat and it had a red ball and a big dog ";
for (const words of [30, 122, 430]) {
  const text = story.repeat(40).split(" ").slice(0, words).join(" ");
  await page.goto("about:blank");
  // Run once before, so that the page and the transfer are measured, not the first forward pass of the model.
  await page.goto(`${new URL(address).origin}/#${new URLSearchParams({ model, view: "cost", text })}`);
  await page.waitForSelector("#prediction");
  const painted = await page.evaluate(async () => {
    const start = performance.now();
    [...document.querySelectorAll("[role=tab]")].find((tab) => /All heads/.test(tab.textContent)).click();
    while (!document.querySelector(".grid .open canvas")) await new Promise(requestAnimationFrame);
    await new Promise(requestAnimationFrame);
    return performance.now() - start;
  });
  await page.keyboard.press("b");
  await page.waitForSelector(".left .token");
  await page.waitForTimeout(800);
  const n = await page.evaluate(() => Number(document.querySelector(".lines").scrollHeight) / 21);
  const lines = await page.evaluate(hover, ".left .token");
  await page.keyboard.press("c");
  await page.waitForSelector("#view canvas");
  await page.waitForTimeout(800);
  const map = await page.evaluate(hover, ".heat canvas");
  console.log(`${Math.round(n)} tokens: all heads painted ${painted.toFixed(0)} ms; hover B ${formatTimes(lines.repaint)}, exact ${formatTimes(lines.exact)}; C ${formatTimes(map.repaint)}`);
}
await browser.close();

function formatTimes(times) {
  const sorted = [...times].sort((a, b) => a - b);
  return `${sorted[sorted.length >> 1]?.toFixed(0)} (${sorted.at(-1)?.toFixed(0)})`;
}

/** Runs in the page. A message that is posted in an animation frame arrives after the frame was painted. */
async function hover(selector) {
  const painted = () =>
    new Promise((done) => requestAnimationFrame(() => {
      const { port1, port2 } = new MessageChannel();
      port1.onmessage = done;
      port2.postMessage(0);
    }));
  const [repaint, exact] = [[], []];
  for (let i = 1; i < 10; i++) {
    const elements = [...document.querySelectorAll(selector)];
    const element = elements[Math.floor((i / 10) * elements.length)];
    const box = element.getBoundingClientRect();
    await painted();
    const start = performance.now();
    const pointer = { clientX: box.left + (i / 11) * box.width, clientY: box.top + (i / 10) * box.height, bubbles: true };
    element.dispatchEvent(new PointerEvent(elements.length > 1 ? "pointerenter" : "pointermove", pointer));
    await painted();
    repaint.push(performance.now() - start);
    if (elements.length < 2) continue;
    while (!/Exact/.test(document.querySelector(".pair .card").innerText)) await painted();
    exact.push(performance.now() - start);
  }
  return { repaint, exact };
}
