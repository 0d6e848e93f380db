// A display for the tests of the page: a picture, as PNG and as a VNC server (RFB 3.8) sends it.

import { createHash } from "node:crypto";
import { crc32, deflateSync } from "node:zlib";

export const WIDTH = 640;
export const HEIGHT = 400;

/** The colour of a pixel: a desktop with a window and a bar. */
function colour(x, y) {
  if (y >= HEIGHT - 28) return [24, 32, 38];
  if (x > 120 && x < 520 && y > 60 && y < 320) return y < 86 ? [11, 110, 143] : [244, 246, 247];
  return [30 + (x >> 4), 60 + (y >> 3), 110];
}

/** All pixels, in lines from the top. */
function pixels(bytes) {
  const lines = [];
  for (let y = 0; y < HEIGHT; y += 1) {
    const line = Buffer.alloc(WIDTH * bytes);
    for (let x = 0; x < WIDTH; x += 1) line.set(colour(x, y), x * bytes);
    lines.push(line);
  }
  return lines;
}

/** A part of a PNG. */
export function chunk(type, data) {
  const body = Buffer.concat([Buffer.from(type, "latin1"), data]);
  const [length, sum] = [Buffer.alloc(4), Buffer.alloc(4)];
  length.writeUInt32BE(data.length);
  sum.writeUInt32BE(crc32(body));
  return Buffer.concat([length, body, sum]);
}

/** A PNG of its parts. */
export const join = (parts) => Buffer.concat([Buffer.from("\x89PNG\r\n\x1a\n", "latin1"), ...parts, chunk("IEND", Buffer.alloc(0))]);

export function png() {
  const header = Buffer.alloc(13);
  header.writeUInt32BE(WIDTH, 0);
  header.writeUInt32BE(HEIGHT, 4);
  header.set([8, 2], 8);
  const lines = pixels(3).flatMap((line) => [Buffer.from([0]), line]);
  return join([chunk("IHDR", header), chunk("IDAT", deflateSync(Buffer.concat(lines)))]);
}

/**
 * Makes a connection a WebSocket: messages of less than 64 KiB, each in one frame. noVNC takes no stand-in of a WebSocket, as Playwright has
 * one.
 */
function webSocket(request, socket, onMessage) {
  const sum = createHash("sha1").update(`${request.headers["sec-websocket-key"]}258EAFA5-E914-47DA-95CA-C5AB0DC85B11`).digest("base64");
  const [protocol] = request.headers["sec-websocket-protocol"].split(",");
  socket.write(`HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-accept: ${sum}\r\nsec-websocket-protocol: ${protocol}\r\n\r\n`);
  const frame = (kind, bytes) => {
    const length = bytes.length < 126 ? [bytes.length] : [126, bytes.length >> 8, bytes.length & 255];
    socket.write(Buffer.concat([Buffer.from([0x80 | kind, ...length]), bytes]));
  };
  let rest = Buffer.alloc(0);
  socket.on("data", (data) => {
    rest = Buffer.concat([rest, data]);
    while (rest.length >= 6) {
      const isLong = (rest[1] & 127) === 126;
      const length = isLong ? rest.readUInt16BE(2) : rest[1] & 127;
      const at = isLong ? 8 : 6;
      if (rest.length < at + length) return;
      const mask = rest.subarray(at - 4, at);
      const message = Buffer.from(rest.subarray(at, at + length).map((byte, n) => byte ^ mask[n & 3]));
      if ((rest[0] & 15) === 8) return void socket.end();
      rest = rest.subarray(at + length);
      onMessage(message);
    }
  });
  socket.on("error", () => socket.destroy());
  const close = (code, reason) => {
    frame(8, Buffer.concat([Buffer.from([code >> 8, code & 255]), Buffer.from(reason)]));
    socket.end();
  };
  return { send: (bytes) => frame(2, Buffer.from(bytes)), close };
}

/** Serves the picture on a WebSocket, and notes the keys that are pressed; or refuses it as the daemon does. */
export function display(request, socket, { keys, refusal }) {
  const steps = [
    // The version of the protocol; security: none; the result; what is served.
    () => page.send([1, 1]),
    () => page.send([0, 0, 0, 0]),
    () => {
      const size = [WIDTH >> 8, WIDTH & 255, HEIGHT >> 8, HEIGHT & 255];
      const format = [32, 24, 0, 1, 0, 255, 0, 255, 0, 255, 0, 8, 16, 0, 0, 0];
      page.send([...size, ...format, 0, 0, 0, 4, ...Buffer.from("test")]);
      page.send([0, 0, 0, 1, 0, 0, 0, 0, ...size, 0, 0, 0, 0]);
      for (const line of pixels(4)) page.send(line);
    },
  ];
  const page = webSocket(request, socket, (message) => {
    const step = steps.shift();
    if (step) return step();
    // A key: its type, whether it is down, two bytes, and which.
    if (message[0] === 4 && message.length === 8 && message[1] === 1) keys.push(message.readUInt32BE(4));
  });
  if (refusal) page.close(4000, refusal);
  else page.send(Buffer.from("RFB 003.008\n"));
}
