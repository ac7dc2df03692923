// A browser without root: the one named by QKV_CHROMIUM, or the packaged one.
import chromium from "@sparticuz/chromium";
import { chromium as playwright } from "playwright-core";

export async function launch() {
  const own = process.env.QKV_CHROMIUM;
  return playwright.launch({
    executablePath: own ?? (await chromium.executablePath()),
    // One process for all would end with the first tab that closes.
    args: own ? [] : chromium.args.filter((one) => one !== "--single-process" && one !== "--no-zygote"),
    headless: true,
  });
}
