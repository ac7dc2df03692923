// A user at the page: what every check needs. The address and a folder to write to are the script's arguments.
import { launch } from "./browser.mjs";

export const [address, folder] = process.argv.slice(2);
const LIMIT = 120_000;
export const origin = new URL(address).origin;
export const browser = await launch();
export const context = await browser.newContext({ viewport: { width: 1440, height: 900 }, acceptDownloads: true });
export const noise = [];
export const page = await context.newPage();
page.on("console", (message) => message.type() === "error" && !/status of 4\d\d/.test(message.text()) && noise.push(message.text()));
page.on("pageerror", (error) => noise.push(String(error)));
page.on("request", (request) => /^(https?:)/.test(request.url()) && !request.url().startsWith(origin) && noise.push(`outside: ${request.url()}`));

export const text = (selector) => page.locator(selector).first().innerText();
export const equal = (found, wanted) => {
  if (JSON.stringify(found) !== JSON.stringify(wanted)) throw new Error(`${JSON.stringify(found)} is not ${JSON.stringify(wanted)}`);
};
export const holds = (is, why) => {
  if (!is) throw new Error(why);
};
export const hash = () => new URLSearchParams(page.url().split("#")[1]);

export async function open(settings) {
  await page.goto("about:blank");
  waiting.clear();
  await page.goto(`${origin}/#${new URLSearchParams(settings)}`);
  await page.waitForSelector("#prediction, [role=alert]");
  await still();
}

/** Until the tasks that wait in the page have been run, in the order in which they are due. */
export async function idle(tab = page, milliseconds = 20) {
  const wait = (ms) => new Promise((done) => setTimeout(() => requestIdleCallback(done, { timeout: 1000 }), ms));
  // A tab that goes to another address loses its tasks.
  await tab.evaluate(wait, milliseconds).catch((error) => holds(/context was destroyed|navigat/i.test(error.message), error.message));
}

/** Until this holds; the limit only guards against a hang. */
export async function until(holdsNow, why) {
  const end = Date.now() + LIMIT;
  while (!(await holdsNow())) {
    holds(Date.now() < end, why);
    await idle();
  }
}

/** Until nothing has been asked for a while. */
const waiting = new Set();
page.on("request", (request) => waiting.add(request));
page.on("requestfinished", (request) => waiting.delete(request));
page.on("requestfailed", (request) => waiting.delete(request));
export async function still() {
  const end = Date.now() + LIMIT;
  for (let quiet = 0; quiet < 4 && Date.now() < end; quiet = waiting.size ? 0 : quiet + 1) await idle();
}

export async function type(words) {
  await page.fill("#text", words);
  await idle(page, 420); // longer than the page waits after the last key
  await still();
}

/** All that is seen of a view: its words and its pixels. */
export function picture() {
  return page.evaluate(() => {
    const root = document.getElementById("view");
    return root.innerText + [...root.querySelectorAll("canvas")].map((one) => one.toDataURL()).join("");
  });
}

/** ONLY=words in the environment: just the checks whose name has them. */
export async function check(name, work) {
  if (process.env.ONLY && !name.includes(process.env.ONLY)) return;
  const begun = Date.now();
  noise.length = 0;
  try {
    await work();
    if (noise.length) throw new Error(`the browser complains: ${noise[0]}`);
    console.log(JSON.stringify({ name, ok: true, ms: Date.now() - begun }));
  } catch (error) {
    console.log(JSON.stringify({ name, ok: false, why: String(error.message).slice(0, 600), ms: Date.now() - begun }));
  }
}

await page.goto(address);
context.setDefaultTimeout(LIMIT);
