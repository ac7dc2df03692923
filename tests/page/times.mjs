// How fast the page is: node times.mjs ADDRESS MODEL; milliseconds until every head is painted, and of a hover.
import { launch } from "./browser.mjs";

const [address, model] = process.argv.slice(2);
const browser = await launch();
const page = await browser.newPage({ viewport: { width: 1440, height: 900 } });
await page.goto(address);
const story = "Once upon a time there was a little cat and it had a red ball and a big dog ";
for (const words of [16, 64, 110, 430]) {
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
  const hover = await page.evaluate(async () => {
    const tokens = [...document.querySelectorAll(".left .token")];
    const times = [];
    for (const at of [0.3, 0.5, 0.7, 0.9]) {
      const begun = performance.now();
      const one = tokens[Math.floor(at * tokens.length)];
      one.dispatchEvent(new PointerEvent("pointerenter"));
      await new Promise(requestAnimationFrame);
      times.push(performance.now() - begun);
    }
    return { n: tokens.length, times };
  });
  console.log(`${hover.n} tokens: all heads painted ${painted.toFixed(0)} ms; hover ${hover.times.map((one) => one.toFixed(0)).join(" ")} ms`);
}
await browser.close();
