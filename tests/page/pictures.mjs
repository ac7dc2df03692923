// Screenshots for the documentation: node pictures.mjs ADDRESS FOLDER [GPT BERT TRANSLATOR], with model ids of the page.
// Writes selected screenshots, and a contact sheet of all views for each model, screen size and theme, as WebP.
import { mkdirSync, writeFileSync } from "node:fs";
import { launch } from "./browser.mjs";

const [address, folder, gpt = "stories", bert = "bert", translator = "es-en"] = process.argv.slice(2);
const MODELS = { gpt, bert, translation: translator };
const SCREENS = { wide: { width: 1440, height: 900 }, phone: { width: 390, height: 844 } };
/** Size limit of a screenshot. A contact sheet may have twice the size. */
const MAX_BYTES = 100_000;
const VIEWS = ["heads", "head", "map", "neuron", "residual", "lens", "coreference", "embeddings", "live", "cost", "compare"];
const MISSING = { bert: ["live"], translation: ["coreference"] };
const IT = "The animal didn't cross the street because it was too tired.";
/** Settings that a view needs to show something. All others are the defaults. */
const SETTINGS = {
  "gpt coreference": { text: IT }, "bert coreference": { text: IT }, "gpt live": { step: 6 }, "gpt head": { layer: 1, head: 2 }, "gpt map": { layer: 1, head: 2 },
  "bert head": { layer: 3, head: 1 }, "bert map": { layer: 2, head: 2 }, "gpt residual": { layer: 3 }, "bert compare": { text: IT, which: "all" },
  "translation compare": { stack: "encoder" }, "translation map": { words: "yes", which: "all" },
};
const SELECTED = [
  ...VIEWS.map((view) => `gpt ${view} wide light`), "gpt heads wide dark", "gpt live phone light", "gpt coreference phone dark", "bert heads wide light", "bert lens wide light",
  "bert coreference wide dark", "translation map wide light", "translation live wide light", "translation live phone light", "translation heads wide dark",
];

const browser = await launch();
const blankPage = await (await browser.newContext()).newPage();

/** Runs in a page. Arranges pictures in a grid and returns a WebP of the best quality within the size limit. */
async function composeImage({ pictures, columns, width, maxBytes }) {
  const images = await Promise.all(pictures.map(async (picture) => {
    const image = new Image();
    image.src = `data:image/png;base64,${picture}`;
    await image.decode();
    return image;
  }));
  const scale = width / images[0].width;
  const height = Math.round(images[0].height * scale);
  const gap = columns > 1 ? 8 : 0;
  const canvas = document.createElement("canvas");
  canvas.width = columns * (width + gap) - gap;
  canvas.height = Math.ceil(images.length / columns) * (height + gap) - gap;
  const context = canvas.getContext("2d");
  context.fillStyle = "#888";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingQuality = "high";
  images.forEach((image, i) => context.drawImage(image, (i % columns) * (width + gap), Math.floor(i / columns) * (height + gap), width, height));
  for (let quality = 0.9; quality > 0.1; quality -= 0.1) {
    const webp = canvas.toDataURL("image/webp", quality).split(",")[1];
    if (webp.length * 0.75 <= maxBytes) return webp;
  }
  throw new Error("the picture exceeds the size limit at every quality");
}

async function write(name, pictures, columns, width) {
  const maxBytes = columns > 1 ? 2 * MAX_BYTES : MAX_BYTES;
  const webp = await blankPage.evaluate(composeImage, { pictures, columns, width, maxBytes });
  writeFileSync(`${folder}/${name}.webp`, Buffer.from(webp, "base64"));
  console.log(`${name}.webp ${Math.round(webp.length * 0.00075)} KB`);
}

mkdirSync(folder, { recursive: true });
for (const [screen, viewport] of Object.entries(SCREENS)) {
  const page = await (await browser.newContext({ viewport })).newPage();
  await page.goto(address);
  for (const [family, model] of Object.entries(MODELS)) {
    for (const theme of ["light", "dark"]) {
      const pictures = [];
      for (const view of VIEWS.filter((name) => !MISSING[family]?.includes(name))) {
        const hash = new URLSearchParams({ model, view, theme, ...SETTINGS[`${family} ${view}`] });
        await page.goto("about:blank");
        await page.goto(`${new URL(address).origin}/#${hash}`);
        await page.waitForSelector("#prediction");
        await page.waitForLoadState("networkidle");
        await page.waitForTimeout(200);
        const errors = await page.locator(".problem, #view .error").allInnerTexts();
        if (errors.length) throw new Error(`${family} ${view}: ${errors[0]}`);
        const screenshot = (await page.screenshot()).toString("base64");
        pictures.push(screenshot);
        if (SELECTED.includes(`${family} ${view} ${screen} ${theme}`)) await write(`${family}-${view}-${screen}-${theme}`, [screenshot], 1, viewport.width);
      }
      const [columns, width] = screen === "wide" ? [3, 480] : [6, 260];
      await write(`all-${family}-${screen}-${theme}`, pictures, columns, width);
    }
  }
}
await browser.close();
