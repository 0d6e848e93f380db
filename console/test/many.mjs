// The page with 10,000 machines: what it takes until the first figures, while it is scrolled, and of memory.
//
//   node console/test/many.mjs
//
// Times are printed, and not judged. Counts and memory are judged.

import { chromium } from "playwright-core";
import { many } from "./fixtures.mjs";
import { serve } from "./server.mjs";

const MACHINES = 10_000;
const HEAP_MAX_MIB = 80;
const FRAMES = 200;
/** More rows than this are never in the page. */
const ROWS_MAX = 120;

const server = await serve();
Object.assign(server.state, { answers: many(MACHINES), role: "admin" });
const browser = await chromium.launch({ executablePath: "/usr/bin/chromium", args: ["--no-sandbox"] });
const failures = [];
const figures = {};
const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, reducedMotion: "reduce" });
const page = await context.newPage();
page.on("pageerror", (error) => failures.push(`error in the page: ${error.message}`));
const protocol = await context.newCDPSession(page);
// The time that the page's thread has the processor: other programs do not change it.
await protocol.send("Performance.enable", { timeDomain: "threadTicks" });
const spent = async () => (await protocol.send("Performance.getMetrics")).metrics.find(({ name }) => name === "TaskDuration").value;

await page.goto(`${server.url}#ticket=test`);
await page.waitForSelector("main .figure");
figures["first figures, ms after the page was asked for"] = Math.round(await page.evaluate(() => performance.now()));
await page.waitForSelector(".states li");
figures["processor's time until then, ms"] = Math.round(1e3 * (await spent()));
figures["all machines, ms after the page was asked for"] = Math.round(await page.evaluate(() => performance.now()));

await page.evaluate(() => (location.hash = "#/machines"));
await page.waitForSelector("tr[data-machine]");
const lengths = [];
let mostRows = 0;
let before = await spent();
for (let frame = 0; frame < FRAMES; frame += 1) {
  const rows = await page.evaluate(async (frame) => {
    // A wheel that is turned fast, and jumps of the scroll bar.
    const at = frame % 20 === 19 ? ((frame * 7919) % 100) * (document.documentElement.scrollHeight / 100) : scrollY + 120;
    scrollTo(0, at);
    await new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)));
    return document.querySelectorAll("tr[data-machine]").length;
  }, frame);
  const now = await spent();
  lengths.push(1e3 * (now - before));
  before = now;
  mostRows = Math.max(mostRows, rows);
}
lengths.sort((a, b) => a - b);
const share = (part) => lengths[Math.min(FRAMES - 1, Math.floor(part * FRAMES))].toFixed(1);
figures["processor's time of a step of scrolling, ms: median"] = share(0.5);
figures["processor's time of a step of scrolling, ms: 95 of 100 (jumps)"] = share(0.95);
figures["processor's time of a step of scrolling, ms: longest"] = share(1);
figures["steps longer than 50 ms, of 200"] = lengths.filter((length) => length > 50).length;
figures["most rows in the page"] = mostRows;
if (mostRows > ROWS_MAX) failures.push(`${mostRows} rows are in the page, and at most ${ROWS_MAX} are wanted`);

// The last machine is there at the end.
await page.evaluate(() => scrollTo(0, document.documentElement.scrollHeight));
const end = `tr[data-machine="desk-${MACHINES}"]`;
await page.waitForSelector(end, { timeout: 5_000 }).catch(() => failures.push("the end of the list has not the last machine"));

// On a narrow screen too, where rows differ in height.
await page.setViewportSize({ width: 390, height: 844 });
await page.evaluate(() => scrollTo(0, document.documentElement.scrollHeight));
await page.waitForSelector(end, { timeout: 5_000 }).catch(() => failures.push("the end of the narrow list has not the last machine"));
await page.setViewportSize({ width: 1280, height: 900 });

// Tab goes on to rows that were not in the page.
await page.evaluate(() => scrollTo(0, 0));
await page.waitForSelector("tr[data-machine=desk-00001]");
await page.focus("tr[data-machine=desk-00001] a");
for (let key = 0; key < 120; key += 1) await page.keyboard.press("Tab");
const reached = await page.evaluate(() => document.activeElement.closest("tr")?.dataset.machine ?? "no row");
if (!(reached > "desk-00035")) failures.push(`120 times Tab leads to ${reached}`);

// The filter and the order work on all machines.
await page.evaluate(() => scrollTo(0, 0));
await page.getByRole("button", { name: "Requests/s" }).click();
await page.waitForFunction(() => document.querySelector("tr[data-machine] .right")?.textContent === "199");
await page.keyboard.press("/");
await page.keyboard.type("desk-0999");
await page.waitForFunction(() => document.querySelectorAll("tr[data-machine]").length === 10);
await page.keyboard.press("Escape");
await page.waitForFunction(() => document.querySelectorAll("tr[data-machine]").length > 10);

// After some rounds in which the figures were fetched again.
await page.waitForTimeout(20_000);
for (let round = 0; round < 3; round += 1) await protocol.send("HeapProfiler.collectGarbage");
const heap = (await protocol.send("Runtime.getHeapUsage")).usedSize / 2 ** 20;
figures["heap, MiB"] = Math.round(heap);
if (heap > HEAP_MAX_MIB) failures.push(`the heap has ${Math.round(heap)} MiB, and may have ${HEAP_MAX_MIB}`);

// One request waits for events; none while the tab is hidden.
figures["requests that wait for events"] = server.waiting();
if (server.waiting() !== 1) failures.push(`${server.waiting()} requests wait for events, not one`);
await page.evaluate(() => {
  Object.defineProperty(document, "hidden", { value: true, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
});
const hidden = [];
await page.waitForTimeout(1_000);
page.on("request", (request) => hidden.push(request.url()));
await page.waitForTimeout(12_000);
figures["requests that wait while the tab is hidden"] = server.waiting();
if (server.waiting() !== 0) failures.push(`${server.waiting()} requests wait while the tab is hidden`);
if (hidden.length > 0) failures.push(`a hidden tab asks for ${hidden[0]}, and ${hidden.length - 1} more`);

await browser.close();
server.close();
for (const [what, value] of Object.entries(figures)) console.log(`${String(value).padStart(8)}  ${what}`);
for (const failure of failures) console.error(failure);
process.exit(failures.length > 0 ? 1 : 0);
