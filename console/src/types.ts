// The types of the API, as far as the console uses them. docs/openapi.json describes all of them.

export type Role = "metrics" | "viewer" | "operator" | "admin";

export interface Alarm {
  subject: string;
  since_ms: number;
  message: string;
  advice: string;
}

export interface Status {
  version: string;
  pid: number;
  data_dir: string;
  started_at_ms: number;
  images?: number;
  store_bytes?: number;
  store_read_only: boolean;
  store_outdated: boolean;
  machines: number;
  machines_active: number;
  alarms: Alarm[];
  ram_used_bytes: number;
  host_ram: { configured_bytes: number; limit_bytes: number; used_bytes: number; pressure_shrinks: number };
  disk_used_bytes: number;
  free_bytes: number;
  hypervisor: string;
}

export type MachineState =
  | "created"
  | "starting"
  | "booting"
  | "running"
  | "stopping"
  | "stopped"
  | "crashed"
  | "lost";

export type CacheMode = "ram" | "ram+disk" | "disk";

export interface Cache {
  mode: CacheMode;
  ram_bytes: number;
  disk_bytes: number;
  persistent: boolean;
  weight: number;
}

export interface Machine {
  name: string;
  image: string;
  boot: "vm" | "network";
  catalog?: string;
  pin?: string;
  version?: string;
  next_version?: string;
  old: boolean;
  kept?: string;
  edits?: string;
  cache: Cache;
  display: "none" | "vnc";
  firmware: string;
  network: string;
  mac: string;
  memory_bytes: number;
  cpus: number;
  state: MachineState;
  reason?: string;
  boot_ms?: number;
  started_at_ms?: number;
  alarm?: Alarm;
  disk?: {
    reads: number;
    writes: number;
    written_bytes: number;
    image_read_bytes: number;
    ram_used_bytes: number;
    disk_used_bytes: number;
    spilled_bytes: number;
    pauses: number;
    iops: number;
  };
}

export interface Refusal {
  kind: string;
  message: string;
  causes?: string[];
  advice?: string;
}

interface LeftMachine {
  machine: string;
  why: string;
}

/** What a task ended with, as far as the console shows it. */
export type Result =
  | { kind: "imported"; version: Version; created: boolean; damaged_chunks?: number; edited_by?: string; remarks?: string[] }
  | { kind: "scaled"; catalog: string; count: number; created: string[]; removed: string[] }
  | { kind: "rolled"; catalog: string; from: string; to: string; moved: string[]; failed: LeftMachine[]; left: LeftMachine[]; pinned: boolean }
  | { kind: "sealed" | "exported"; version: Version }
  | { kind: "verified"; version: Version; damaged_chunks: number; repaired: number; remarks?: string[] }
  | { kind: "pulled"; versions: number; present: number }
  | { kind: "compared"; changed_bytes: number };

export interface Task {
  id: number;
  kind: string;
  subject: string;
  caller: string;
  state: "waiting" | "running" | "done" | "failed" | "cancelled";
  cancelling: boolean;
  progress?: { done_bytes: number; total_bytes: number; doing?: string };
  result?: Result;
  problem?: Refusal;
  created_at_ms: number;
  started_at_ms?: number;
  ended_at_ms?: number;
}

export interface Event {
  id: number;
  at_ms: number;
  caller: string;
  subject: string;
  action: string;
  detail: string;
}

export type Channel = "maintenance" | "test" | "production";

export interface Version {
  image: string;
  number: number;
  hash: string;
  size_bytes: number;
  stored_bytes: number;
  created_at_ms: number;
  author?: string;
  source: string;
  note?: string;
  retired?: boolean;
  keeps_identity?: boolean;
  channels?: Channel[];
}

export interface Pointer {
  channel: Channel;
  version: number;
  at_ms: number;
  author: string;
}

export interface Image {
  name: string;
  versions: Version[];
  pointers?: Pointer[];
  scheduled?: Pointer[];
  edit?: { machine: string; version: number; author: string; since_ms: number };
}

export interface ImageList {
  images: Image[];
  unreadable?: Refusal[];
}

export interface Catalog {
  name: string;
  image: string;
  name_rule: string;
  machines: string[];
  old: string[];
  next_version?: string;
  pin?: string;
  memory_bytes: number;
  cpus: number;
  cache: Cache;
  display: string;
  firmware: string;
  network: string;
  created_at_ms: number;
}
