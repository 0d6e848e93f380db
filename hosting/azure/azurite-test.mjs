// Uploads a fixed VHD to Azurite, Microsoft's emulator of blob storage: in one run, and interrupted and continued.
// Another program downloads the blob, and qemu-img compares it with the disk.
//
//   node azurite-test.mjs AZURITE_DIR UPLOAD_VHD

import { execFileSync, spawn, spawnSync } from "node:child_process";
import { createHmac, randomBytes } from "node:crypto";
import { mkdtempSync, openSync, readFileSync, rmSync, writeFileSync, writeSync, closeSync, ftruncateSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const [azurite, uploader] = process.argv.slice(2);
const dir = mkdtempSync(join(tmpdir(), "headwater-azurite-"));
const account = "headwater";
const key = randomBytes(64).toString("base64");
const MIB = 1 << 20;

function check(holds, what) {
  if (!holds) throw new Error(what);
}

// An account SAS: Microsoft's "Create an account SAS".
function signature(permissions, expiry) {
  const version = "2021-12-02";
  const fields = [account, permissions, "b", "sco", "", expiry, "", "https,http", version, "", ""];
  const sig = createHmac("sha256", Buffer.from(key, "base64")).update(fields.join("\n")).digest("base64");
  return new URLSearchParams({ sv: version, ss: "b", srt: "sco", sp: permissions, se: expiry, spr: "https,http", sig }).toString();
}

const instant = (seconds) => new Date(Date.now() + seconds * 1000).toISOString().slice(0, 19) + "Z";

const server = spawn(
  process.execPath,
  [join(azurite, "node_modules/azurite/dist/src/blob/main.js"), "--blobHost", "127.0.0.1", "--blobPort", "0", "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"],
  { env: { ...process.env, AZURITE_ACCOUNTS: `${account}:${key}` }, stdio: ["ignore", "pipe", "inherit"] },
);

// The rest of its output is read and discarded, because Azurite ends if the pipe is closed.
function address() {
  return new Promise((found, failed) => {
    let text = "";
    server.stdout.on("data", (piece) => {
      text = (text + piece).slice(-4096);
      const line = text.match(/listens on (http:\/\/127\.0\.0\.1:\d+)/);
      if (line) found(line[1]);
    });
    server.on("exit", () => failed(new Error(`Azurite has ended: ${text}`)));
  });
}

function writeDisk(path) {
  const file = openSync(path, "w");
  ftruncateSync(file, 4096 * MIB);
  // 4 MiB that begin at an unaligned page, single pages, and the last page.
  const parts = [[512, 4 * MIB], [100 * MIB, 512], [100 * MIB + 64 * 1024, 1024], [3000 * MIB, 9 * MIB + 512], [4096 * MIB - 512, 512]];
  for (const [at, length] of parts) writeSync(file, randomBytes(length), 0, length, at);
  closeSync(file);
  return parts.reduce((sum, [, length]) => sum + length, 0);
}

function upload(vhd, url, stopAfter) {
  const urlFile = join(dir, "url");
  writeFileSync(urlFile, url, { mode: 0o600 });
  return spawnSync(uploader, [vhd, urlFile, ...(stopAfter ? [String(stopAfter)] : [])], { encoding: "utf8" });
}

async function readBack(base, sas, to, length) {
  const list = await (await fetch(`${base}?${sas}&comp=pagelist`, { headers: { "x-ms-version": "2021-12-02" } })).text();
  const file = openSync(to, "w");
  ftruncateSync(file, length);
  for (const [, start, end] of list.matchAll(/<PageRange><Start>(\d+)<\/Start><End>(\d+)<\/End>/g)) {
    const answer = await fetch(`${base}?${sas}`, { headers: { "x-ms-version": "2021-12-02", "x-ms-range": `bytes=${start}-${end}` } });
    check(answer.status === 206, `reading ${start} to ${end}: ${answer.status}`);
    const bytes = Buffer.from(await answer.arrayBuffer());
    writeSync(file, bytes, 0, bytes.length, Number(start));
  }
  closeSync(file);
}

try {
  const origin = `${await address()}/${account}`;
  const sas = signature("rwcl", instant(3600));
  const made = await fetch(`${origin}/disks?restype=container&${sas}`, { method: "PUT", headers: { "x-ms-version": "2021-12-02" } });
  check(made.status === 201, `making a container: ${made.status} ${await made.text()}`);
  const raw = join(dir, "disk.raw");
  const vhd = join(dir, "disk.vhd");
  const back = join(dir, "back.vhd");
  const dataBytes = writeDisk(raw);
  execFileSync("qemu-img", ["convert", "-f", "raw", "-O", "vpc", "-o", "subformat=fixed,force_size=on", raw, vhd]);
  const length = 4096 * MIB + 512;

  for (const [name, stops] of [["whole", []], ["cut", [4 * MIB, 3004 * MIB]]]) {
    const base = `${origin}/disks/${name}.vhd`;
    for (const stop of stops) {
      const cut = upload(vhd, `${base}?${sas}`, stop);
      check(cut.status === 9, `${name}: the upload was not cut off: ${cut.status} ${cut.stderr}`);
    }
    const done = upload(vhd, `${base}?${sas}`);
    check(done.status === 0, `${name}: ${done.stderr}`);
    const [sent, kept, cleared, stored] = done.stdout.match(/\d+/g).map(Number);
    console.log(`${name}: ${done.stdout.trim()}`);
    check(cleared === 0 && (stops.length > 0) === (kept > 0), `${name}: another part was kept`);
    // Slightly more than the data, because short gaps are sent too.
    check(stored >= dataBytes + 512 && stored <= dataBytes + 512 + 70 * 1024, `${name}: ${stored} bytes are stored`);
    await readBack(base, sas, back, length);
    execFileSync("qemu-img", ["compare", "-f", "raw", "-F", "vpc", raw, back], { stdio: "inherit" });
    const again = upload(vhd, `${base}?${sas}`);
    check(/^sent 0 /.test(again.stdout), `${name}: a second upload has sent something: ${again.stdout}`);
  }

  const late = upload(vhd, `${origin}/disks/late.vhd?${signature("rwcl", instant(-60))}`);
  check(late.status === 1 && /refuses the signature/.test(late.stderr) && !/sig=/.test(late.stderr), `an expired signature: ${late.stderr}`);
  console.log("1 emulator, 0 failed");
} finally {
  server.kill();
  rmSync(dir, { recursive: true });
}
