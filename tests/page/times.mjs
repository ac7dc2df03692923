// How fast the page is: node times.mjs ADDRESS MODEL; milliseconds until every head is painted, and from a pointer's
// move to the picture that answers it, in views B (then to the exact row) and C: the middle of nine, and the worst.
import { launch } from "./browser.mjs";

const [address, model] = process.argv.slice(2);
const browser = await launch();
const page = await browser.newPage({ viewport: { width: 1440, height: 900 } });
await page.goto(address);
const story = "Once upon a time there was a little cat and it had a red ball and a big dog ";
for (const words of [30, 122, 430]) {
  const text = story.repeat(40).split(" ").slice(0, words).join(" ");
  await page.goto("about:blank");
  // Read once before, so that what is measured is the page and the wire, not the first pass of the model.
  await page.goto(`${new URL(address).origin}/#${new URLSearchParams({ model, view: "cost", text })}`);
  await page.waitForSelector("#prediction");
  const painted = await page.evaluate(async () => {
    const begun = performance.now();
    [...document.querySelectorAll("[role=tab]")].find((one) => /Model/.test(one.textContent)).click();
    while (!document.querySelector(".grid .open canvas")) await new Promise(requestAnimationFrame);
    await new Promise(requestAnimationFrame);
    return performance.now() - begun;
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
  console.log(`${Math.round(n)} tokens: all heads painted ${painted.toFixed(0)} ms; hover B ${told(lines.seen)}, exact ${told(lines.exact)}; C ${told(map.seen)}`);
}
await browser.close();

function told(times) {
  const sorted = [...times].sort((a, b) => a - b);
  return `${sorted[sorted.length >> 1]?.toFixed(0)} (${sorted.at(-1)?.toFixed(0)})`;
}

/** Runs in the page. A message sent while a frame is made comes after it was painted. */
async function hover(selector) {
  const painted = () =>
    new Promise((done) => requestAnimationFrame(() => {
      const { port1, port2 } = new MessageChannel();
      port1.onmessage = done;
      port2.postMessage(0);
    }));
  const [seen, exact] = [[], []];
  for (let i = 1; i < 10; i++) {
    const found = [...document.querySelectorAll(selector)];
    const one = found[Math.floor((i / 10) * found.length)];
    const box = one.getBoundingClientRect();
    await painted();
    const begun = performance.now();
    const place = { clientX: box.left + (i / 11) * box.width, clientY: box.top + (i / 10) * box.height, bubbles: true };
    one.dispatchEvent(new PointerEvent(found.length > 1 ? "pointerenter" : "pointermove", place));
    await painted();
    seen.push(performance.now() - begun);
    if (found.length < 2) continue;
    while (!/Exact/.test(document.querySelector(".pair .card").innerText)) await painted();
    exact.push(performance.now() - begun);
  }
  return { seen, exact };
}
