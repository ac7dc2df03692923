// What a user does, done in a real browser: node checks.mjs ADDRESS FOLDER. Prints a JSON line for each check.
import { readFileSync } from "node:fs";
import { browser, check, context, equal, folder, hash, holds, idle, noise, open, page, picture, still, text, type, until } from "./user.mjs";

const IT = "The animal didn't cross the street because it was too ";

await check("the first screen explains itself: a text, a model, every head, a sentence", async () => {
  await open({ model: "stories" });
  holds((await page.inputValue("#text")).length > 20, "no text to begin with");
  equal(await page.locator(".grid .open canvas").count(), 48);
  holds(/attention head/.test(await text("#view .what")), "no sentence");
});

await check("a text that is typed is read", async () => {
  await type("A dog and a cat. A dog and a");
  holds(/cat/.test(await text("#prediction")), "the pattern is not continued");
  equal(hash().get("text"), "A dog and a cat. A dog and a");
});

await check("a head opens; the row under the pointer is exact", async () => {
  await page.locator(".grid .open").nth(7).click();
  await still();
  equal([hash().get("view"), hash().get("layer"), hash().get("head")], ["head", "1", "1"]);
  await page.locator(".left .token").nth(4).hover();
  await still();
  holds(/Exact/.test(await text(".pair .card")), "not exact");
  const shares = (await page.locator(".pair .card .number").allInnerTexts()).map(Number);
  const sum = shares.reduce((a, b) => a + b, 0);
  holds(Math.abs(sum - 1) < 0.004, `the row sums to ${sum}`);
});

await check("an edge that is cut changes the prediction, and undoing it mends it", async () => {
  await open({ model: "stories", view: "head", layer: 5, head: 2 });
  const before = await text("#prediction");
  await page.keyboard.press("ArrowLeft");
  await page.keyboard.press("X");
  await still();
  holds(/before and after/.test(await text("#prediction")), "no effect is shown");
  holds(/may not look at/.test(await text("#interventions")), "not in the list");
  await page.keyboard.press("z");
  await still();
  equal(await text("#prediction"), before);
});

await check("a head that is switched off is listed, in the address, and changes what is seen", async () => {
  await open({ model: "stories", view: "heads" });
  await page.locator(".power").nth(3).click();
  await still();
  holds(/layer 0, head 3 is off/.test(await text("#interventions")), "not in the list");
  equal(JSON.parse(hash().get("off")), [{ kind: "head", stack: "self", layer: 0, head: 3 }]);
});

await check("each step adds one token's bytes to the cache; without it all is read anew", async () => {
  await open({ model: "stories", view: "live" });
  const bytes = async () => Number((await text("#kv")).match(/([\d,]+) bytes/)[1].replaceAll(",", ""));
  const tokens = async () => Number((await text("#kv")).match(/(\d+) tokens/)[1]);
  await page.click("#step");
  await page.waitForSelector("#kv");
  const [first, n] = [await bytes(), await tokens()];
  for (let i = 0; i < 3; i++) await page.click("#step");
  await until(async () => (await tokens()) === n + 3, "three clicks are not three tokens");
  await still();
  equal(await bytes(), first + (3 * first) / n);
  await page.click("#cache");
  await page.keyboard.press("n");
  await page.waitForFunction(() => /read anew/.test(document.getElementById("kv")?.innerText ?? ""));
});

await check("a translation with its alignment and its beam", async () => {
  await open({ model: "seq2seq", view: "live", text: "The cat sat on the mat." });
  await page.waitForSelector("#translation");
  equal(await page.locator("#view canvas").count(), 1);
  holds((await page.locator(".steps li.kept").count()) > 2, "the winner's way is not marked");
  await open({ model: "seq2seq", view: "map", stack: "cross", text: "The cat sat on the mat." });
  holds(/Decoder on encoder/.test(await text("#view .what")), "no translation plot");
});

await check("what it refers to: tired, wide, and The Law", async () => {
  await open({ model: "stories", view: "it", text: IT + "tired." });
  await page.waitForSelector("#verdict");
  const tired = await picture();
  await page.getByRole("button", { name: "too wide" }).click();
  await page.waitForFunction((old) => document.getElementById("view").innerText !== old && document.getElementById("verdict"), tired);
  await page.getByRole("button", { name: "The Law" }).click();
  await still();
  await page.waitForSelector("#verdict");
  equal(await page.inputValue("#pronoun"), "its");
  holds(/not by itself/.test(await text(".caution")), "the caution is missing");
});

const TABS = { heads: "Model", head: "Head", map: "Heat map", neuron: "Neuron", residual: "Residual", lens: "Lens", it: "What is", embeddings: "Embeddings", live: "Live", cost: "Cost", compare: "Compare" };
const VIEWS = { stories: "heads head map neuron residual lens it embeddings live cost compare", bert: "heads head map neuron residual it embeddings cost compare", seq2seq: "heads head map neuron residual lens embeddings live compare", rnn: "heads map lens embeddings live" };
for (const [model, views] of Object.entries(VIEWS)) {
  // The small models have room for a few words only.
  const [first, second] = model === "stories" ? [IT + "tired.", "On the street was an animal because it was too tired."] : ["The cat sat on it.", "A dog ran to it."];
  await check(`every view of ${model} shows itself, and another text changes it`, async () => {
    const look = async () => {
      const seen = {};
      for (const view of views.split(" ")) {
        await page.locator("[role=tab]", { hasText: TABS[view] }).click();
        if (view === "live" && model === "stories") await page.click("#step"), await page.waitForSelector("#kv");
        await still();
        equal(await page.locator("#view .error").allInnerTexts(), []);
        seen[view] = await picture();
        holds(seen[view].length > 400, `${view} is empty`);
      }
      return seen;
    };
    await open({ model, text: first, other_text: second + " No." });
    const before = await look();
    await type(second);
    const after = await look();
    equal(Object.keys(before).filter((view) => view !== "cost" && before[view] === after[view]), []);
  });
}

await check("the keyboard alone: views, selection, heads, help", async () => {
  await open({ model: "stories", view: "heads" });
  for (const [key, view] of [["b", "head"], ["c", "map"], ["d", "neuron"], ["e", "residual"], ["f", "lens"], ["g", "it"], ["h", "embeddings"], ["i", "live"], ["j", "cost"], ["k", "compare"], ["a", "heads"]]) {
    await page.keyboard.press(key);
    await page.waitForSelector(`#view[data-view=${view}]`);
  }
  await page.keyboard.press("]");
  await page.keyboard.press(".");
  await page.keyboard.press("ArrowUp");
  await page.keyboard.press("ArrowRight");
  await page.keyboard.press("o");
  await still();
  equal([hash().get("layer"), hash().get("head"), hash().get("query"), hash().get("key")], ["1", "1", "18", "0"]);
  holds(hash().get("off").includes('"head":1'), "o switches nothing off");
  await page.keyboard.press("?");
  holds(/undo all/.test(await text("dialog")), "no list of keys");
  await page.keyboard.press("Escape");
  await page.keyboard.press("t");
  equal(await page.evaluate(() => document.activeElement.id), "text");
  await page.keyboard.press("Tab");
  const ring = await page.evaluate(() => getComputedStyle(document.activeElement).outlineStyle);
  equal(ring, "solid");
});

await check("the address brings everything back", async () => {
  await open({ model: "stories", view: "map", text: IT + "wide.", layer: 3, head: 2, query: 7, key: 1, words: "yes", scale: "log", off: '[{"kind":"head","stack":"self","layer":0,"head":1}]' });
  const [seen, at] = [await picture(), page.url()];
  await page.goto("about:blank");
  await page.goto(at);
  await page.waitForSelector("#prediction");
  await still();
  equal(page.url(), at);
  holds((await picture()) === seen, "another picture");
});

async function exported(format) {
  await page.getByRole("button", { name: "Export" }).click();
  const [file] = await Promise.all([page.waitForEvent("download"), page.click(`[data-format=${format}]`)]);
  const path = `${folder}/page.${format}`;
  await file.saveAs(path);
  return readFileSync(path);
}

await check("exports: PNG, SVG, CSV, NPZ, and a page that opens from disk", async () => {
  await open({ model: "bert", view: "map", layer: 1, text: "The cat sat on the mat." });
  equal((await exported("png")).subarray(1, 4).toString(), "PNG");
  const svg = (await exported("svg")).toString();
  holds(svg.includes("<image") && svg.includes("cat"), "the picture has no cells or no labels");
  holds((await exported("csv")).toString().includes("cat"), "no labels in the table");
  equal((await exported("npz")).subarray(0, 2).toString(), "PK");
  await exported("html");
  const saved = await context.newPage();
  saved.on("console", (message) => message.type() === "error" && noise.push(message.text()));
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

await check("bad input is told in words, and the page goes on", async () => {
  await open({ model: "stories", view: "heads" });
  await type("word ".repeat(2000));
  holds(/\d/.test(await text("[role=alert]")), "too long a text is not told with its numbers");
  await type("👩‍👩‍👧 שלום مرحبا");
  equal(await page.locator(".problem").count(), 0);
  await type("x".repeat(10_000));
  holds((await page.locator(".problem").count()) <= 1, "broken");
  await open({ model: "bert", view: "heads" });
  await type("");
  holds(/empty/.test(await text("[role=alert]")), "an empty text is not told");
  await open({ model: "no-such-model" });
  holds(/no-such-model/.test(await text("[role=alert]")), "a model that is not there is not told");
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
    await page.evaluate((told) => (location.hash = told), String(new URLSearchParams({ model: "stories", view: "head", text: PAYLOADS.slice(i, i + 14).join(" ") })));
    await still();
    equal(await page.locator(".problem").allInnerTexts(), []);
    await harmless();
  }
  let at = 0;
  const poisoned = (value, key = "") => {
    if (Array.isArray(value)) return value.map((one) => poisoned(one, key));
    if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([name, one]) => [name, poisoned(one, name)]));
    return typeof value === "string" && /^(labels|tokens|label|name|summary|about|text|error|remarks|classes)$/.test(key) ? PAYLOADS[at++ % 200] : value;
  };
  const poison = async (route) => {
    const answer = await route.fetch();
    await route.fulfill({ response: answer, json: poisoned(await answer.json()) });
  };
  await page.route("**/api/models", poison);
  await page.route("**/api/run", poison);
  for (const view of ["heads", "head", "map", "lens"]) {
    await open({ model: "stories", view, text: "A cat" });
    await harmless();
  }
  await page.unroute("**/api/models");
  await page.unroute("**/api/run");
});

await import("./rare_checks.mjs");
await browser.close();
