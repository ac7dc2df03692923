// Launches the browser named by the environment variable QKV_CHROMIUM, or the packaged argument, which does not need root.
import chromium from "@sparticuz/chromium";
import { chromium as playwright } from "playwright-core";

export async function launch() {
  const executable = process.env.QKV_CHROMIUM;
  return playwright.launch({
    executablePath: executable ?? (await chromium.executablePath()),
    // With --single-process, closing a tab would end the browser.
    args: executable ? [] : chromium.args.filter((argument) => argument !== "--single-process" && argument !== "--no-zygote"),
    headless: true,
  });
}
