// Figures and times as people read them.

import type { Change, Event } from "./types";

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(count: number): string {
  let value = count;
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  const digits = unit > 0 && value < 10 ? 1 : 0;
  return `${value.toFixed(digits)} ${UNITS[unit]}`;
}

export const number = (count: number) => count.toLocaleString("en-GB");

const two = (count: number) => String(count).padStart(2, "0");

/** The time of day. */
export function clock(ms: number): string {
  const at = new Date(ms);
  return `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

/** The day and the time; the day is left out if it is that of `now_ms`. */
export function time(ms: number, now_ms = Date.now()): string {
  const at = new Date(ms);
  if (at.toDateString() === new Date(now_ms).toDateString()) return clock(ms);
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${two(at.getHours())}:${two(at.getMinutes())}`;
}

/** The same in UTC and in full, for titles. */
export const utc = (ms: number) => new Date(ms).toISOString().replace("T", " ").replace(/\.\d+Z$/, " UTC");

export const seconds = (ms: number) => `${(ms / 1000).toFixed(ms < 10_000 ? 1 : 0)} s`;

const FACTORS: Record<string, number> = { "": 1, K: 2 ** 10, M: 2 ** 20, G: 2 ** 30, T: 2 ** 40 };

/** The bytes that `512M` or `10G` means, as on the command line. */
export function sizeOf(text: string): number | null {
  const [, digits, unit] = /^(\d+)([KMGT]?)$/.exec(text.trim().toUpperCase()) ?? [];
  return digits === undefined || unit === undefined ? null : Number(digits) * FACTORS[unit]!;
}

/** The shortest text that means so many bytes. */
export function sizeText(count: number): string {
  const unit = ["T", "G", "M", "K"].find((unit) => count > 0 && count % FACTORS[unit]! === 0) ?? "";
  return `${count / FACTORS[unit]!}${unit}`;
}

const SPANS: Record<string, number> = { "": 1, s: 1, m: 60, h: 3600, d: 86_400 };

/** The seconds that `45s`, `30m` or `2h` means, as on the command line. */
export function spanOf(text: string): number | null {
  const [, digits, unit] = /^(\d+)([smhd]?)$/.exec(text.trim()) ?? [];
  if (digits === undefined || unit === undefined) return null;
  const count = Number(digits) * SPANS[unit]!;
  return count > 0 && Number.isSafeInteger(count) ? count : null;
}

/** How long something took. */
export const duration = (ms: number) => (ms < 60_000 ? seconds(ms) : `${Math.floor(ms / 60_000)} min ${Math.round((ms % 60_000) / 1000)} s`);

/** A word of a shell. */
export const quoted = (word: string) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);

/** Something and its number: `1 machine`, `3 machines`. */
export const counted = (count: number, noun: string) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;

export const isOn = (state: string) => ["starting", "booting", "running", "stopping"].includes(state);

/** The image that `IMAGE:CHANNEL`, `IMAGE@NUMBER` or `IMAGE` names. */
export const imageOf = (reference: string) => reference.split(/[:@]/)[0] ?? reference;

/** A command line: options without a value, and words that are empty, are left out. */
export const commandLine = (...words: (string | false | null | undefined)[]) => ["headwater", ...words.filter(Boolean)].join(" ");

/** An option of a command line, if its value is not the default. */
export const option = (name: string, value: string | number, standard: string | number = "") =>
  String(value).trim() !== String(standard) && `--${name} ${quoted(String(value).trim())}`;

const isSize = (name: string) => name.endsWith("_bytes");

/** A value of a setting. */
function valueText(value: unknown, isSize: boolean): string {
  if (value === null || value === undefined || (Array.isArray(value) && value.length === 0)) return "none";
  if (isSize && typeof value === "number") return bytes(value);
  if (Array.isArray(value)) return value.map((item) => valueText(item, false)).join(" ");
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

/** What a change of settings changed: `ram 64 MiB -> 256 MiB, cpus 1 -> 2`. */
const changeText = ({ before, after }: Change) =>
  Object.keys(before)
    .map((name) => {
      const values = [before[name], after[name]].map((value) => valueText(value, isSize(name)));
      return `${name.replace(/_bytes$/, "").replaceAll("_", " ")} ${values.join(" -> ")}`;
    })
    .join(", ");

/** What happened, as `headwater events` says it. If the sentence does not say what a setting was before, the change does. */
export function eventText({ action, detail, change }: Event): string {
  const lacksBefore = action === "set" ? !detail.includes(" -> ") : detail === "" && action !== "revoked";
  return change && lacksBefore ? changeText(change) : detail;
}
