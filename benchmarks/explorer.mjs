// How fast a page shows attention: node explorer.mjs, a JSON line for each page to open on stdin, one answered for each.
import { createInterface } from "node:readline";
import { readFileSync } from "node:fs";
import { launch } from "../tests/page/browser.mjs";

// In the page, before its own scripts: when it was painted, and how long after the pointer came.
function watch({ ready, least, says, tokens }) {
  const painted = () => new Promise((then) => requestAnimationFrame(() => setTimeout(() => then(performance.now()))));
  window.painted = (async () => {
    const isThere = () => document.querySelectorAll(ready).length >= least && (!says || document.body.textContent.includes(says));
    while (!isThere()) await new Promise(requestAnimationFrame);
    await painted();
    return painted();
  })();
  window.hovers = [];
  const came = (event) => event.target.closest?.(tokens) && painted().then((at) => window.hovers.push({ from: event.timeStamp, at }));
  if (tokens) addEventListener("mouseover", came, true);
}

async function within(milliseconds, work) {
  let late;
  const limit = new Promise((_, no) => (late = setTimeout(() => no(new Error(`nothing after ${milliseconds / 1000} s`)), milliseconds)));
  try {
    return await Promise.race([work, limit]);
  } finally {
    clearTimeout(late);
  }
}

async function hover(page, asked) {
  const places = await within(asked.limit, page.evaluate((tokens) => [...document.querySelectorAll(tokens)].map((one) => one.getBoundingClientRect())
    .filter((box) => box.top > 60 && box.bottom < innerHeight - 10).map((box) => ({ x: box.left + box.width / 2, y: box.top + box.height / 2 })), asked.tokens));
  const step = Math.max(1, Math.floor(places.length / asked.hovers));
  for (const { x, y } of places.filter((_, i) => i % step === 0).slice(0, asked.hovers)) {
    await within(asked.limit, page.mouse.move(x, y));
    await page.waitForTimeout(asked.rest);
  }
  const told = await within(asked.limit, page.evaluate(() => ({
    hovers: window.hovers,
    rows: performance.getEntriesByType("resource").filter((one) => one.name.endsWith("/api/row")).map((one) => one.responseEnd),
  })));
  const times = told.hovers.map(({ from, at }) => at - from);
  const exact = told.hovers.map(({ from }) => told.rows.find((row) => row > from) - from).filter((one) => one > 0);
  return { hover: times.slice(1), exact: exact.slice(1) };
}

async function payload(page, bodies) {
  return page.evaluate(async (asked) => {
    let sum = 0;
    for (const { path, body } of asked) {
      const answer = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
      if (!answer.ok) throw new Error(await answer.text());
      await answer.arrayBuffer();
      sum += Number(answer.headers.get("content-length"));
    }
    return sum;
  }, bodies);
}

async function measure(browser, asked) {
  const context = await browser.newContext({ viewport: { width: 1440, height: 900 } });
  const page = await context.newPage();
  const outside = [];
  page.on("request", (one) => {
    const url = new URL(one.url());
    if (url.protocol.startsWith("http") && url.hostname !== "127.0.0.1") outside.push(url.href);
  });
  await page.route(/^https:\/\/cdnjs/, (route) => {
    const [, path] = Object.entries(asked.scripts ?? {}).find(([name]) => route.request().url().includes(name)) ?? [];
    return path ? route.fulfill({ contentType: "text/javascript", body: readFileSync(path) }) : route.abort();
  });
  const crashed = new Promise((_, no) => page.on("crash", () => no(new Error("the tab crashed"))));
  crashed.catch(() => {});
  const told = {};
  try {
    if (asked.enter) await page.goto(asked.enter);
    await page.goto("about:blank");
    await page.addInitScript(watch, asked);
    const opened = (async () => {
      await page.goto(asked.address, { waitUntil: "commit", timeout: asked.limit });
      return page.evaluate(() => window.painted);
    })();
    opened.catch(() => {});
    told.painted = await within(asked.limit, Promise.race([opened, crashed]));
    if (asked.tokens) Object.assign(told, await Promise.race([hover(page, asked), crashed]));
    if (asked.bodies) told.bytes = await payload(page, asked.bodies);
    if (asked.picture) await page.screenshot({ path: asked.picture });
  } catch (error) {
    told.error = error.message.split("\n")[0];
  }
  told.outside = outside.length;
  return told;
}

for await (const line of createInterface({ input: process.stdin })) {
  // A browser each: what one page leaves behind must not weigh on the next.
  const browser = await launch();
  console.log(JSON.stringify({ ...(await measure(browser, JSON.parse(line))), browser: browser.version() }));
  // A page that does not answer is not waited for.
  await Promise.race([browser.close(), new Promise((then) => setTimeout(then, 5000))]);
}
process.exit(0);
