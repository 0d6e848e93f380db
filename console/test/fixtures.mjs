// @ts-check
// What a daemon with thirteen machines answers. The types are those of docs/openapi.json.

/** @typedef {import("../src/generated").Machine} Machine */
/** @typedef {import("../src/generated").Task} Task */

/** The time of all tests. */
export const NOW_MS = Date.UTC(2026, 10, 29, 9, 30, 0);
const MINUTE = 60_000;
const MiB = 2 ** 20;
const GiB = 2 ** 30;

/** @param {number} minutes */
const ago = (minutes) => NOW_MS - minutes * MINUTE;

/** @type {import("../src/generated").Alarm} */
const ALARM = {
  subject: "machine class-04",
  since_ms: ago(7),
  message: "its write cache has no space left on the disk: writes wait",
  advice: "give it more with 'headwater machine set class-04 --disk 20G', or stop what fills it",
};

/**
 * @param {string} name
 * @param {Partial<Machine> & {written_mib?: number, iops?: number}} more
 * @returns {Machine}
 */
function machine(name, { written_mib, iops = 0, ...more }) {
  const written = (written_mib ?? 0) * MiB;
  const ram = Math.min(written, more.cache?.mode === "disk" ? 16 * MiB : 58 * MiB);
  return {
    name,
    uuid: "00000000-0000-4000-8000-000000000001",
    mac: "52:54:00:12:34:56",
    boot: "vm",
    image: "debian",
    version: "debian@4",
    next_version: "debian@4",
    old: false,
    cache: { mode: "ram+disk", ram_bytes: 64 * MiB, disk_bytes: 10 * GiB, persistent: false, weight: 100 },
    transport: "vhost-user",
    memory_bytes: 2 * GiB,
    cpus: 2,
    firmware: "uefi",
    display: "vnc",
    network: "user",
    wanted: written_mib === undefined ? "stopped" : "running",
    state: written_mib === undefined ? "stopped" : "running",
    created_at_ms: ago(9000),
    started_at_ms: ago(95),
    boot_ms: 11_400,
    identity: { host_name: name, machine_id: "0".repeat(32), ssh_host_key_public: "ssh-ed25519 AAAA" },
    ...(written_mib !== undefined && {
      disk: {
        reads: 48_211,
        writes: 19_876,
        read_bytes: 912 * MiB,
        written_bytes: 3 * written,
        image_read_bytes: 388 * MiB,
        live_bytes: written,
        ram_used_bytes: ram,
        disk_used_bytes: written - ram,
        spilled_bytes: written - ram,
        pauses: more.alarm ? 214 : 0,
        iops,
        to_copy_bytes: 0,
        copied_bytes: 0,
      },
    }),
    ...more,
  };
}

/** @type {Machine[]} */
const MACHINES = [
  machine("build", { image: "builder@2", version: "builder@2", written_mib: 6_900, iops: 1_480, cache: { mode: "disk", ram_bytes: 16 * MiB, disk_bytes: 20 * GiB, persistent: true, weight: 200 }, kept: "builder@2", pin: "builder@2" }),
  ...Array.from({ length: 8 }, (_, at) =>
    machine(`class-0${at + 1}`, {
      catalog: "class",
      written_mib: [210, 340, 96, 10_180, 61, 480, 38, 120][at] ?? 0,
      iops: [12, 140, 3, 812, 0, 96, 1, 44][at] ?? 0,
      ...(at === 3 && { alarm: ALARM }),
      ...(at > 4 && { version: "debian@3", old: true }),
      ...(at === 7 && { state: "booting" }),
    }),
  ),
  machine("desk-1", { written_mib: 900, iops: 31 }),
  machine("desk-2", { state: "crashed", reason: "QEMU ended by signal 9: the host's memory was full, and the kernel ended it" }),
  machine("golden", { image: "debian", edits: "debian@4", written_mib: 240, iops: 9 }),
  machine("pc-7", { boot: "network", image: "windows", version: "windows@1", next_version: "windows@1", mac: "3c:ec:ef:00:10:07", firmware: "uefi", display: "none" }),
];

/** @type {import("../src/generated").Status} */
const STATUS = {
  version: "0.1.0",
  pid: 4711,
  data_dir: "/var/lib/headwater",
  started_at_ms: ago(5_900),
  api_url: "https://host-3.example:9470/",
  console_url: "http://127.0.0.1:9471/",
  fingerprint: `sha256:${"4f".repeat(32)}`,
  images: 3,
  store_bytes: 9.4 * GiB,
  store_age_ms: 400,
  store_read_only: false,
  store_outdated: false,
  machines: MACHINES.length,
  machines_active: 11,
  tasks_running: 1,
  tasks_waiting: 1,
  alarms: [ALARM],
  ram_used_bytes: 620 * MiB,
  host_ram: { configured_bytes: 4 * GiB, limit_bytes: 3 * GiB, used_bytes: 1.1 * GiB, pressure_shrinks: 2 },
  disk_used_bytes: 19.1 * GiB,
  free_bytes: 402 * GiB,
  hypervisor: "KVM",
};

/**
 * @param {string} image
 * @param {number} number
 * @param {Partial<import("../src/generated").ImageVersion>} more
 * @returns {import("../src/generated").ImageVersion}
 */
const version = (image, number, more) => ({
  image,
  number,
  hash: `${number}`.repeat(64),
  size_bytes: 20 * GiB,
  stored_bytes: 180 * MiB,
  created_at_ms: ago(60 * 24 * (10 - number)),
  author: "uid 1000 (anna)",
  source: `/srv/images/${image}.qcow2`,
  ...more,
});

/** @type {import("../src/generated").ImageList} */
const IMAGES = {
  images: [
    {
      name: "builder",
      versions: [version("builder", 1, { retired: true, note: "first try" }), version("builder", 2, { note: "with the compilers of November" })],
    },
    {
      name: "debian",
      versions: [
        version("debian", 1, { stored_bytes: 1.4 * GiB, note: "as it came" }),
        version("debian", 2, { note: "time servers of the school" }),
        version("debian", 3, { channels: ["production"], note: "printers" }),
        version("debian", 4, { channels: ["test"], note: "security updates", source: "machine golden over debian@3", keeps_identity: true }),
      ],
      pointers: [
        { channel: "production", version: 3, at_ms: ago(3_000), author: "uid 1000 (anna)" },
        { channel: "test", version: 4, at_ms: ago(800), author: "uid 1000 (anna)" },
      ],
      scheduled: [{ channel: "production", version: 4, at_ms: NOW_MS + 600 * MINUTE, author: "uid 1000 (anna)" }],
      edit: { image: "debian", machine: "golden", version: 4, author: "uid 1000 (anna)", since_ms: ago(55) },
    },
    { name: "windows", versions: [version("windows", 1, { size_bytes: 64 * GiB, stored_bytes: 7.2 * GiB, source: "/srv/images/win11.vhdx" })] },
  ],
};

/** @type {import("../src/generated").Catalog} */
const CATALOG = {
  name: "class",
  image: "debian",
  name_rule: "class-##",
  first_number: 1,
  machines: Array.from({ length: 8 }, (_, at) => `class-0${at + 1}`),
  old: ["class-06", "class-07", "class-08"],
  next_version: "debian@4",
  scheme: 1,
  memory_bytes: 2 * GiB,
  cpus: 2,
  cache: { mode: "ram+disk", ram_bytes: 64 * MiB, disk_bytes: 10 * GiB, persistent: false, weight: 100 },
  transport: "vhost-user",
  display: "vnc",
  firmware: "uefi",
  network: "user",
  created_at_ms: ago(9_000),
};

/** @type {Task[]} */
const TASKS = [
  { id: 31, kind: "verify", subject: "image windows", caller: "token nightly", state: "waiting", cancelling: false, created_at_ms: ago(1) },
  { id: 30, kind: "roll", subject: "catalog class", caller: "console of uid 1000 (anna)", state: "running", cancelling: false, created_at_ms: ago(4), started_at_ms: ago(4), progress: { done_bytes: 0, total_bytes: 0, doing: "5 of 8 machines on debian@4" } },
  { id: 29, kind: "import", subject: "image debian", caller: "uid 1000 (anna)", state: "done", cancelling: false, created_at_ms: ago(800), started_at_ms: ago(800), ended_at_ms: ago(799), result: { kind: "imported", created: true, version: version("debian", 4, {}), remarks: ["its sectors have 512 bytes"] } },
  { id: 28, kind: "scale", subject: "catalog class", caller: "uid 1000 (anna)", state: "cancelled", cancelling: false, created_at_ms: ago(900), started_at_ms: ago(900), ended_at_ms: ago(899), problem: { kind: "cancelled", message: "it was cancelled after 8 of 20 machines" } },
  { id: 27, kind: "import", subject: "image windows", caller: "uid 1000 (anna)", state: "failed", cancelling: false, created_at_ms: ago(1_400), started_at_ms: ago(1_400), ended_at_ms: ago(1_398), problem: { kind: "not_found", message: "cannot open /srv/images/win11.vhd", causes: ["there is no such file"], advice: "check the path: it is one of the server" } },
];

/** @type {[string, string, string, string][]} */
/** @type {[string, string, string, string, import("../src/generated").Change?][]} */
const HAPPENED = [
  ["console of uid 1000 (anna)", "catalog class", "roll", "to debian@4, 1 canary, then 10%"],
  ["daemon", "machine class-04", "alarm", "its write cache has no space left on the disk"],
  ["uid 1000 (anna)", "image debian", "edit", "by machine golden over debian@4"],
  ["daemon", "machine desk-2", "state", "crashed: QEMU ended by signal 9"],
  ["token nightly", "image windows", "verify", "asked for"],
  ["uid 1000 (anna)", "image debian", "promoted", "production to debian@3"],
  ["uid 1000 (anna)", "machine desk-1", "start", ""],
  ["uid 1000 (anna)", "token nightly", "created", "operator"],
  ["uid 1000 (anna)", "machine desk-1", "set", "", { before: { cpus: 1, ram_bytes: 64 * MiB, pin: null }, after: { cpus: 2, ram_bytes: 256 * MiB, pin: "debian@3" } }],
];
/** @type {import("../src/generated").Event[]} */
const EVENTS = Array.from({ length: 40 }, (_, at) => {
  const [caller, subject, action, detail, change] = HAPPENED[at % HAPPENED.length] ?? ["", "", "", ""];
  return { id: 900 - at, at_ms: ago(4 + at * 9), caller, subject, action, detail, ...(change && { change }) };
});

/** @type {import("../src/generated").TokenInfo[]} */
const TOKENS = [
  { name: "grafana", role: "metrics", created_by: "uid 1000 (anna)", created_at_ms: ago(8_000) },
  { name: "nightly", role: "operator", created_by: "uid 1000 (anna)", created_at_ms: ago(4_000), expires_at_ms: NOW_MS + 60 * 24 * 80 * MINUTE },
];

const CONSOLE = Array.from({ length: 60 }, (_, at) => `[    ${(at * 0.131).toFixed(6)}] systemd[1]: Reached target ${["Local File Systems", "Network", "Basic System", "Multi-User System"][at % 4]}.`).join("\r\n") + "\r\n\r\nDebian GNU/Linux 13 class-01 ttyS0\r\n\r\nclass-01 login: ";

/** What a guest prints on a terminal that is attached. */
export const TERMINAL = [
  "\u001b[0;1;32m  OK  \u001b[0m Reached target \u001b[0;1;39mMulti-User System\u001b[0m.",
  "",
  "Debian GNU/Linux 13 class-01 ttyS0",
  "",
  "class-01 login: anna",
  "Password:",
  "Last login: Sun Nov 29 08:12:40 UTC 2026 on ttyS0",
  "\u001b[01;32manna@class-01\u001b[00m:\u001b[01;34m~\u001b[00m$ ls",
  "\u001b[01;34mlessons\u001b[0m  \u001b[01;36mshared\u001b[0m  notes.txt  \u001b[01;31mbackup.tar.gz\u001b[0m",
  "\u001b[01;32manna@class-01\u001b[00m:\u001b[01;34m~\u001b[00m$ df -h /",
  "Filesystem      Size  Used Avail Use% Mounted on",
  "/dev/vda1        20G  3.1G   16G  17% /",
  "\u001b[01;32manna@class-01\u001b[00m:\u001b[01;34m~\u001b[00m$ ",
].join("\r\n");

/** What each path answers; a test replaces some of them. */
/** @param {number} ram @param {number} packed @param {number} disk @returns {import("../src/generated").HeldBytes} */
const held = (ram, packed, disk) => ({ total_bytes: (ram + packed + disk) * MiB, ram_bytes: ram * MiB, packed_bytes: packed * MiB, disk_bytes: disk * MiB });

/**
 * @param {string} path
 * @param {import("../src/generated").HeldBytes} its
 * @param {import("../src/generated").ContentsKind} kind
 */
const item = (path, its, kind = "file") => ({ partition: 1, path, kind, held: its });

/** @type {import("../src/generated").CacheContents} */
export const contents = {
  machine: "class-01",
  at_ms: ago(0),
  took_ms: 84,
  held: held(118, 40, 2990),
  kinds: [
    { kind: "file", held: held(80, 28, 1181) },
    { kind: "free", held: held(20, 10, 1199) },
    { kind: "swap", held: held(0, 0, 512) },
    { kind: "journal", held: held(16, 2, 94) },
    { kind: "metadata", held: held(2, 0, 3) },
    { kind: "unknown", held: held(0, 0, 1) },
  ],
  partitions: [
    { number: 1, file_system: "ext4", held: held(118, 40, 2989), free_bytes: 1229 * MiB, remarks: [] },
    { number: 3, file_system: "LVM with the volumes vg0/home", held: held(0, 0, 1), free_bytes: 0, remarks: ["it was not read to its end: the cluster chain of a directory is a loop, or too long"] },
  ],
  directories: [
    item("/", held(80, 28, 1181)),
    item("/var", held(60, 20, 900)),
    item("/var/log", held(50, 18, 862)),
    item("/var/log/journal", held(40, 10, 820)),
    item("/home", held(18, 6, 270)),
    item("/home/anna", held(18, 6, 270)),
    item("/home/anna/.cache", held(10, 6, 250)),
    item(`/home/anna/${"a directory with a very long name that goes on and on ".repeat(5).slice(0, 250)}`, held(1, 0, 9)),
  ],
  files: [
    item("/swapfile", held(0, 0, 512), "swap"),
    item("/var/log/journal/system.journal", held(40, 10, 820)),
    item("/home/anna/.cache/\\u{202e}gpj.exe", held(4, 0, 16)),
    item(`/home/anna/${"n".repeat(255)}`, held(1, 0, 8)),
    item("/home/anna/\u05e7\u05d5\u05d1\u05e5 123.txt", held(1, 0, 2)),
    item("(no name, 4711)", held(0, 0, 1)),
  ],
  files_total: 1204,
  hints: [
    { message: "fstrim in the guest gives back up to 1.2 GiB: files that were deleted", command: "headwater machine trim class-01" },
    { message: "/var/log/journal takes 870.0 MiB: set SystemMaxUse= in /etc/systemd/journald.conf of the image" },
  ],
};

/** @type {import("../src/types").CatalogAdvice} */
export const advice = {
  catalog: "class",
  runs: 131,
  runs_needed: 59,
  limited_runs: 2,
  now: CATALOG.cache,
  live_median_bytes: 81 * MiB,
  live_max_bytes: 199 * MiB,
  ram_share: 0.972,
  advised: { ram_bytes: 224 * MiB, disk_bytes: 320 * MiB },
  reason: "95 % of all runs had less live data than these sizes hold",
  host: { samples: 2016, live_p99_bytes: 610 * MiB, ram_bytes: 896 * MiB, configured_bytes: 4 * GiB, free_bytes: 430 * GiB, days_to_full: 43, days_to_full_at_least: 41 },
};

const { advised: _, ...unadvised } = advice;

/** The same with too few runs. @type {import("../src/types").CatalogAdvice} */
export const early = { ...unadvised, runs: 12, limited_runs: 0, reason: "not enough runs yet: 12 of 59", host: { samples: 3, configured_bytes: 4 * GiB, free_bytes: 430 * GiB } };

export const full = {
  contents,
  advice,
  status: STATUS,
  machines: MACHINES,
  images: IMAGES,
  catalogs: [CATALOG],
  tasks: TASKS,
  events: EVENTS,
  tokens: TOKENS,
  console: CONSOLE,
};

/** @type {typeof full} */
export const empty = {
  contents,
  advice: early,
  status: { ...STATUS, images: 0, store_bytes: 0, machines: 0, machines_active: 0, tasks_running: 0, tasks_waiting: 0, alarms: [], ram_used_bytes: 0, disk_used_bytes: 0, host_ram: { configured_bytes: 4 * GiB, limit_bytes: 4 * GiB, used_bytes: 0, pressure_shrinks: 0 } },
  machines: [],
  images: { images: [] },
  catalogs: [],
  tasks: [],
  events: [],
  tokens: [],
  console: "",
};

/**
 * So many machines, of which nine in ten are on.
 * @param {number} count
 */
export function many(count) {
  const machines = Array.from({ length: count }, (_, at) =>
    machine(`desk-${String(at + 1).padStart(5, "0")}`, {
      catalog: "class",
      ...(at % 10 !== 9 && { written_mib: 20 + ((at * 37) % 900), iops: (at * 13) % 200 }),
      ...(at % 4 === 3 && { version: "debian@3", old: true }),
    }),
  );
  return { ...full, machines };
}
