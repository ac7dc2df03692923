// Screenshots of the page: node shots.mjs ADDRESS FOLDER 'NAME#hash' …, each wide and narrow, light and dark.
// The environment variables SIZES and THEMES select some of them: SIZES=wide THEMES=light.
import { launch } from "./browser.mjs";

const [address, folder, ...specs] = process.argv.slice(2);
const SIZES = { wide: { width: 1440, height: 900 }, phone: { width: 390, height: 844 } };
const sizes = (process.env.SIZES ?? "wide phone").split(" ");
const themes = (process.env.THEMES ?? "light dark").split(" ");
const browser = await launch();
for (const size of sizes) {
  const context = await browser.newContext({ viewport: SIZES[size], colorScheme: "light" });
  const page = await context.newPage();
  page.on("console", (message) => ["error", "warning"].includes(message.type()) && console.log("CONSOLE", message.text()));
  page.on("pageerror", (error) => console.log("PAGEERROR", error.message));
  await page.goto(address);
  for (const theme of themes) {
    for (const spec of specs) {
      const [name, hash] = [spec.slice(0, spec.indexOf("#")), spec.slice(spec.indexOf("#") + 1)];
      await page.goto("about:blank");
      await page.goto(`${new URL(address).origin}/#${hash}&theme=${theme}`);
      await page.waitForSelector("#prediction", { timeout: 20_000 }).catch(() => console.log("no prediction", name));
      await page.waitForLoadState("networkidle");
      await page.waitForTimeout(250);
      await page.screenshot({ path: `${folder}/${name}-${size}-${theme}.png`, fullPage: size === "phone" });
    }
  }
  await context.close();
}
await browser.close();
