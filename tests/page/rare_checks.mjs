// Checks of less common actions: patches, keyboard navigation, themes, long texts, deleted models, two tabs. Part of checks.mjs.
import { rmSync } from "node:fs";
import { address, check, context, equal, hash, assert, open, origin, page, capture, settle, text, type, until } from "./user.mjs";

const IT = "The animal didn't cross the street because it was too ";
const { models } = await (await page.request.get(`${origin}/api/models`)).json();
const pathOf = (name) => models.find((model) => model.id.endsWith(`/${name}`)).id;

await check("a patch changes the prediction, and an invalid patch is reported without side effects", async () => {
  await open({ model: "stories", view: "heads", text: IT + "tired." });
  await page.getByText("Patch an activation from another text").click();
  await settle();
  equal(await page.inputValue("#patch-text"), IT + "wide.");
  const before = await text("#prediction");
  await page.selectOption("#patch-tap", "blocks.5.resid_post");
  await page.click("#patch");
  await settle();
  assert(/resid_post at “.*” \(\d+\) patched from/.test(await text("#interventions")), "not in the list");
  assert((await text("#prediction")) !== before && /before and after/.test(await text("#prediction")), "no effect");
  equal(JSON.parse(hash().get("interventions"))[0].kind, "patch");
  await page.keyboard.press("Escape");
  await page.getByRole("button", { name: "undo all" }).click();
  await settle();
  equal(await text("#prediction"), before);
  await page.fill("#patch-text", "Short.");
  await page.selectOption("#patch-where", "all");
  await page.click("#patch");
  await settle();
  assert(/\d/.test(await text("#interventions [role=alert]")), "different lengths are not reported");
  equal(await text("#prediction"), before);
});

// URL parameter of the cursor, and the view that contains the map.
const MAPS = {
  dimension: { model: "stories", view: "neuron" },
  positions: { model: "bert", view: "embeddings", text: "The cat sat." },
  aligned: { model: "seq2seq", view: "live", text: "The cat sat on the mat." },
  cached: { model: "stories", view: "live", step: "2" },
  checkpoint: { model: pathOf("run"), view: "compare", text: "the cat" },
};
for (const [name, settings] of Object.entries(MAPS)) {
  await check(`arrow keys move the cursor of the focused map (${name}), and the URL stores it`, async () => {
    await open(settings);
    const map = page.locator(".heat", { has: page.locator("canvas") }).last();
    await map.locator("canvas").focus();
    for (const key of ["ArrowDown", "ArrowDown", "ArrowRight"]) await page.keyboard.press(key);
    const readout = await map.locator(".readout").innerText();
    assert(!/Point at/.test(readout), "no readout");
    const [row, column] = hash().get(name).split(".").map(Number);
    assert(row > 0 && column > 0, `the cursor is at ${row}, ${column}`);
    await page.reload();
    await page.waitForSelector("#prediction");
    await settle();
    equal(await map.locator(".readout").innerText(), readout);
  });
}

await check("with merged words, the arrow keys select words, and the URL restores the selection", async () => {
  await open({ model: "bert", view: "map", text: "unbelievable cats", words: "yes", query: 1, key: 0 });
  const readout = [];
  for (let i = 0; i < 3; i++) readout.push(await text(".readout")), await page.keyboard.press("ArrowRight");
  equal(new Set(readout).size, 3);
  assert(/cats/.test(readout[2]) && Number(hash().get("key")) > 3, "a key press does not move by one word");
  await page.mouse.move(0, 0);
  const lastReadout = await text(".readout");
  const url = page.url();
  await page.goto("about:blank");
  await page.goto(url);
  await page.waitForSelector(".readout");
  await settle();
  equal(await text(".readout"), lastReadout);
  await page.keyboard.press("k");
  await page.waitForSelector(".maps .readout");
  await settle();
  assert(!/Point at/.test(await text(".maps .readout")), "Compare does not keep the cursor");
});

await check("canvases are repainted when the theme of the system changes", async () => {
  await open({ model: "stories", view: "heads", text: IT + "tired." });
  const pictures = [];
  for (const colorScheme of ["light", "dark", "light"]) {
    await page.emulateMedia({ colorScheme });
    await until(async () => (await capture()) !== pictures.at(-1), "not repainted");
    await settle();
    pictures.push(await capture());
  }
  assert(pictures[0] !== pictures[1], "not repainted");
  assert(pictures[0] === pictures[2], "the light theme differs after switching back");
});

await check("more than 512 tokens: a pooled map, a tile without pooling, and only visible tokens in the document", async () => {
  await open({ model: "long", view: "map", text: "the cat sat on the mat ".repeat(90).trim(), query: 400, key: 390 });
  await page.waitForSelector("[aria-label^='weights without pooling']");
  assert(/maximum of 2 × 2/.test(await text("#view h3")), "the pooling is not mentioned");
  assert(!/Point at/.test(await text(".readout")), "the pooled map has no cursor");
  const tile = page.locator(".heat").last().locator(".readout");
  const readout = await tile.innerText();
  await page.keyboard.press("ArrowLeft");
  await settle();
  assert((await tile.innerText()) !== readout, "the tile does not follow the keys");
  await page.keyboard.press("b");
  await page.waitForSelector(".left .token.chosen");
  await settle();
  assert((await page.locator(".left .token").count()) < 100, "all tokens are in the document");
  equal(await page.locator(".left .token.chosen").getAttribute("aria-label").then((label) => label.split(":")[0]), "query 400");
  assert(/Exact/.test(await text(".pair .card")), "not exact");
  const shares = (await page.locator(".pair .card .number").allInnerTexts()).map(Number);
  assert(shares[0] > 0, "no weights");
  for (const key of ["a", "e", "f", "h", "k"]) {
    await page.keyboard.press(key);
    await settle();
    equal(await page.locator("#view .error").allInnerTexts(), []);
  }
});

await check("examples fit models with a small context", async () => {
  for (const model of ["bert", "seq2seq", "rnn", pathOf("gone"), pathOf("run")]) {
    await open({ model });
    for (const button of await page.locator(".examples button").all()) {
      await button.click();
      await settle();
      equal(await page.locator(".problem").allInnerTexts(), []);
    }
  }
});

await check("on a phone nothing is wider than the screen, and the tab of the open view is visible", async () => {
  await page.setViewportSize({ width: 390, height: 844 });
  for (const model of ["stories", "seq2seq"]) {
    await open({ model, view: "heads", ...(model === "stories" ? { text: IT + "tired.", step: "2" } : {}) });
    for (const key of "abcdefghijk") {
      await page.keyboard.press(key);
      await settle();
      equal([key, await page.evaluate(() => document.documentElement.scrollWidth)], [key, 390]);
      const box = await page.locator("[role=tab][aria-selected=true]").boundingBox();
      assert(box.x >= 0 && box.x + box.width < 391, `the tab of view ${key} is not visible: ${box.x} ${box.width}`);
    }
  }
  await page.setViewportSize({ width: 1440, height: 900 });
});

await check("two tabs have separate models, texts and interventions", async () => {
  await open({ model: "stories", view: "heads", text: "A cat" });
  const other = await context.newPage();
  await other.goto(`${origin}/#${new URLSearchParams({ model: "bert", view: "heads", text: "A dog sat." })}`);
  await other.waitForSelector(".grid canvas");
  const before = await text("#prediction");
  await Promise.all([other.locator(".power").first().click(), type("The dog and the dog and the"), page.keyboard.press("Escape")]);
  await settle();
  await other.waitForFunction(() => /ablated/.test(document.getElementById("interventions").innerText));
  assert(/none/.test(await text("#interventions")), "the intervention of the other tab is active");
  assert((await text("#prediction")) !== before, "the text was not processed");
  equal(await other.inputValue("#text"), "A dog sat.");
  await other.close();
});

await check("a deleted model is reported, and another can be selected", async () => {
  await open({ model: pathOf("gone"), view: "heads", text: "The cat" });
  rmSync(pathOf("gone"), { recursive: true });
  await type("The cat sat");
  assert(/no longer exists/.test(await text("[role=alert]")), "not reported");
  await page.selectOption("#model", "bert");
  await settle();
  equal(await page.locator(".problem").count(), 0);
  await page.waitForSelector(".grid canvas");
});
