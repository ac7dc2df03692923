// What a user does less often: patches, maps by keyboard, themes, long texts, models that go, two tabs. Part of checks.mjs.
import { rmSync } from "node:fs";
import { address, check, context, equal, hash, holds, open, origin, page, picture, still, text, type, until } from "./user.mjs";

const IT = "The animal didn't cross the street because it was too ";
const { models } = await (await page.request.get(`${origin}/api/models`)).json();
const pathOf = (name) => models.find((one) => one.id.endsWith(`/${name}`)).id;

await check("a patch from another text changes the prediction; one that cannot be is told, and nothing is lost", async () => {
  await open({ model: "stories", view: "heads", text: IT + "tired." });
  await page.getByText("Patch from another text").click();
  await still();
  equal(await page.inputValue("#patch-text"), IT + "wide.");
  const before = await text("#prediction");
  await page.selectOption("#patch-tap", "blocks.5.resid_post");
  await page.click("#patch");
  await still();
  holds(/resid_post at “.*” \(\d+\) as in/.test(await text("#interventions")), "not in the list");
  holds((await text("#prediction")) !== before && /before and after/.test(await text("#prediction")), "no effect");
  equal(JSON.parse(hash().get("off"))[0].kind, "patch");
  await page.keyboard.press("Escape");
  await page.getByRole("button", { name: "undo all" }).click();
  await still();
  equal(await text("#prediction"), before);
  await page.fill("#patch-text", "Short.");
  await page.selectOption("#patch-where", "all");
  await page.click("#patch");
  await still();
  holds(/\d/.test(await text("#interventions [role=alert]")), "unequal lengths are not told");
  equal(await text("#prediction"), before);
});

// The cursor's name in the address, and where the map is.
const MAPS = {
  dimension: { model: "stories", view: "neuron" },
  positions: { model: "bert", view: "embeddings", text: "The cat sat." },
  aligned: { model: "seq2seq", view: "live", text: "The cat sat on the mat." },
  cached: { model: "stories", view: "live", step: "2" },
  checkpoint: { model: pathOf("run"), view: "compare", text: "the cat" },
};
for (const [name, settings] of Object.entries(MAPS)) {
  await check(`arrow keys move in the map that has the focus (${name}), and the address keeps where`, async () => {
    await open(settings);
    const map = page.locator(".heat", { has: page.locator("canvas") }).last();
    await map.locator("canvas").focus();
    for (const key of ["ArrowDown", "ArrowDown", "ArrowRight"]) await page.keyboard.press(key);
    const said = await map.locator(".readout").innerText();
    holds(!/Point at/.test(said), "nothing is read aloud");
    const [row, column] = hash().get(name).split(".").map(Number);
    holds(row > 0 && column > 0, `it stands at ${row}, ${column}`);
    await page.reload();
    await page.waitForSelector("#prediction");
    await still();
    equal(await map.locator(".readout").innerText(), said);
  });
}

await check("with words merged, keys and a click go from word to word in one selection, which comes back from the address", async () => {
  await open({ model: "bert", view: "map", text: "unbelievable cats", words: "yes", query: 1, key: 0 });
  const said = [];
  for (let i = 0; i < 3; i++) said.push(await text(".readout")), await page.keyboard.press("ArrowRight");
  equal(new Set(said).size, 3);
  holds(/cats/.test(said[2]) && Number(hash().get("key")) > 3, "one key is not one word");
  await page.mouse.move(0, 0);
  const last = await text(".readout");
  const at = page.url();
  await page.goto("about:blank");
  await page.goto(at);
  await page.waitForSelector(".readout");
  await still();
  equal(await text(".readout"), last);
  await page.keyboard.press("k");
  await page.waitForSelector(".maps .readout");
  await still();
  holds(!/Point at/.test(await text(".maps .readout")), "the cursor does not go along to Compare");
});

await check("while the theme is the system's, canvases are painted anew when that changes", async () => {
  await open({ model: "stories", view: "heads", text: IT + "tired." });
  const looks = [];
  for (const colorScheme of ["light", "dark", "light"]) {
    await page.emulateMedia({ colorScheme });
    await until(async () => (await picture()) !== looks.at(-1), "not repainted");
    await still();
    looks.push(await picture());
  }
  holds(looks[0] !== looks[1], "not repainted");
  holds(looks[0] === looks[2], "not painted back");
});

await check("beyond 512 tokens: a pooled map, an exact tile, and only the tokens in sight", async () => {
  await open({ model: "long", view: "map", text: "the cat sat on the mat ".repeat(90).trim(), query: 400, key: 390 });
  await page.waitForSelector("[aria-label^='exact tile']");
  holds(/greatest of 2 × 2/.test(await text("#view h3")), "the pooling is not told");
  holds(!/Point at/.test(await text(".readout")), "the pooled map has no cursor");
  const tile = page.locator(".heat").last().locator(".readout");
  const said = await tile.innerText();
  await page.keyboard.press("ArrowLeft");
  await still();
  holds((await tile.innerText()) !== said, "the tile does not follow the keys");
  await page.keyboard.press("b");
  await page.waitForSelector(".left .token.chosen");
  await still();
  holds((await page.locator(".left .token").count()) < 100, "all tokens are in the document");
  equal(await page.locator(".left .token.chosen").getAttribute("aria-label").then((one) => one.split(":")[0]), "query 400");
  holds(/Exact/.test(await text(".pair .card")), "not exact");
  const shares = (await page.locator(".pair .card .number").allInnerTexts()).map(Number);
  holds(shares[0] > 0, "no weights");
  for (const key of ["a", "e", "f", "h", "k"]) {
    await page.keyboard.press(key);
    await still();
    equal(await page.locator("#view .error").allInnerTexts(), []);
  }
});

await check("examples fit models of small context", async () => {
  for (const model of ["bert", "seq2seq", "rnn", pathOf("gone"), pathOf("run")]) {
    await open({ model });
    for (const one of await page.locator(".examples button").all()) {
      await one.click();
      await still();
      equal(await page.locator(".problem").allInnerTexts(), []);
    }
  }
});

await check("on a phone nothing is wider than the screen, and the open view's name is in sight", async () => {
  await page.setViewportSize({ width: 390, height: 844 });
  for (const model of ["stories", "seq2seq"]) {
    await open({ model, view: "heads", ...(model === "stories" ? { text: IT + "tired.", step: "2" } : {}) });
    for (const key of "abcdefghijk") {
      await page.keyboard.press(key);
      await still();
      equal([key, await page.evaluate(() => document.documentElement.scrollWidth)], [key, 390]);
      const box = await page.locator("[role=tab][aria-selected=true]").boundingBox();
      holds(box.x >= 0 && box.x + box.width < 391, `the name of view ${key} is out of sight: ${box.x} ${box.width}`);
    }
  }
  await page.setViewportSize({ width: 1440, height: 900 });
});

await check("two tabs at once: each keeps its own model, text and interventions", async () => {
  await open({ model: "stories", view: "heads", text: "A cat" });
  const other = await context.newPage();
  await other.goto(`${origin}/#${new URLSearchParams({ model: "bert", view: "heads", text: "A dog sat." })}`);
  await other.waitForSelector(".grid canvas");
  const before = await text("#prediction");
  await Promise.all([other.locator(".power").first().click(), type("The dog and the dog and the"), page.keyboard.press("Escape")]);
  await still();
  await other.waitForFunction(() => /is off/.test(document.getElementById("interventions").innerText));
  holds(/nothing/.test(await text("#interventions")), "an intervention of the other tab is here");
  holds((await text("#prediction")) !== before, "the text was not read");
  equal(await other.inputValue("#text"), "A dog sat.");
  await other.close();
});

await check("a model removed while it is open is told in words, and another can be chosen", async () => {
  await open({ model: pathOf("gone"), view: "heads", text: "The cat" });
  rmSync(pathOf("gone"), { recursive: true });
  await type("The cat sat");
  holds(/was removed while it was open/.test(await text("[role=alert]")), "not told");
  await page.selectOption("#model", "bert");
  await still();
  equal(await page.locator(".problem").count(), 0);
  await page.waitForSelector(".grid canvas");
});
