// The states of all screens, in light and dark, wide and narrow: no violation of WCAG 2.2 AA that axe finds, none of the policy of the
// page, no error, nothing that is wider than the screen. Pictures of all of them are left in build/console.
//
//   node console/test/states.mjs [NAME..]

import { mkdirSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { chromium } from "playwright-core";
import { NOW_MS, TERMINAL, contents, early, empty, full } from "./fixtures.mjs";
import { serve } from "./server.mjs";

const OUT = new URL("../../build/console/", import.meta.url);
const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"];
const SIZES = [
  { width: 1280, height: 900 },
  { width: 390, height: 844 },
];
const FAILED = { kind: "failed", message: "the database cannot be read", causes: ["disk I/O error"], advice: "look at the log of the daemon" };
const SEALED = { kind: "conflict", message: "cannot scan the write cache of machine 'class-01'", causes: ["the scan was ended: its disk was needed to make a version of it"], advice: "try again" };
const FILLS = "Cache";

/** A machine with a display. */
const DISPLAY = "#/machines/desk-1";

/** Each state: its name, the address, and what differs from a daemon with thirteen machines. */
const STATES = [
  { name: "signed-out", at: null },
  { name: "signed-out-login", at: null, answers: { ...full, login: { issuer: "https://login.example.com/realms/lab" } }, ready: "text=Log in at login.example.com" },
  { name: "overview", at: "#/" },
  { name: "overview-empty", at: "#/", answers: empty },
  { name: "overview-loading", at: "#/", silent: ["status"], ready: ".skeleton" },
  { name: "overview-failed", at: "#/", fail: { status: FAILED }, ready: ".note.bad" },
  { name: "overview-stale", at: "#/", gone: true },
  { name: "machines", at: "#/machines" },
  { name: "machines-empty", at: "#/machines", answers: empty },
  { name: "machines-none", at: "#/machines?q=nothing", ready: "q" },
  { name: "machines-odd-filter", at: "#/machines?q=state:odd", ready: "#filter-problem:not(.soft)" },
  { name: "machines-viewer", at: "#/machines", role: "viewer" },
  { name: "machines-stale", at: "#/machines", gone: true },
  { name: "machines-create", at: "#/machines", press: ["Create a machine"] },
  { name: "machines-stop-all", at: "#/machines?q=class", press: ["Stop 8"] },
  { name: "machine", at: "#/machines/class-04" },
  { name: "machine-crashed", at: "#/machines/desk-2" },
  { name: "machine-gone", at: "#/machines/nobody" },
  { name: "machine-console", at: "#/machines/class-01", press: ["Console"], shows: "pre" },
  { name: "machine-terminal", at: "#/machines/class-01", press: ["Console", "Attach"], shows: ".terminal .line" },
  { name: "machine-contents", at: "#/machines/class-01", press: [FILLS], shows: ".empty" },
  { name: "machine-contents-loading", at: "#/machines/class-01", silent: ["contents"], press: [FILLS, "Scan now"], shows: "[role=status]" },
  { name: "machine-contents-failed", at: "#/machines/class-01", fail: { contents: SEALED }, press: [FILLS, "Scan now"], shows: ".failure" },
  { name: "machine-contents-empty", at: "#/machines/class-01", answers: { ...full, contents: { ...contents, held: { ...contents.held, total_bytes: 0 } } }, press: [FILLS, "Scan now"], shows: ".empty h2" },
  { name: "machine-contents-scanned", at: "#/machines/class-01", press: [FILLS, "Scan now"], shows: "[data-tree]" },
  { name: "machine-contents-files", at: "#/machines/class-01", press: [FILLS, "Scan now", "By file"], shows: ".tree" },
  { name: "machine-picture", at: DISPLAY, press: ["Display"], shows: "canvas[role=img]" },
  { name: "machine-display", at: DISPLAY, press: ["Display", "Open the display"], shows: ".phase.open" },
  { name: "machine-display-refused", at: DISPLAY, fail: { display: SEALED }, press: ["Display", "Open the display"], shows: ".note.warn[role=alert]" },
  { name: "machine-display-lost", at: DISPLAY, refusal: "cannot connect to the display", press: ["Display", "Open the display"], shows: ".note.warn[role=alert]" },
  { name: "machine-viewer", at: "#/machines/class-01", role: "viewer" },
  { name: "machine-settings", at: "#/machines/class-01", press: ["Settings"] },
  { name: "machine-seal", at: "#/machines/class-01", press: ["Seal class-01"] },
  { name: "machine-reset", at: "#/machines/class-01", press: ["reset class-01"] },
  { name: "images", at: "#/images", ready: "[data-image]" },
  { name: "images-empty", at: "#/images", answers: empty, ready: ".empty" },
  { name: "images-loading", at: "#/images", silent: ["images"], ready: ".skeleton" },
  { name: "images-failed", at: "#/images", fail: { images: FAILED }, ready: ".failure" },
  { name: "images-import", at: "#/images", press: ["Import an image"] },
  { name: "image", at: "#/images/debian", ready: "[data-version]" },
  { name: "image-viewer", at: "#/images/debian", role: "viewer", ready: "[data-version]" },
  { name: "image-promote", at: "#/images/debian", press: ["Promote debian@4"] },
  { name: "image-seal", at: "#/images/debian", press: ["Seal debian"] },
  { name: "image-remove", at: "#/images/debian", press: ["Remove debian"] },
  { name: "catalogs", at: "#/catalogs", ready: "tbody" },
  { name: "catalogs-empty", at: "#/catalogs", answers: empty, ready: ".empty" },
  { name: "catalogs-create", at: "#/catalogs", press: ["Create a catalog"] },
  { name: "catalog", at: "#/catalogs/class", ready: "[data-advice]" },
  { name: "catalog-advice-early", at: "#/catalogs/class", answers: { ...full, advice: early }, ready: "[data-advice]" },
  { name: "catalog-advice-failed", at: "#/catalogs/class", fail: { advice: FAILED }, ready: ".failure" },
  { name: "catalog-roll", at: "#/catalogs/class", answers: { ...full, tasks: [] }, press: ["Roll"] },
  { name: "catalog-scale", at: "#/catalogs/class", answers: { ...full, tasks: [] }, press: ["Scale"] },
  { name: "tasks", at: "#/tasks", ready: "[data-task]" },
  { name: "tasks-empty", at: "#/tasks", answers: empty },
  { name: "tasks-failed", at: "#/tasks", answers: empty, fail: { tasks: FAILED }, ready: ".failure, .note.bad" },
  { name: "history", at: "#/history", ready: "text=cpus 1 -> 2, ram 64 MiB -> 256 MiB, pin none -> debian@3" },
  { name: "history-empty", at: "#/history?q=machine%20nobody", ready: ".empty" },
  { name: "server", at: "#/server", ready: "[data-token]" },
  { name: "server-empty", at: "#/server", answers: empty, ready: ".empty" },
  { name: "server-viewer", at: "#/server", role: "viewer", ready: ".daemon" },
  { name: "server-tokens-failed", at: "#/server", fail: { tokens: FAILED }, ready: ".failure" },
  { name: "server-token-create", at: "#/server", ready: "[data-token]", press: ["Make a token"] },
];

const wanted = process.argv.slice(2);
const states = STATES.filter(({ name }) => wanted.length === 0 || wanted.some((word) => name.startsWith(word)));
mkdirSync(OUT, { recursive: true });
const server = await serve();
const browser = await chromium.launch({ executablePath: "/usr/bin/chromium", args: ["--no-sandbox"] });
const failures = [];
let looked = 0;

for (const size of SIZES) {
  for (const colorScheme of ["light", "dark"]) {
    const context = await browser.newContext({ viewport: size, colorScheme, reducedMotion: "reduce", timezoneId: "UTC", locale: "en-GB" });
    for (const state of states) {
      const found = await look(context, state).catch((error) => [String(error)]);
      const where = `${state.name}-${colorScheme}-${size.width}`;
      failures.push(...found.map((text) => `${where}: ${text}`));
      looked += 1;
    }
    await context.close();
  }
}
if (wanted.length === 0 || wanted.includes("keyboard")) {
  const context = await browser.newContext({ viewport: SIZES[0], reducedMotion: "reduce" });
  failures.push(...(await keyboard(context).catch((error) => [String(error)])).map((text) => `keyboard: ${text}`));
  looked += 1;
  await context.close();
}
if (wanted.length === 0 || wanted.includes("theme")) {
  for (const colorScheme of ["light", "dark"]) {
    const context = await browser.newContext({ viewport: SIZES[0], colorScheme, reducedMotion: "reduce" });
    failures.push(...(await themes(context, colorScheme).catch((error) => [String(error)])).map((text) => `theme: ${text}`));
    looked += 1;
    await context.close();
  }
}
if (wanted.length === 0 || wanted.includes("display")) {
  const context = await browser.newContext({ viewport: SIZES[0], reducedMotion: "reduce", permissions: ["clipboard-read", "clipboard-write"] });
  failures.push(...(await displays(context).catch((error) => [String(error)])).map((text) => `display: ${text}`));
  looked += 1;
  await context.close();
}
await browser.close();
server.close();
for (const failure of failures) console.error(failure);
console.log(`${looked} states of screens, ${failures.length} failures`);
process.exit(failures.length > 0 ? 1 : 0);

/** Shows a state, and gives what is wrong with it. */
async function look(context, { name, at, answers = full, role = "admin", fail = {}, silent = [], gone = false, refusal = null, press = [], ready = "main", shows = "dialog[open]" }) {
  Object.assign(server.state, { answers, role, fail, silent: new Set(silent), isGone: false, refusal });
  const page = await context.newPage();
  const found = [];
  try {
    page.on("pageerror", (error) => found.push(`error in the page: ${error.message}`));
    await page.clock.setSystemTime(NOW_MS);
    await page.addInitScript(() => {
      window.violations = [];
      document.addEventListener("securitypolicyviolation", (e) => window.violations.push(`${e.violatedDirective} ${e.blockedURI}`));
    });
    // noVNC takes no stand-in of a WebSocket, which this makes of all of them.
    if (press.includes("Attach")) await page.routeWebSocket(/\/console$/, (socket) => socket.send(Buffer.from(TERMINAL)));
    await page.goto(at === null ? server.url : `${server.url}#ticket=test`);
    if (at !== null) {
      if (!silent.includes("status") && !fail.status) await page.waitForSelector("main h1");
      await page.evaluate((at) => (location.hash = at), at);
    }
    await page.waitForSelector(ready);
    if (gone) {
      server.state.isGone = true;
      server.hangUp();
      await page.waitForSelector(".banner", { timeout: 30_000 });
    }
    for (const label of press) await page.getByRole("button", { name: label, exact: true }).click();
    if (press.length > 0) await page.waitForSelector(shows);
    await page.waitForTimeout(60);
    const scheme = await page.evaluate(() => (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
    const { width } = page.viewportSize();
    await page.screenshot({ path: new URL(`${name}-${scheme}-${width}.png`, OUT).pathname });
    // What the bar at the top covers a part of, because the focus is further down, would look small to axe.
    await page.evaluate(() => scrollTo(0, 0));
    found.push(...(await problems(page)));
  } finally {
    await page.close();
  }
  return found;
}

/** Works on a screen without a mouse. */
async function keyboard(context) {
  Object.assign(server.state, { answers: full, role: "admin", fail: {}, silent: new Set(), isGone: false });
  const page = await context.newPage();
  const found = [];
  const focus = () => page.evaluate(() => document.activeElement?.getAttribute("aria-label") ?? document.activeElement?.textContent?.trim() ?? "");
  const expect = async (what, wanted) => {
    const has = await focus();
    if (has !== wanted) found.push(`${what}: the focus is at ${JSON.stringify(has)}, not at ${JSON.stringify(wanted)}`);
  };
  await page.goto(`${server.url}#ticket=test`);
  await page.waitForSelector("main h1");
  await page.keyboard.press("Tab");
  await expect("the first key", "To the content");
  await page.evaluate(() => (location.hash = "#/machines"));
  await page.waitForSelector("tr[data-machine]");
  await page.keyboard.press("/");
  if (!(await page.evaluate(() => document.activeElement.id === "filter"))) found.push("/ does not lead to the filter");
  await page.keyboard.type("class");
  await page.waitForFunction(() => document.querySelectorAll("tr[data-machine]").length === 8);
  await page.keyboard.press("Escape");
  await page.waitForFunction(() => document.querySelectorAll("tr[data-machine]").length > 8);
  // Tab reaches all that can be used, in the order of the page, and leaves it again.
  const controls = await page.evaluate(() => [...document.querySelectorAll("a[href], button:not(:disabled), input, select")].length);
  const reached = new Set();
  await page.evaluate(() => document.activeElement.blur());
  for (let at = 0; at < controls + 20; at += 1) {
    await page.keyboard.press("Tab");
    const mark = await page.evaluate(() => {
      const element = document.activeElement;
      if (element === document.body) return null;
      return (element.dataset.mark ??= String(document.querySelectorAll("[data-mark]").length));
    });
    if (mark !== null) reached.add(mark);
  }
  if (reached.size < controls) found.push(`Tab reaches ${reached.size} of ${controls} controls`);
  // A question has its focus at Cancel; Escape closes it, and the focus is where it was.
  await page.focus("button[aria-label='stop class-01']");
  await page.keyboard.press("Enter");
  await page.waitForSelector("dialog[open]");
  await expect("a question", "Cancel");
  await page.keyboard.press("Escape");
  await page.waitForSelector("dialog", { state: "detached" });
  await expect("a question that was closed", "stop class-01");
  return found;
}

/** Chooses each theme by keyboard. It is kept when the page is loaded again, and in other tabs, without a cookie. */
async function themes(context, system) {
  Object.assign(server.state, { answers: full, role: "admin", fail: {}, silent: new Set(), isGone: false });
  const found = [];
  const open = async () => {
    const page = await context.newPage();
    await page.goto(`${server.url}#ticket=test`);
    await page.waitForSelector("main h1");
    return page;
  };
  const shown = (page) => page.evaluate(() => (getComputedStyle(document.body).backgroundColor === "rgb(16, 22, 26)" ? "dark" : "light"));
  const expect = async (page, what, wanted) => {
    const has = await shown(page);
    if (has !== wanted) found.push(`${what}, where the system is ${system}: the page is ${has}, not ${wanted}`);
  };
  const page = await open();
  const other = await open();
  await expect(page, "without a choice", system);
  await page.bringToFront();
  await page.focus("select[aria-label=Theme]");
  for (const theme of ["light", "dark"]) {
    await page.keyboard.press("ArrowDown");
    await expect(page, theme, theme);
    await other.waitForFunction((theme) => document.documentElement.dataset.theme === theme, theme);
    await expect(other, `${theme} in another tab`, theme);
    const again = await open();
    await expect(again, `${theme} after a load`, theme);
    found.push(...(await problems(again, false)));
    await again.close();
    await page.bringToFront();
  }
  await page.keyboard.press("Home");
  await expect(page, "system", system);
  const left = await page.evaluate(() => document.cookie + Object.keys(localStorage) + Object.keys(sessionStorage));
  if (left !== "") found.push(`the browser keeps ${left} for the system's theme`);
  return found;
}

/** Opens a display, types, presses Ctrl+Alt+Del, pastes, and leaves by keyboard. */
async function displays(context) {
  Object.assign(server.state, { answers: full, role: "admin", fail: {}, silent: new Set(), isGone: false });
  const page = await context.newPage();
  const [found, keys] = [[], []];
  const press = (name) => page.getByRole("button", { name, exact: true }).click();
  const expect = async (what, wanted) => {
    for (let tries = 0; tries < 100 && keys.length < wanted.length; tries += 1) await page.waitForTimeout(20);
    if (String(keys) !== String(wanted)) found.push(`${what}: the keys are ${keys}, not ${wanted}`);
    keys.length = 0;
  };
  page.on("pageerror", (error) => found.push(`error in the page: ${error.message}`));
  Object.assign(server.state, { keys, refusal: null });
  await page.goto(`${server.url}#ticket=test`);
  await page.waitForSelector("main h1");
  await page.evaluate((at) => (location.hash = at), DISPLAY);
  const loaded = () => page.evaluate(() => performance.getEntriesByType("resource").some(({ name }) => name.endsWith("/display.js")));
  await press("Display");
  await page.waitForSelector("canvas[role=img]");
  if (await loaded()) found.push("display.js is loaded before a display is opened");
  await press("Open the display");
  await page.waitForSelector(".phase.open");
  // The picture is that of the server, pixel by pixel.
  await page.waitForFunction(() => {
    const canvas = document.querySelector(".display canvas");
    const [red, green, blue] = canvas.getContext("2d").getImageData(200, 70, 1, 1).data;
    return canvas.width === 640 && red === 11 && green === 110 && blue === 143;
  });
  await page.keyboard.type("a");
  await expect("a key", [0x61]);
  await press("Ctrl+Alt+Del");
  await expect("Ctrl+Alt+Del", [0xffe3, 0xffe9, 0xffff]);
  await page.evaluate(() => navigator.clipboard.writeText("Hi!\n"));
  await press("Type the clipboard");
  await expect("the clipboard", [0xffe1, 0x48, 0x69, 0xffe1, 0x21, 0xff0d]);
  await page.evaluate(() => navigator.clipboard.writeText("na\u00efve"));
  await press("Type the clipboard");
  await page.waitForSelector("text=the keyboard has no key for");
  await expect("a text that the keyboard does not have", []);
  await page.keyboard.press("Control+]");
  const focus = await page.evaluate(() => document.activeElement.textContent.trim());
  if (focus !== "Close the display") found.push(`Ctrl+] leads to ${JSON.stringify(focus)}`);
  await page.keyboard.press("Enter");
  await page.waitForSelector("canvas[role=img]");
  return found;
}

async function problems(page, hasPolicy = true) {
  const found = [];
  // Through the protocol, which the policy of the page does not concern.
  await page.evaluate(AXE);
  const { violations } = await page.evaluate((tags) => window.axe.run(document, { runOnly: tags, resultTypes: ["violations"] }), TAGS);
  for (const { id, nodes } of violations) {
    const [{ target, failureSummary }] = nodes;
    found.push(`${id} at ${target.join(" ")}, ${nodes.length} in all: ${failureSummary.replaceAll("\n", " ")}`);
  }
  if (hasPolicy) found.push(...(await page.evaluate(() => window.violations)).map((text) => `policy of the page: ${text}`));
  const wider = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  if (wider > 0) found.push(`the page is ${wider} pixels wider than the screen`);
  return found;
}
