// Helpers of the browser checks. The arguments of the script are the address and an output folder.
import { launch } from "./browser.mjs";

export const [address, folder] = process.argv.slice(2);
const LIMIT = 120_000;
export const origin = new URL(address).origin;
export const browser = await launch();
export const context = await browser.newContext({ viewport: { width: 1440, height: 900 }, acceptDownloads: true });
export const browserErrors = [];
export const page = await context.newPage();
page.on("console", (message) => message.type() === "error" && !/status of 4\d\d/.test(message.text()) && browserErrors.push(message.text()));
page.on("pageerror", (error) => browserErrors.push(String(error)));
page.on("request", (request) => /^(https?:)/.test(request.url()) && !request.url().startsWith(origin) && browserErrors.push(`external request: ${request.url()}`));

export const text = (selector) => page.locator(selector).first().innerText();
export const equal = (actual, expected) => {
  if (JSON.stringify(actual) !== JSON.stringify(expected)) throw new Error(`${JSON.stringify(actual)} is not ${JSON.stringify(expected)}`);
};
export const assert = (condition, message) => {
  if (!condition) throw new Error(message);
};
export const hash = () => new URLSearchParams(page.url().split("#")[1]);

export async function open(settings) {
  await page.goto("about:blank");
  pending.clear();
  await page.goto(`${origin}/#${new URLSearchParams(settings)}`);
  await page.waitForSelector("#prediction, [role=alert]");
  await settle();
}

/** Waits until the pending tasks of the page have run. */
export async function idle(tab = page, milliseconds = 20) {
  const wait = (ms) => new Promise((done) => setTimeout(() => requestIdleCallback(done, { timeout: 1000 }), ms));
  // A tab that navigates to another address loses its tasks.
  await tab.evaluate(wait, milliseconds).catch((error) => assert(/context was destroyed|navigat/i.test(error.message), error.message));
}

/** Waits until the condition holds. The limit only guards against a hang. */
export async function until(condition, message) {
  const end = Date.now() + LIMIT;
  while (!(await condition())) {
    assert(Date.now() < end, message);
    await idle();
  }
}

/** Waits until no request has been pending for a while. */
const pending = new Set();
page.on("request", (request) => pending.add(request));
page.on("requestfinished", (request) => pending.delete(request));
page.on("requestfailed", (request) => pending.delete(request));
export async function settle() {
  const end = Date.now() + LIMIT;
  for (let quiet = 0; quiet < 4 && Date.now() < end; quiet = pending.size ? 0 : quiet + 1) await idle();
}

export async function type(words) {
  await page.fill("#text", words);
  await idle(page, 420); // longer than the debounce interval of the page
  await settle();
}

/** Returns the text and the pixels of the open view. */
export function capture() {
  return page.evaluate(() => {
    const root = document.getElementById("view");
    return root.innerText + [...root.querySelectorAll("canvas")].map((canvas) => canvas.toDataURL()).join("");
  });
}

/** Runs a check. With the environment variable ONLY, runs only checks whose name contains it. */
export async function check(name, work) {
  if (process.env.ONLY && !name.includes(process.env.ONLY)) return;
  const start = Date.now();
  browserErrors.length = 0;
  try {
    await work();
    if (browserErrors.length) throw new Error(`the browser logged an error: ${browserErrors[0]}`);
    console.log(JSON.stringify({ name, ok: true, ms: Date.now() - start }));
  } catch (error) {
    console.log(JSON.stringify({ name, ok: false, reason: String(error.message).slice(0, 600), ms: Date.now() - start }));
  }
}

await page.goto(address);
context.setDefaultTimeout(LIMIT);
