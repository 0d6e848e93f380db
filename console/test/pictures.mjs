// The pictures of docs/console.md, made of those that states.mjs leaves in build/console: with a palette, which makes them half as large.
//
//   node console/test/states.mjs && node console/test/pictures.mjs

import { readFileSync, writeFileSync } from "node:fs";
import { deflateSync, inflateSync } from "node:zlib";
import { chunk, join } from "./screen.mjs";

const FROM = new URL("../../build/console/", import.meta.url);
const TO = new URL("../../docs/pictures/", import.meta.url);

/** The pictures of the document, and the states that they show. */
const PICTURES = {
  overview: "overview",
  machines: "machines",
  machine: "machine-terminal",
  contents: "machine-contents-scanned",
  display: "machine-display",
  images: "images",
  image: "image",
  catalogs: "catalogs",
  catalog: "catalog",
  roll: "catalog-roll",
  tasks: "tasks",
  history: "history",
  server: "server",
};
const COLOURS_MAX = 256;

for (const [picture, state] of Object.entries(PICTURES)) {
  for (const [scheme, ending] of [["light", ""], ["dark", "-dark"]]) {
    for (const [width, narrow] of [[1280, ""], [390, "-narrow"]]) {
      const bytes = withPalette(readFileSync(new URL(`${state}-${scheme}-${width}.png`, FROM)));
      writeFileSync(new URL(`console-${picture}${narrow}${ending}.png`, TO), bytes);
    }
  }
}

/** The width, the height and the colours of a picture, line by line. */
function read(png) {
  let header;
  const data = [];
  for (let at = 8; at < png.length; ) {
    const length = png.readUInt32BE(at);
    const type = png.toString("latin1", at + 4, at + 8);
    const body = png.subarray(at + 8, at + 8 + length);
    if (type === "IHDR") header = body;
    if (type === "IDAT") data.push(body);
    at += 12 + length;
  }
  const [width, height, depth, kind, interlaced] = [header.readUInt32BE(0), header.readUInt32BE(4), header[8], header[9], header[12]];
  const channels = { 2: 3, 6: 4 }[kind];
  if (depth !== 8 || !channels || interlaced) throw new Error("this kind of PNG is not expected of the browser");
  const lines = inflateSync(Buffer.concat(data));
  const stride = width * channels;
  const colours = new Uint32Array(width * height);
  let above = new Uint8Array(stride);
  for (let y = 0; y < height; y += 1) {
    const filter = lines[y * (stride + 1)];
    const line = new Uint8Array(lines.subarray(y * (stride + 1) + 1, (y + 1) * (stride + 1)));
    for (let x = 0; x < stride; x += 1) {
      const left = x < channels ? 0 : line[x - channels];
      const corner = x < channels ? 0 : above[x - channels];
      line[x] += [0, left, above[x], (left + above[x]) >> 1, paeth(left, above[x], corner)][filter];
    }
    for (let x = 0; x < width; x += 1) colours[y * width + x] = (line[x * channels] << 16) | (line[x * channels + 1] << 8) | line[x * channels + 2];
    above = line;
  }
  return { width, height, colours };
}

function paeth(left, above, corner) {
  const guess = left + above - corner;
  const [a, b, c] = [Math.abs(guess - left), Math.abs(guess - above), Math.abs(guess - corner)];
  return a <= b && a <= c ? left : b <= c ? above : corner;
}

function distance(a, b) {
  return ((a >> 16) - (b >> 16)) ** 2 + (((a >> 8) & 255) - ((b >> 8) & 255)) ** 2 + ((a & 255) - (b & 255)) ** 2;
}

/** The same with the colours that are most frequent and not close to each other; each other colour becomes the nearest of these. */
function withPalette(png) {
  const { width, height, colours } = read(png);
  const counts = new Map();
  for (const colour of colours) counts.set(colour, (counts.get(colour) ?? 0) + 1);
  const byCount = [...counts.keys()].sort((a, b) => counts.get(b) - counts.get(a) || a - b);
  let palette = byCount;
  for (let apart = 4; palette.length > COLOURS_MAX; apart *= 1.4) {
    palette = [];
    for (const colour of byCount) if (palette.every((other) => distance(colour, other) >= apart)) palette.push(colour);
  }
  const places = new Map(palette.map((colour, at) => [colour, at]));
  const place = (colour) => {
    if (!places.has(colour)) places.set(colour, palette.reduce((best, other, at) => (distance(colour, other) < distance(colour, palette[best]) ? at : best), 0));
    return places.get(colour);
  };
  const lines = Buffer.alloc((width + 1) * height);
  for (let y = 0; y < height; y += 1) for (let x = 0; x < width; x += 1) lines[y * (width + 1) + 1 + x] = place(colours[y * width + x]);
  const header = Buffer.alloc(13);
  header.writeUInt32BE(width, 0);
  header.writeUInt32BE(height, 4);
  header.set([8, 3], 8);
  const table = Buffer.from(palette.flatMap((colour) => [colour >> 16, (colour >> 8) & 255, colour & 255]));
  return join([chunk("IHDR", header), chunk("PLTE", table), chunk("IDAT", deflateSync(lines, { level: 9 }))]);
}
