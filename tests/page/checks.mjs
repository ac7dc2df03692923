// Checks of the page in a real browser: node checks.mjs ADDRESS FOLDER. Prints a JSON line for each check.
import { readFileSync } from "node:fs";
import { browser, check, context, equal, folder, hash, assert, idle, browserErrors, open, page, capture, settle, text, type, until } from "./user.mjs";

const IT = "The animal didn't cross the street because it was too ";

await check("the first screen shows a text, a model, every head and an explanation", async () => {
  await open({ model: "stories" });
  assert((await page.inputValue("#text")).length > 20, "no default text");
  equal(await page.locator(".grid .open canvas").count(), 48);
  assert(/attention head/.test(await text("#view .what")), "no explanation");
});

await check("a typed text is processed", async () => {
  await type("A dog and a cat. A dog and a");
  assert(/cat/.test(await text("#prediction")), "the pattern is not continued");
  equal(hash().get("text"), "A dog and a cat. A dog and a");
});

await check("a head opens, and the row under the pointer is exact", async () => {
  await page.locator(".grid .open").nth(7).click();
  await settle();
  equal([hash().get("view"), hash().get("layer"), hash().get("head")], ["head", "1", "1"]);
  await page.locator(".left .token").nth(4).hover();
  await settle();
  assert(/Exact/.test(await text(".pair .card")), "not exact");
  const shares = (await page.locator(".pair .card .number").allInnerTexts()).map(Number);
  const sum = shares.reduce((a, b) => a + b, 0);
  assert(Math.abs(sum - 1) < 0.004, `the row sums to ${sum}`);
});

await check("a masked edge changes the prediction until it is undone", async () => {
  await open({ model: "stories", view: "head", layer: 5, head: 2 });
  const before = await text("#prediction");
  await page.keyboard.press("ArrowLeft");
  await page.keyboard.press("X");
  await settle();
  assert(/before and after/.test(await text("#prediction")), "no effect is shown");
  assert(/cannot attend to/.test(await text("#interventions")), "not in the list");
  await page.keyboard.press("z");
  await settle();
  equal(await text("#prediction"), before);
});

await check("an ablated head is in the list and in the URL", async () => {
  await open({ model: "stories", view: "heads" });
  await page.locator(".power").nth(3).click();
  await settle();
  assert(/layer 0, head 3 ablated/.test(await text("#interventions")), "not in the list");
  equal(JSON.parse(hash().get("interventions")), [{ kind: "head", stack: "self", layer: 0, head: 3 }]);
});

await check("each step adds one token to the KV cache, and without a cache all tokens are recomputed", async () => {
  await open({ model: "stories", view: "live" });
  const bytes = async () => Number((await text("#kv")).match(/([\d,]+) bytes/)[1].replaceAll(",", ""));
  const tokens = async () => Number((await text("#kv")).match(/(\d+) tokens/)[1]);
  await page.click("#step");
  await page.waitForSelector("#kv");
  const [first, n] = [await bytes(), await tokens()];
  for (let i = 0; i < 3; i++) await page.click("#step");
  await until(async () => (await tokens()) === n + 3, "three clicks do not add three tokens");
  await settle();
  equal(await bytes(), first + (3 * first) / n);
  await page.click("#cache");
  await page.keyboard.press("n");
  await page.waitForFunction(() => /recomputed/.test(document.getElementById("kv")?.innerText ?? ""));
});

await check("a translation has an alignment and beam search steps", async () => {
  await open({ model: "seq2seq", view: "live", text: "The cat sat on the mat." });
  await page.waitForSelector("#translation");
  equal(await page.locator("#view canvas").count(), 1);
  assert((await page.locator(".steps li.best").count()) > 2, "the path of the best hypothesis is not marked");
  await open({ model: "seq2seq", view: "map", stack: "cross", text: "The cat sat on the mat." });
  assert(/Cross-attention/.test(await text("#view .what")), "no alignment");
});

await check("coreference examples: tired, wide and The Law", async () => {
  await open({ model: "stories", view: "coreference", text: IT + "tired." });
  await page.waitForSelector("#verdict");
  const tired = await capture();
  await page.getByRole("button", { name: "too wide" }).click();
  await page.waitForFunction((old) => document.getElementById("view").innerText !== old && document.getElementById("verdict"), tired);
  await page.getByRole("button", { name: "The Law" }).click();
  await settle();
  await page.waitForSelector("#verdict");
  equal(await page.inputValue("#pronoun"), "its");
  assert(/not by itself/.test(await text(".caution")), "the caution is missing");
});

const TABS = { heads: "All heads", head: "B Head", map: "Heatmap", neuron: "Neuron", residual: "Residual", lens: "Logit lens", coreference: "Coreference", embeddings: "Embeddings", live: "Live", cost: "Cost", compare: "Compare" };
const VIEWS = { stories: "heads head map neuron residual lens coreference embeddings live cost compare", bert: "heads head map neuron residual coreference embeddings cost compare", seq2seq: "heads head map neuron residual lens embeddings live compare", rnn: "heads map lens embeddings live" };
for (const [model, views] of Object.entries(VIEWS)) {
  // The context of the small models only fits a few words.
  const [first, second] = model === "stories" ? [IT + "tired.", "On the street was an animal because it was too tired."] : ["The cat sat on it.", "A dog ran to it."];
  await check(`every view of ${model} is shown and changes with the text`, async () => {
    const captureAll = async () => {
      const captured = {};
      for (const view of views.split(" ")) {
        await page.locator("[role=tab]", { hasText: TABS[view] }).click();
        if (view === "live" && model === "stories") await page.click("#step"), await page.waitForSelector("#kv");
        await settle();
        equal(await page.locator("#view .error").allInnerTexts(), []);
        captured[view] = await capture();
        assert(captured[view].length > 400, `${view} is empty`);
      }
      return captured;
    };
    await open({ model, text: first, other_text: second + " No." });
    const before = await captureAll();
    await type(second);
    const after = await captureAll();
    equal(Object.keys(before).filter((view) => view !== "cost" && before[view] === after[view]), []);
  });
}

await check("keyboard: views, selection, heads and help", async () => {
  await open({ model: "stories", view: "heads" });
  for (const [key, view] of [["b", "head"], ["c", "map"], ["d", "neuron"], ["e", "residual"], ["f", "lens"], ["g", "coreference"], ["h", "embeddings"], ["i", "live"], ["j", "cost"], ["k", "compare"], ["a", "heads"]]) {
    await page.keyboard.press(key);
    await page.waitForSelector(`#view[data-view=${view}]`);
  }
  await page.keyboard.press("]");
  await page.keyboard.press(".");
  await page.keyboard.press("ArrowUp");
  await page.keyboard.press("ArrowRight");
  await page.keyboard.press("o");
  await settle();
  equal([hash().get("layer"), hash().get("head"), hash().get("query"), hash().get("key")], ["1", "1", "18", "0"]);
  assert(hash().get("interventions").includes('"head":1'), "o does not ablate the head");
  await page.keyboard.press("?");
  assert(/undo all/.test(await text("dialog")), "no list of shortcuts");
  await page.keyboard.press("Escape");
  await page.keyboard.press("t");
  equal(await page.evaluate(() => document.activeElement.id), "text");
  await page.keyboard.press("Tab");
  const ring = await page.evaluate(() => getComputedStyle(document.activeElement).outlineStyle);
  equal(ring, "solid");
});

await check("the URL restores the state", async () => {
  await open({ model: "stories", view: "map", text: IT + "wide.", layer: 3, head: 2, query: 7, key: 1, words: "yes", scale: "log", interventions: '[{"kind":"head","stack":"self","layer":0,"head":1}]' });
  const [captured, url] = [await capture(), page.url()];
  await page.goto("about:blank");
  await page.goto(url);
  await page.waitForSelector("#prediction");
  await settle();
  equal(page.url(), url);
  assert((await capture()) === captured, "the view differs");
});

async function exportAs(format) {
  await page.getByRole("button", { name: "Export" }).click();
  const [file] = await Promise.all([page.waitForEvent("download"), page.click(`[data-format=${format}]`)]);
  const path = `${folder}/page.${format}`;
  await file.saveAs(path);
  return readFileSync(path);
}

await check("exports: PNG, SVG, CSV, NPZ, and a page that opens from disk", async () => {
  await open({ model: "bert", view: "map", layer: 1, text: "The cat sat on the mat." });
  equal((await exportAs("png")).subarray(1, 4).toString(), "PNG");
  const svg = (await exportAs("svg")).toString();
  assert(svg.includes("<image") && svg.includes("cat"), "the image has no cells or no labels");
  assert((await exportAs("csv")).toString().includes("cat"), "no labels in the table");
  equal((await exportAs("npz")).subarray(0, 2).toString(), "PK");
  await exportAs("html");
  const saved = await context.newPage();
  saved.on("console", (message) => message.type() === "error" && browserErrors.push(message.text()));
  await saved.goto(`file://${folder}/page.html`);
  await saved.waitForSelector("#view canvas");
  await saved.keyboard.press("a");
  await saved.waitForSelector(".grid canvas");
  await saved.keyboard.press("b");
  await saved.waitForSelector(".right .token");
  for (const key of ["c", "d", "e", "f", "h", "j"]) {
    await saved.keyboard.press(key);
    await idle(saved);
    equal([key, await saved.locator("#view .error").allInnerTexts()], [key, []]);
  }
  await saved.keyboard.press("k");
  await saved.waitForFunction(() => /not in the saved file/.test(document.getElementById("view").innerText));
  await saved.close();
});

await check("invalid input is reported, and the page keeps working", async () => {
  await open({ model: "stories", view: "heads" });
  await type("word ".repeat(2000));
  assert(/\d/.test(await text("[role=alert]")), "the lengths are not reported");
  await type("👩‍👩‍👧 שלום مرحبا");
  equal(await page.locator(".problem").count(), 0);
  await type("x".repeat(10_000));
  assert((await page.locator(".problem").count()) <= 1, "broken");
  await open({ model: "bert", view: "heads" });
  await type("");
  assert(/0 words/.test(await text("[role=alert]")), "an empty text is not reported");
  await open({ model: "no-such-model" });
  assert(/no-such-model/.test(await text("[role=alert]")), "a missing model is not reported");
});

const SHAPES = ["<script>window.bad=1</script>", "<img src=x onerror=window.bad=1>", "<svg/onload=window.bad=1>", "\"><iframe srcdoc='<script>parent.bad=1</script>'>", "javascript:window.bad=1", "{window.bad=1}", "{@html '<img src=x onerror=window.bad=1>'}", "'-window.bad=1-'", "</textarea><script>window.bad=1</script>", "<a href=javascript:window.bad=1>x</a>"];
const PAYLOADS = Array.from({ length: 200 }, (_, i) => SHAPES[i % SHAPES.length].replace("=1", `=${i + 1}`));

async function harmless() {
  equal(await page.evaluate(() => window.bad), undefined);
  equal(await page.locator("#page :is(script, iframe, img, a[href^=javascript])").count(), 0);
}

await check("200 payloads stay text: as prompt, token, class, label and model name", async () => {
  await open({ model: "stories", view: "head" });
  for (let i = 0; i < 200; i += 14) {
    await page.evaluate((hash) => (location.hash = hash), String(new URLSearchParams({ model: "stories", view: "head", text: PAYLOADS.slice(i, i + 14).join(" ") })));
    await settle();
    equal(await page.locator(".problem").allInnerTexts(), []);
    await harmless();
  }
  let at = 0;
  const insertPayloads = (value, key = "") => {
    if (Array.isArray(value)) return value.map((item) => insertPayloads(item, key));
    if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, insertPayloads(item, name)]));
    return typeof value === "string" && /^(labels|tokens|label|name|summary|description|text|error|remarks|classes)$/.test(key) ? PAYLOADS[at++ % 200] : value;
  };
  const replaceResponse = async (route) => {
    const response = await route.fetch();
    await route.fulfill({ response, json: insertPayloads(await response.json()) });
  };
  await page.route("**/api/models", replaceResponse);
  await page.route("**/api/run", replaceResponse);
  for (const view of ["heads", "head", "map", "lens"]) {
    await open({ model: "stories", view, text: "A cat" });
    await harmless();
  }
  await page.unroute("**/api/models");
  await page.unroute("**/api/run");
});

await import("./rare_checks.mjs");
await browser.close();
