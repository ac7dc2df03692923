// Measure how fast a page shows attention: `node explorer.mjs` reads one JSON line per page from stdin and answers each.
import { createInterface } from "node:readline";
import { readFileSync } from "node:fs";
import { launch } from "../tests/page/browser.mjs";

// Runs in the page before its scripts: records the first paint and the time from pointer events to the next frame.
function watch({ ready, least, says, tokens }) {
  const painted = () => new Promise((then) => requestAnimationFrame(() => setTimeout(() => then(performance.now()))));
  window.painted = (async () => {
    const isReady = () => document.querySelectorAll(ready).length >= least && (!says || document.body.textContent.includes(says));
    while (!isReady()) await new Promise(requestAnimationFrame);
    await painted();
    return painted();
  })();
  window.hovers = [];
  const onMouseOver = (event) => event.target.closest?.(tokens) && painted().then((at) => window.hovers.push({ from: event.timeStamp, at }));
  if (tokens) addEventListener("mouseover", onMouseOver, true);
}

async function within(milliseconds, work) {
  let timer;
  const limit = new Promise((_, no) => (timer = setTimeout(() => no(new Error(`nothing after ${milliseconds / 1000} s`)), milliseconds)));
  try {
    return await Promise.race([work, limit]);
  } finally {
    clearTimeout(timer);
  }
}

async function hover(page, request) {
  const positions = await within(request.limit, page.evaluate((tokens) => [...document.querySelectorAll(tokens)].map((entry) => entry.getBoundingClientRect())
    .filter((box) => box.top > 60 && box.bottom < innerHeight - 10).map((box) => ({ x: box.left + box.width / 2, y: box.top + box.height / 2 })), request.tokens));
  const step = Math.max(1, Math.floor(positions.length / request.hovers));
  for (const { x, y } of positions.filter((_, i) => i % step === 0).slice(0, request.hovers)) {
    await within(request.limit, page.mouse.move(x, y));
    await page.waitForTimeout(request.rest);
  }
  const result = await within(request.limit, page.evaluate(() => ({
    hovers: window.hovers,
    rows: performance.getEntriesByType("resource").filter((entry) => entry.name.endsWith("/api/row")).map((entry) => entry.responseEnd),
  })));
  const times = result.hovers.map(({ from, at }) => at - from);
  const exact = result.hovers.map(({ from }) => result.rows.find((row) => row > from) - from).filter((time) => time > 0);
  return { hover: times.slice(1), exact: exact.slice(1) };
}

async function payload(page, bodies) {
  return page.evaluate(async (request) => {
    let sum = 0;
    for (const { path, body } of request) {
      const answer = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
      if (!answer.ok) throw new Error(await answer.text());
      await answer.arrayBuffer();
      sum += Number(answer.headers.get("content-length"));
    }
    return sum;
  }, bodies);
}

async function measure(browser, request) {
  const context = await browser.newContext({ viewport: { width: 1440, height: 900 } });
  const page = await context.newPage();
  const externalRequests = [];
  page.on("request", (entry) => {
    const url = new URL(entry.url());
    if (url.protocol.startsWith("http") && url.hostname !== "127.0.0.1") externalRequests.push(url.href);
  });
  await page.route(/^https:\/\/cdnjs/, (route) => {
    const [, path] = Object.entries(request.scripts ?? {}).find(([name]) => route.request().url().includes(name)) ?? [];
    return path ? route.fulfill({ contentType: "text/javascript", body: readFileSync(path) }) : route.abort();
  });
  const crashed = new Promise((_, no) => page.on("crash", () => no(new Error("the tab crashed"))));
  crashed.catch(() => {});
  const result = {};
  try {
    if (request.enter) await page.goto(request.enter);
    await page.goto("about:blank");
    await page.addInitScript(watch, request);
    const opened = (async () => {
      await page.goto(request.address, { waitUntil: "commit", timeout: request.limit });
      return page.evaluate(() => window.painted);
    })();
    opened.catch(() => {});
    result.painted = await within(request.limit, Promise.race([opened, crashed]));
    if (request.tokens) Object.assign(result, await Promise.race([hover(page, request), crashed]));
    if (request.bodies) result.bytes = await payload(page, request.bodies);
    if (request.picture) await page.screenshot({ path: request.picture });
  } catch (error) {
    result.error = error.message.split("\n")[0];
  }
  result.outside = externalRequests.length;
  return result;
}

for await (const line of createInterface({ input: process.stdin })) {
  // Each page gets a new browser, so that pages do not affect each other.
  const browser = await launch();
  console.log(JSON.stringify({ ...(await measure(browser, JSON.parse(line))), browser: browser.version() }));
  // Do not wait for a page that does not respond.
  await Promise.race([browser.close(), new Promise((then) => setTimeout(then, 5000))]);
}
process.exit(0);
