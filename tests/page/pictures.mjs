// The pictures of the docs: node pictures.mjs ADDRESS FOLDER [GPT BERT TRANSLATOR]; models as the page names them.
// FOLDER gets chosen pictures, and a contact sheet of every view for each model, screen and theme, as WebP.
import { mkdirSync, writeFileSync } from "node:fs";
import { launch } from "./browser.mjs";

const [address, folder, gpt = "stories", bert = "bert", translator = "es-en"] = process.argv.slice(2);
const MODELS = { gpt, bert, translation: translator };
const SCREENS = { wide: { width: 1440, height: 900 }, phone: { width: 390, height: 844 } };
/** Of a picture; a sheet of eleven may have twice that. */
const MOST_BYTES = 100_000;
const VIEWS = ["heads", "head", "map", "neuron", "residual", "lens", "it", "embeddings", "live", "cost", "compare"];
const MISSING = { bert: ["live"], translation: ["it"] };
const IT = "The animal didn't cross the street because it was too tired.";
/** What a view needs to show something; the rest is as the page opens. */
const MORE = {
  "gpt it": { text: IT }, "bert it": { text: IT }, "gpt live": { step: 6 }, "gpt head": { layer: 1, head: 2 }, "gpt map": { layer: 1, head: 2 },
  "bert head": { layer: 3, head: 1 }, "bert map": { layer: 2, head: 2 }, "gpt residual": { layer: 3 }, "bert compare": { text: IT, which: "all" },
  "translation compare": { stack: "encoder" }, "translation map": { words: "yes", which: "all" },
};
const CHOSEN = [
  ...VIEWS.map((view) => `gpt ${view} wide light`), "gpt heads wide dark", "gpt live phone light", "gpt it phone dark", "bert heads wide light", "bert lens wide light",
  "bert it wide dark", "translation map wide light", "translation live wide light", "translation live phone light", "translation heads wide dark",
];

const browser = await launch();
const desk = await (await browser.newContext()).newPage();

/** Runs in a page: pictures beside one another, as WebP at the best quality that is small enough. */
async function drawn({ pictures, columns, width, most }) {
  const images = await Promise.all(pictures.map(async (one) => {
    const image = new Image();
    image.src = `data:image/png;base64,${one}`;
    await image.decode();
    return image;
  }));
  const scale = width / images[0].width;
  const height = Math.round(images[0].height * scale);
  const gap = columns > 1 ? 8 : 0;
  const canvas = document.createElement("canvas");
  canvas.width = columns * (width + gap) - gap;
  canvas.height = Math.ceil(images.length / columns) * (height + gap) - gap;
  const pen = canvas.getContext("2d");
  pen.fillStyle = "#888";
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.imageSmoothingQuality = "high";
  images.forEach((image, i) => pen.drawImage(image, (i % columns) * (width + gap), Math.floor(i / columns) * (height + gap), width, height));
  for (let quality = 0.9; quality > 0.1; quality -= 0.1) {
    const made = canvas.toDataURL("image/webp", quality).split(",")[1];
    if (made.length * 0.75 <= most) return made;
  }
  throw new Error("a picture does not get small enough");
}

async function write(name, pictures, columns, width) {
  const most = columns > 1 ? 2 * MOST_BYTES : MOST_BYTES;
  const made = await desk.evaluate(drawn, { pictures, columns, width, most });
  writeFileSync(`${folder}/${name}.webp`, Buffer.from(made, "base64"));
  console.log(`${name}.webp ${Math.round(made.length * 0.00075)} KB`);
}

mkdirSync(folder, { recursive: true });
for (const [screen, viewport] of Object.entries(SCREENS)) {
  const page = await (await browser.newContext({ viewport })).newPage();
  await page.goto(address);
  for (const [family, model] of Object.entries(MODELS)) {
    for (const theme of ["light", "dark"]) {
      const pictures = [];
      for (const view of VIEWS.filter((one) => !MISSING[family]?.includes(one))) {
        const hash = new URLSearchParams({ model, view, theme, ...MORE[`${family} ${view}`] });
        await page.goto("about:blank");
        await page.goto(`${new URL(address).origin}/#${hash}`);
        await page.waitForSelector("#prediction");
        await page.waitForLoadState("networkidle");
        await page.waitForTimeout(200);
        const told = await page.locator(".problem, #view .error").allInnerTexts();
        if (told.length) throw new Error(`${family} ${view}: ${told[0]}`);
        const taken = (await page.screenshot()).toString("base64");
        pictures.push(taken);
        if (CHOSEN.includes(`${family} ${view} ${screen} ${theme}`)) await write(`${family}-${view}-${screen}-${theme}`, [taken], 1, viewport.width);
      }
      const [columns, width] = screen === "wide" ? [3, 480] : [6, 260];
      await write(`all-${family}-${screen}-${theme}`, pictures, columns, width);
    }
  }
}
await browser.close();
