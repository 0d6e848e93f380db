// The types of the API. Generated from docs/openapi.json; do not change this file by hand:
// HEADWATER_BLESS=1 cargo test -p headwater-service --test openapi writes it again.

/** Something that stands in a machine's way, or will, and that a person can do something about. */
export interface Alarm {
  /** What to do. */
  advice: string;
  /** What is wrong. */
  message: string;
  /** Since when. */
  since_ms: number;
  /** On what: `machine web-1`, `image debian@3`, `store`. */
  subject: string;
}

export type Batch = string;

/** What starts a machine. */
export type BootFrom = "vm" | "network";

/** A version's boot trace. */
export interface BootTrace {
  /** Boots that it was made from. */
  boots: number;
  /** Boots from which on nothing more is recorded. */
  boots_wanted: number;
  /** Chunks of the disk that they read. */
  chunks: number;
  /** What these are of the disk. */
  image_bytes: number;
  /** How long after the start the last of them was read, in milliseconds. */
  lasts_ms: number;
  /** Where it is kept. */
  place: TracePlace;
  /** What these take in the store: so much is fetched before a boot. */
  stored_bytes: number;
  /** The version. */
  version: ImageVersion;
}

/** Who fills a machine's write cache. */
export interface CacheContents {
  /** When the scan began. */
  at_ms: number;
  /** The largest directories, largest first, each with everything below it. */
  directories: PathContents[];
  /** The largest files, largest first. */
  files: PathContents[];
  /** How many files have something in the write cache. */
  files_total: number;
  /** All blocks that take space in the write cache. */
  held: HeldBytes;
  /** What makes the write cache smaller, the largest gain first. */
  hints: CacheHint[];
  /** By kind, largest first. They add up to `held`. */
  kinds: KindContents[];
  /** The machine. */
  machine: string;
  /** By partition. */
  partitions: PartitionContents[];
  /** How long the scan took. */
  took_ms: number;
}

/** Something that makes the write cache smaller. */
export interface CacheHint {
  /** The command that does it, if one command does. */
  command?: string;
  /** What takes how much, and what to do. */
  message: string;
}

/** Where a machine's writes go. */
export type CacheMode = "ram" | "ram+disk" | "disk";

/** A machine's write cache. */
export interface CacheSettings {
  /** The most disk space it may take; at least 16 MiB, and not used by `ram`. */
  disk_bytes?: number;
  /** Where writes go. */
  mode?: CacheMode;
  /** Whether it is kept when the machine stops, restarts, or its host fails. It then belongs to the image's version that the machine began with, until a reset. Not for `ram`. */
  persistent?: boolean;
  /** The most memory it may take; at least 16 MiB. */
  ram_bytes?: number;
  /** Its weight, 1 to 10,000, among the write caches of the host while memory is short for all. */
  weight?: number;
}

/** Who asks, as the history names them, and what they may do. */
export interface CallerInfo {
  /** For instance `uid 1000 (anna)` or `token nightly`. */
  principal: string;
  /** Their role. */
  role: Role;
  scopes?: Scopes;
}

/** A catalog. */
export interface Catalog {
  /** The write cache of a machine made from now on. */
  cache: CacheSettings;
  /** The processors of each machine's guest. */
  cpus: number;
  /** When it was created. */
  created_at_ms: number;
  /** The display of each machine. */
  display: Display;
  /** The firmware of each machine. */
  firmware: Firmware;
  /** The number of the first machine that `scale` makes. */
  first_number: number;
  /** What its machines boot, as given. */
  image: string;
  /** How many of its machines are kept on, fresh and unclaimed. */
  keep_ready?: number;
  /** The names of its machines. */
  machines: string[];
  /** The memory of each machine's guest, in bytes. */
  memory_bytes: number;
  /** Its name. */
  name: string;
  /** The names of machines that `scale` makes. */
  name_rule: string;
  /** How the network card of each machine is connected: `user` or `bridge:NAME`. */
  network: string;
  /** The version that `pin` or `image` means now. Absent if there is none. */
  next_version?: string;
  /** The names of its machines whose running version, or last version if they are off, is not `next_version`. */
  old: string[];
  /** The policy for its machines whose host is lost. */
  on_host_loss?: OnHostLoss;
  /** The version that its machines boot in place of `image`, as `IMAGE@NUMBER`. The pin of a machine has priority. */
  pin?: string;
  ready_hours?: Hours;
  /** The number of the newest version of its scheme, whose settings follow. */
  scheme: number;
  /** The names of machines that have settings of an older version of it. They take the newest ones at their next boot. */
  scheme_old?: string[];
  /** Size of the scratch disk of each machine in bytes, whole MiB from 64 MiB to 4 TiB; 0: none. */
  scratch_bytes?: number;
  /** Files that a seal also removes in the guests of its machines. */
  seal_removes?: string[];
  /** Whether the firmware of each machine runs only loaders that are signed with Microsoft's keys: it must be `uefi` then. */
  secure_boot?: boolean;
  /** Seconds until an unclaimed machine beyond `keep_ready` is switched off; 0: never. */
  stop_idle_s?: number;
  /** Whether each machine has a TPM 2.0. */
  tpm?: boolean;
  /** How each machine reaches its disk. */
  transport: DiskTransport;
  /** The cloud-init user data of each machine. */
  user_data?: string;
}

/** All catalogs. */
export interface CatalogList {
  /** Ordered by name. */
  catalogs: Catalog[];
}

/** A file that changed. */
export interface ChangedFile {
  /** What happened to it. */
  change: FileChange;
  /** Its path in the file system. */
  path: string;
  /** Its size now, or before it was removed. */
  size_bytes: number;
}

/** A role that machines have, and the version that it boots. */
export type Channel = "maintenance" | "test" | "production";

/** A channel that points elsewhere now. */
export interface ChannelMove {
  /** The channel. */
  channel: Channel;
  /** The version that it pointed to. Absent: it was not set. */
  from?: number;
  /** The one that it points to. Absent: it is not set any more. */
  to?: number;
}

/** Where a channel points, pointed, or will point. */
export interface ChannelPointer {
  /** Since when, or from when on. */
  at_ms: number;
  /** Who asked for it. */
  author: string;
  /** The channel. */
  channel: Channel;
  /** The version's number. */
  version: number;
}

/** A channel of the image that the path names. */
export interface ChannelRequest {
  /** It. */
  channel: Channel;
}

/** A claim. */
export interface Claim {
  /** Where others reach the guest, as its agent says, IPv4 first. Empty if it has not said so yet. */
  addresses?: string[];
  /** The catalog. */
  catalog: string;
  /** Who asked for it. */
  claimed_by: string;
  /** The command that opens its console. */
  console?: string;
  /** When. */
  created_at_ms: number;
  /** Why it has ended. Its machine is being reset, and the claim is gone after that. */
  ended?: string;
  /** When it ends. */
  expires_at_ms?: number;
  /** Who has it. */
  for: string;
  /** Its identity. */
  id: string;
  /** The key of the request, if it had one. */
  key?: string;
  /** The machine's network address. */
  mac: string;
  /** The machine. */
  machine: string;
  /** What of the guest ends it. */
  reset_on?: ResetOn;
  /** The secret that the guest knows, only in the answer to the request that made it. */
  secret?: string;
}

/** All claims. */
export interface ClaimList {
  /** Oldest first. */
  claims: Claim[];
}

/** A machine to claim. */
export interface ClaimRequest {
  /** Who gets it, in words: a person, a job. */
  for: string;
  /** A request with the key of a claim that lasts is answered with that claim: a client that lost the answer asks again. */
  key?: string;
  /** When it ends by itself. */
  reset_on?: ResetOn;
  /** Make a secret that the guest and the holder alone know. The guest needs the agent of QEMU, and gets it in `/run/headwater/claim.json`. */
  secret?: boolean;
  /** For how long, in seconds. Without it, until it is released or the guest switches itself off. */
  ttl_s?: number;
  /** How long to wait for a machine if none is ready; a machine that is off is started then. At most 3,600. */
  wait_s?: number;
}

/** A link that opens the web console, once. */
export interface ConsoleLink {
  /** When it ends. */
  expires_at_ms: number;
  /** For a browser on the daemon's host. It holds a secret. */
  url: string;
}

/** The right to attach to the serial console of a machine, once. */
export interface ConsoleTicket {
  /** When it ends. */
  expires_at_ms: number;
  /** The secret, which the page sends as a protocol of its WebSocket. */
  ticket: string;
}

/** The purpose of changed blocks. */
export type ContentsKind = "file" | "free" | "journal" | "swap" | "metadata" | "unknown" | "outside" | "other";

/** A catalog to create: what its machines boot, and how they are made. */
export interface CreateCatalog {
  /** The write cache of a machine made from now on. */
  cache?: CacheSettings;
  /** The processors of each machine's guest. */
  cpus?: number;
  /** The display of each machine. */
  display?: Display;
  /** The firmware of each machine. */
  firmware?: Firmware;
  /** The number of the first machine that `scale` makes. */
  first_number?: number;
  /** `IMAGE`, `IMAGE:CHANNEL`, `IMAGE@NUMBER` or `IMAGE@HASH`. */
  image: string;
  /** How many of its machines are kept on, fresh and unclaimed. Default: 0. */
  keep_ready?: number;
  /** The memory of each machine's guest, in bytes. */
  memory_bytes?: number;
  /** 1 to 63 of a-z, 0-9 and '-'. It must not be the name of a machine. */
  name: string;
  /** The names of machines that `scale` makes: `#` signs stand for the digits of a number. `NAME-##` unless given. */
  name_rule?: string;
  /** How the network card of each machine is connected: `user` or `bridge:NAME`. */
  network?: string;
  /** The policy for its machines whose host is lost. */
  on_host_loss?: OnHostLoss;
  ready_hours?: Hours;
  /** Size of the scratch disk of each machine; 0: none. */
  scratch_bytes?: number;
  /** Files that a seal also removes in the guests of its machines: absolute paths, which may have wildcards. */
  seal_removes?: string[];
  /** Whether the firmware of each machine runs only loaders that are signed with Microsoft's keys. */
  secure_boot?: boolean;
  /** Seconds until an unclaimed machine beyond `keep_ready` is switched off; 0: never. Default with `ready_hours`: 900. */
  stop_idle_s?: number;
  /** Whether each machine has a TPM 2.0. */
  tpm?: boolean;
  /** How each machine reaches its disk. */
  transport?: DiskTransport;
  /** The cloud-init user data of each machine. */
  user_data?: string;
}

/** A link to the web console to make. */
export interface CreateConsoleTicket {
  /** The role of the session that it opens: `viewer`, `operator` or `admin`. */
  role: Role;
}

/** A token to make, with which a node joins once. */
export interface CreateJoinToken {
  /** For how long, in seconds; an hour unless given. */
  valid_s?: number;
}

/** A machine to create. */
export interface CreateMachine {
  boot?: BootFrom;
  cache?: CacheSettings;
  /** The catalog that it belongs to: it boots what that says. What is absent below is then the catalog's. */
  catalog?: string;
  /** The guest's processors; 1. */
  cpus?: number;
  display?: Display;
  firmware?: Firmware;
  /** The host that is to run it. Absent: that of the controller, or for a machine of a catalog the one with the most free memory. */
  host?: string;
  /** The guest's host name; the machine's name where absent. */
  host_name?: string;
  /** `IMAGE`, `IMAGE:CHANNEL`, `IMAGE@NUMBER` or `IMAGE@HASH`; absent for a machine of a catalog. */
  image?: string;
  /** The address of its network card, needed for a machine that boots from the network, and for no other. */
  mac?: string;
  /** The guest's memory; 512 MiB. */
  memory_bytes?: number;
  /** 1 to 63 of a-z, 0-9 and '-'. */
  name: string;
  /** How its network card is connected, `user` or `bridge:NAME`; `user`. */
  network?: string;
  /** Size of its scratch disk in bytes, whole MiB from 64 MiB to 4 TiB; 0: it has none. */
  scratch_bytes?: number;
  /** Whether its firmware runs only loaders that are signed with Microsoft's keys; `false`. If `true`, its firmware is `uefi` unless given. */
  secure_boot?: boolean;
  /** Whether it has a TPM 2.0; `false`. */
  tpm?: boolean;
  transport?: DiskTransport;
  /** Cloud-init user data. */
  user_data?: string;
}

/** A token to make. */
export interface CreateToken {
  /** 1 to 63 of a-z, 0-9 and '-': the history names it. */
  name: string;
  /** The role of its holder. */
  role: Role;
  scopes?: Scopes;
  /** For how long, in seconds. Without it, until it is revoked. */
  valid_s?: number;
}

/** What changed between two versions. */
export interface DiffReport {
  /** Bytes in blocks of 4 KiB that differ. */
  changed_bytes: number;
  /** Chunks that differ. */
  changed_chunks: number;
  /** The older one: that of the path. */
  from: ImageVersion;
  /** By partition of the newer one. */
  partitions: PartitionDifference[];
  /** The newer one. */
  to: ImageVersion;
}

/** The version to compare with. */
export interface DiffRequest {
  /** `IMAGE@NUMBER` or `IMAGE@HASH`, also of another image. */
  with: string;
}

/** What a machine's disk did since it started. */
export interface DiskCounters {
  /** Of which are here. */
  copied_bytes: number;
  /** Overflow disk space that the write cache takes now. */
  disk_used_bytes: number;
  /** Bytes that were read from the image, as opposed to the write cache. */
  image_read_bytes: number;
  /** Reads and writes a second, over the last second or so. */
  iops: number;
  /** How often a write had to wait for room. */
  pauses: number;
  /** Memory that the write cache takes now. */
  ram_used_bytes: number;
  /** Bytes read by the machine. */
  read_bytes: number;
  /** Reads answered. */
  reads: number;
  /** Bytes that moved from memory to the overflow disk, in all. */
  spilled_bytes: number;
  /** Bytes of the image, as they are stored, that `--hydrate` copies to this host; 0 without it. */
  to_copy_bytes: number;
  /** Writes answered. */
  writes: number;
  /** Bytes written by the machine. */
  written_bytes: number;
}

/** How a machine reaches its disk. */
export type DiskTransport = "vhost-user" | "nbd";

/** What shows a virtual machine's screen. */
export type Display = "none" | "vnc";

/** What draining a host did. */
export interface DrainReport {
  /** The host. */
  host: string;
  /** Machines that are on the host still, or were moved and do not start. */
  left: LeftMachine[];
  /** The machines that were moved. A machine that was on is started on its new host. */
  moved: MovedMachine[];
}

/** One change. */
export interface Event {
  /** What happened: `created`, `start`, `state`, ... */
  action: string;
  /** When. */
  at_ms: number;
  /** Who: `uid 1000 (anna)` for a client of the socket, `uid 1000` if `/etc/passwd` has no name, `token NAME`, `tcp 127.0.0.1:5000` with the token of the data directory, or `daemon`. `console of ` and one of these: a session of the web console, and who asked for its link. */
  caller: string;
  /** In words. */
  detail: string;
  /** Counts up; the order of events. */
  id: number;
  /** On what: `machine web-1`, `image debian`. */
  subject: string;
}

/** Some events. */
export interface EventList {
  /** Newest first, or oldest first if they were asked for by `after`. */
  events: Event[];
}

/** A command to run in a guest. */
export interface ExecRequest {
  /** The program (an absolute path, or found by the guest agent's search path) and its arguments. */
  argv: string[];
  /** What it reads from its standard input, in base64; at most 1 MiB. Absent: nothing. */
  stdin_base64?: string;
  /** How long to wait for it. */
  timeout_ms?: number;
}

/** What a command in a guest gave. */
export interface ExecResult {
  /** Its exit code, or 128 + the signal that ended it. */
  exit_code: number;
  /** Its standard error, in base64. */
  stderr_base64: string;
  /** Its standard output, in base64. */
  stdout_base64: string;
  /** Whether the guest agent cut the output off. */
  truncated: boolean;
}

/** The format of an exported disk. */
export type ExportFormat = "raw" | "qcow2" | "vhd" | "vhd-fixed" | "vhdx" | "vmdk";

/** Where to write a version, and how. */
export interface ExportRequest {
  /** The format; raw where absent. */
  format?: ExportFormat;
  /** An absolute path on the daemon's host. It must not exist yet. */
  target: string;
}

/** What happened to a file. */
export type FileChange = "added" | "removed" | "changed" | "attributes";

/** What tells a file of a host from all others, as `stat` gives it. */
export interface FileId {
  /** `st_dev`. */
  device: number;
  /** `st_ino`. */
  inode: number;
}

/** What a virtual machine boots with. */
export type Firmware = "bios" | "uefi";

/** Bytes of a disk that are in its write cache, by where their newest contents are. A packed block counts with its unpacked size. */
export interface HeldBytes {
  /** On the overflow disk. */
  disk_bytes: number;
  /** In RAM, packed. */
  packed_bytes: number;
  /** In RAM. */
  ram_bytes: number;
  /** In RAM, packed and on disk together. */
  total_bytes: number;
}

/** A computer that runs machines. */
export interface Host {
  /** The address of its node, while that is connected. */
  address?: string;
  /** How many milliseconds its clock is ahead of that of the controller, while its node is connected. */
  clock_ahead_ms?: number;
  /** New machines go to other hosts. */
  cordoned: boolean;
  /** Its processors. */
  cpus: number;
  /** The fingerprint of its certificate. */
  fingerprint?: string;
  /** Its identity for good. */
  id: string;
  /** When it joined. */
  joined_at_ms: number;
  /** How many machines it has. */
  machines: number;
  /** How many of them are on, as far as is known. */
  machines_active: number;
  /** Its memory. */
  memory_bytes: number;
  /** What is left of its memory if all its machines are on, with their write caches. */
  memory_free_bytes: number;
  /** Its name. */
  name: string;
  /** Whether it is the host of the controller, which needs no node. */
  own: boolean;
  /** When its node was connected last. */
  seen_at_ms?: number;
  /** Whether its node is connected. */
  state: HostState;
  /** The release of its node, while that is connected. */
  version?: string;
}

/** All hosts. */
export interface HostList {
  /** By name. */
  hosts: Host[];
}

/** The memory that the write caches of a host share. */
export interface HostRam {
  /** How much they may take together, as configured. */
  configured_bytes: number;
  /** How much now: less under memory pressure. */
  limit_bytes: number;
  /** How often memory pressure lowered the limit. */
  pressure_shrinks: number;
  /** How much they take, buffers and index included. */
  used_bytes: number;
}

/** Whether the node of a host is connected. */
export type HostState = "joined" | "up" | "lost";

export type Hours = string;

/** What makes a guest a machine of its own. Given to it on the seed disk at every start. */
export interface Identity {
  /** Its host name. */
  host_name: string;
  /** Its machine-id: 32 hexadecimal digits. */
  machine_id: string;
  /** The public half of its SSH host key, as in `known_hosts`. */
  ssh_host_key_public: string;
  /** Cloud-init user data (`#cloud-config ...`) that was given when it was created. The list of all machines is without. */
  user_data?: string;
}

/** A named golden disk. */
export interface Image {
  edit?: MaintenanceSession;
  /** Its name. */
  name: string;
  /** Where its channels pointed, oldest first; the last one of a channel is where it points. */
  pointers?: ChannelPointer[];
  /** Promotions to come. */
  scheduled?: ChannelPointer[];
  /** Its versions, oldest first. */
  versions: ImageVersion[];
}

/** All images. */
export interface ImageList {
  /** Ordered by name. */
  images: Image[];
  /** Why other images are missing here: their lists of versions are damaged or of a later release. */
  unreadable?: Problem[];
}

/** One immutable state of an image. */
export interface ImageVersion {
  /** Who made it. */
  author?: string;
  /** The channels that point to it now. */
  channels?: Channel[];
  /** When it was made. */
  created_at_ms: number;
  /** BLAKE3 of the version's manifest: its identity, 64 hexadecimal digits. */
  hash: string;
  /** The image. */
  image: string;
  /** Whether it is not generalised: it may hold the identity of one machine, such as its private SSH host key. Such a version is promoted to `production` only with `force`. */
  keeps_identity?: boolean;
  /** What people say about it. */
  note?: string;
  /** Counts from 1 for each image. */
  number: number;
  /** Whether it was taken out of use. */
  retired?: boolean;
  /** Size of the disk. */
  size_bytes: number;
  /** Where it came from. */
  source: string;
  /** What this version added to the store when it was made, compressed: what was there already is not counted, also where it was another image's that is gone. */
  stored_bytes: number;
}

/** What to import, and under which name. */
export interface ImportRequest {
  /** Whether a qcow2 image may have backing files outside of its own directory, and devices: who made it can have it name whatever the daemon may read. */
  backing?: boolean;
  format?: SourceFormat;
  /** The image's name. An image that exists gets a new version. */
  name: string;
  /** A line for people about the version. */
  note?: string;
  /** Size of the disk's sectors: 512 or 4096. Absent: what its partition table says, or the file, device or server. */
  sector_bytes?: number;
  /** An absolute path on the daemon's host (raw, qcow2, VHD, VHDX, VMDK), or an NBD URI such as `nbd+unix:///name?socket=/path` or `nbd://127.0.0.1:10809/name`. */
  source: string;
  source_id?: FileId;
  /** What the source is called in the version and in errors, where that is something else. */
  source_name?: string;
}

/** A token with which a node joins once. */
export interface JoinToken {
  /** When it ends. */
  expires_at_ms: number;
  /** The secret, with the fingerprint of the controller's authority. */
  token: string;
  /** Where nodes reach the controller. */
  url: string;
}

/** The bytes of one kind. */
export interface KindContents {
  /** Its bytes in the write cache. */
  held: HeldBytes;
  /** The kind. */
  kind: ContentsKind;
}

/** A machine that a task did not move, and why. */
export interface LeftMachine {
  /** Its name. */
  machine: string;
  /** Why. */
  why: string;
}

/** A machine, its settings and its present state. */
export interface Machine {
  /** How it is run (`kvm`, `tcg`), while it is active. */
  accelerator?: string;
  alarm?: Alarm;
  /** What starts it. */
  boot?: BootFrom;
  /** How long the last boot took, until the guest said that it is up. */
  boot_ms?: number;
  /** Its write cache. */
  cache: CacheSettings;
  /** The catalog that it belongs to. */
  catalog?: string;
  /** Who has claimed it. The claim may have ended, and the machine be about to be reset. */
  claimed_for?: string;
  /** The guest's processors. */
  cpus: number;
  /** When it was created. */
  created_at_ms: number;
  disk?: DiskCounters;
  /** What shows its screen. */
  display?: Display;
  /** The unix socket of its display, while it is active. */
  display_socket?: string;
  /** The version that it edits: it boots that, on a private disk, until the edit is sealed or discarded. */
  edits?: string;
  /** Whether its node ends it when the node has not heard the controller for the time of its lease, so that another host can start it. */
  fenced?: boolean;
  /** What it boots with, if the daemon runs it. */
  firmware?: Firmware;
  /** The host that runs it. Absent if there is only one. */
  host?: string;
  /** What it tells its guest. */
  identity: Identity;
  /** The image it boots, as given (`IMAGE`, `IMAGE:CHANNEL`, `IMAGE@NUMBER`), or that of its catalog: resolved to a version at every start. */
  image: string;
  /** The version that its persistent disk belongs to, where there is one: it boots that until it is reset. */
  kept?: string;
  /** The address of its network card. */
  mac: string;
  /** The guest's memory. */
  memory_bytes: number;
  /** Its name. */
  name: string;
  /** How its network card is connected: `user` or `bridge:NAME`. */
  network?: string;
  /** The version that it would boot now. Absent where there is none, and in answers to changes. */
  next_version?: string;
  /** Whether it runs, or ran last, another version than its image or pin means now: it changes at its next boot, or where its disk is kept, when it is reset. In answers to changes only where the image or pin names a version: what a channel points to is the store's to say, which they do not wait for. */
  old?: boolean;
  /** The process that runs it, while it is active. */
  pid?: number;
  /** The version that it, or its catalog, is pinned to whatever the channels of its image say, as `IMAGE@NUMBER`. */
  pin?: string;
  /** Why it is in that state, where that needs saying. */
  reason?: string;
  /** The version of its catalog's scheme whose settings it has. */
  scheme?: number;
  /** Whether the scheme has a newer version, which it takes at its next boot. */
  scheme_old?: boolean;
  /** Size of its scratch disk, which is empty at each start; 0: it has none. */
  scratch_bytes?: number;
  /** Whether its firmware runs only loaders that are signed with Microsoft's keys. */
  secure_boot?: boolean;
  /** When it was started last. */
  started_at_ms?: number;
  /** What it does. */
  state: MachineState;
  /** Whether it has a TPM 2.0. */
  tpm?: boolean;
  /** How it reaches its disk. */
  transport?: DiskTransport;
  /** Its identity for good. */
  uuid: string;
  /** The version it runs, or ran last. */
  version?: string;
  /** What it should do. */
  wanted: Wanted;
  /** Why it could not be started now for want of disk space, in answers to `POST` of a new machine and `PATCH`, where it is off. */
  warning?: string;
}

/** Machines that match a filter. */
export interface MachineList {
  /** The machines that match, in order, at most as many as were asked for, and 200 KB of them. */
  machines: Machine[];
  /** How many match. */
  matching: number;
  /** If more follow: `after` of the next page. */
  next?: string;
  /** How many there are in all. */
  total: number;
}

/** An order of machines: the largest first, but names and states from a to z. Machines that are equal are in the order of names. */
export type MachineSort = "name" | "state" | "ram" | "disk" | "cache" | "iops" | "boot";

/** What a machine does. */
export type MachineState = "created" | "starting" | "booting" | "running" | "stopping" | "stopped" | "crashed" | "lost" | "unknown";

/** The machine that is to edit an image. */
export interface MaintenanceRequest {
  /** Its name. */
  machine: string;
}

/** An image that is being edited: one machine has a private disk over one of its versions. */
export interface MaintenanceSession {
  /** Who began it. */
  author: string;
  /** The image. */
  image: string;
  /** The machine. */
  machine: string;
  /** Since when. */
  since_ms: number;
  /** The number of the version below. */
  version: number;
  /** Why the machine could not be started on its disk now for want of space, in the answer to `POST` of an edit. */
  warning?: string;
}

/** A file with a boot trace to take in. */
export interface MergeTraceRequest {
  /** An absolute path on the daemon's host. */
  source: string;
}

/** A machine that is on another host now. */
export interface MovedMachine {
  /** Its name. */
  machine: string;
  /** Its host. */
  to: string;
}

/** A token that was made. Its secret is shown this once: the daemon keeps a hash of it. */
export type NewToken = TokenInfo & {
  /** For the header `Authorization: Bearer SECRET`. */
  secret: string;
};

/** A note of the version that the path names. */
export interface NoteRequest {
  /** A line for people, at most 1024 bytes; an empty one takes the note away. */
  note: string;
}

/** The policy for machines of a catalog whose host is lost. */
export type OnHostLoss = "wait" | "restart";

/** The bytes of one partition. */
export interface PartitionContents {
  /** What is in it: `ext4`, `NTFS`, `LVM with the volumes ..`. */
  file_system: string;
  /** How much of that is free in its file system. */
  free_bytes: number;
  /** Its bytes in the write cache. */
  held: HeldBytes;
  /** From 1; 0 is the whole disk. */
  number: number;
  /** Sentences about figures that are not whole. */
  remarks: string[];
}

/** What changed in a partition. */
export interface PartitionDifference {
  /** Bytes in it that changed, in blocks of 4 KiB. */
  changed_bytes: number;
  /** Changed files by path; absent where nothing changed, or no file system could be read. */
  files?: ChangedFile[];
  /** Its length. */
  len_bytes: number;
  /** Its number, from 1; 0 is the whole disk. */
  number: number;
  /** Where it starts. */
  offset_bytes: number;
  /** Why files are missing. */
  remark?: string;
}

/** A file or a directory. */
export interface PathContents {
  /** Its bytes in the write cache; of a directory with everything below it. */
  held: HeldBytes;
  /** Its purpose. */
  kind: ContentsKind;
  /** The number of its partition; 0 is the whole disk. */
  partition: number;
  /** From the root of its file system. Control characters, marks of writing direction and bytes that are no UTF-8 are written as `\u{..}` and `\xNN`, and a backslash as two. `(no name, 17)`: it has no name that leads to the root. */
  path: string;
}

/** How a running machine was stopped for the instant of which a version was made. */
export interface Pause {
  /** How long its disk answered nothing. */
  disk_us: number;
  /** How long its guest's file systems stood still at most, from the request to freeze them to the answer that they go on, so that the version needs no repair; absent where the guest agent did not do that: then the version is as after a power cut. */
  guest_ms?: number;
  /** Why the guest's file systems were not frozen. */
  remark?: string;
}

/** The version to pin a machine to. */
export interface PinRequest {
  /** `IMAGE@NUMBER` or `IMAGE@HASH`, of the machine's image. */
  version: string;
}

/** Why a task or a request failed. */
export interface Problem {
  /** What to do about it. */
  advice?: string;
  /** Why it failed, outermost first. */
  causes?: string[];
  /** For programs. */
  kind: ProblemKind;
  /** What was tried, on what. */
  message: string;
  /** After how many seconds the same request may work; the answer has it as `Retry-After` too. */
  retry_after_s?: number;
}

/** The body of every failed request: the members of RFC 9457, and those of the problem. */
export type ProblemDetails = Problem & {
  /** The message, its causes and the advice in one line. */
  detail: string;
  /** The status of the answer. */
  status: number;
  /** The same for each problem of a kind. */
  title: string;
  /** `tag:headwater,2026:problem/KIND`. An identifier: nothing can be loaded from there. */
  type: string;
};

/** What a program needs to know about a failure. A kind exists only where a caller acts differently. */
export type ProblemKind = "invalid" | "unauthorized" | "forbidden" | "not_found" | "conflict" | "no_space" | "damaged" | "unavailable" | "cancelled" | "failed";

/** How far an operation is. */
export interface Progress {
  /** What it does now, for people, where these bytes do not say it: a verification that repairs, or looks for what the damage touches, has read them all, and a comparison that looks at files has read all changes; a pull reads lists and manifests before, and may wait for a server. */
  doing?: string;
  /** Bytes done. */
  done_bytes: number;
  /** Bytes in all; 0 while that is unknown. */
  total_bytes: number;
}

/** A version to promote: the one that the path names. */
export interface PromoteRequest {
  /** When; absent: now. A scheduled promotion is carried out when the daemon's clock has reached that time, or when the daemon starts after it. */
  at_ms?: number;
  /** Where to. */
  channel: Channel;
  /** Whether a version that is not generalised may become `production`. */
  force?: boolean;
}

/** What came of a promotion. */
export interface Promoted {
  /** Since when, or from when on. */
  at_ms: number;
  /** Who asked for it. */
  author: string;
  /** The channel. */
  channel: Channel;
  forgets?: ChannelPointer;
  /** The version to which it points now, or will. */
  version: number;
}

/** What a pull did. */
export interface PullReport {
  /** Their bytes. */
  bytes: number;
  /** Images whose channels, scheduled promotions, notes or retired versions are the source's now, and were not. */
  followed: number;
  /** The images that are not what they were. */
  images: PulledImage[];
  /** Why other versions did not come: the source has lost or damaged some of them, or a list of versions cannot be read. */
  not_copied?: Problem[];
  /** Data objects that were copied. */
  objects: number;
  /** Versions that were here already. */
  present: number;
  /** Versions that are new here. */
  versions: number;
}

/** The store whose versions are to come here, and which of them. */
export interface PullRequest {
  /** Versions, each as `IMAGE`, `IMAGE:CHANNEL`, `IMAGE@NUMBER` or `IMAGE@HASH` of that store. Empty: all that it has, with the channels, scheduled promotions, notes and what is retired. */
  images?: string[];
  /** A directory of the daemon's host by its absolute path, `s3://BUCKET/PREFIX`, or `https://HOST[,https://HOST..]`. Servers are shown the daemon's token only where all of them were named when it was started. */
  source: string;
}

/** What a pull did to an image, itself: what others did to it meanwhile is not told. */
export interface PulledImage {
  /** The version that machines booted which name the image alone. Absent: there was none. The same as in `boots` where the pull did not change that. */
  booted?: number;
  /** The one that they boot from their next boot on. Absent: there is none. */
  boots?: number;
  /** Its channels that point elsewhere now. */
  channels?: ChannelMove[];
  /** The machine that edits the image, over an older version than the newest, which came now: what it does is sealed over that only where the request says so. */
  edited_by?: string;
  /** Whether its channels, scheduled promotions, notes or retired versions are the source's now, and were not. */
  followed: boolean;
  /** Promotions to come that will not happen: the source has no such ones. */
  forgets?: ChannelPointer[];
  /** Its name. */
  image: string;
  /** Whether one of these was the newest version of the image when it came. */
  newest: boolean;
  /** Versions that were here and have another note now. */
  noted?: number[];
  /** Versions that were here and are taken out of use now. */
  retired?: number[];
  /** Promotions to come that came from the source. */
  scheduled?: ChannelPointer[];
  /** Versions that were here and are in use again. */
  unretired?: number[];
  /** The numbers of its versions that are new here. */
  versions: number[];
}

/** What was removed. */
export interface Removed {
  /** Space that became free. */
  freed_bytes: number;
  /** The names of what is gone. */
  removed: string[];
}

/** What of a guest ends its claim, besides its release and the end of its time. */
export type ResetOn = "shutdown" | "logoff";

/** Whether a version is taken out of use, or brought back. */
export interface RetireRequest {
  /** `false` brings it back. */
  retired: boolean;
}

/** A version of a scheme to go back to. */
export interface RevertScheme {
  /** Its number. Its settings become a new version. */
  version: number;
}

/** What came of taking a promotion back. */
export interface Reverted {
  /** Since when. */
  at_ms: number;
  /** Who asked for it. */
  author: string;
  /** The channel. */
  channel: Channel;
  /** Where it points now. Absent: it is not set any more, as before its first promotion. */
  version?: number;
}

/** The set of permissions of a caller. Each role may also do what the roles before it may. */
export type Role = "metrics" | "viewer" | "operator" | "admin";

/** What a roll did. */
export interface RollReport {
  /** The catalog. */
  catalog: string;
  /** Machines that are on the version and not healthy, as many as the request allows. */
  failed: LeftMachine[];
  /** The version that its machines ran before. */
  from: string;
  /** Machines that were left alone. */
  left: LeftMachine[];
  /** The machines that were moved, and are healthy. */
  moved: string[];
  /** Whether the catalog is pinned to the version now. It is not if its image means that version anyway. */
  pinned: boolean;
  /** The version that they run now. */
  to: string;
}

/** The version that a catalog's machines are to run, and how carefully they are moved to it. */
export interface RollRequest {
  /** No machine is moved before this time, in milliseconds since 1970 UTC. */
  at_ms?: number;
  /** How many of the others go at once. */
  batch?: Batch;
  /** How long a machine may take until it is up, in seconds. */
  boot_s?: number;
  /** So many machines go first, and the others only if they are healthy. 0 for none. */
  canary?: number;
  /** A command of the guest's shell that ends with 0 if the machine is healthy. Without it, a machine that is up is healthy. */
  health?: string;
  /** How long that may take, in seconds. */
  health_s?: number;
  /** So many machines besides the canaries may fail before all are taken back. */
  max_failures?: number;
  /** How long to wait after a batch, in seconds. */
  pause_s?: number;
  /** `IMAGE@NUMBER`, or a channel, which means the version that it points to now. */
  to: string;
  window?: Hours;
}

/** One value of a metric. */
export interface Sample {
  /** Which one: `machine`, `served`, ... */
  labels?: Record<string, string>;
  /** The metric's name; for a summary also with `_sum` or `_count` at its end. */
  metric: string;
  /** The value. */
  value: number;
}

/** Where to write a boot trace. */
export interface SaveTraceRequest {
  /** An absolute path on the daemon's host. It must not exist yet. */
  target: string;
}

/** What became of that. */
export interface ScaleReport {
  /** The catalog. */
  catalog: string;
  /** How many it has now. */
  count: number;
  /** The machines that were made. */
  created: string[];
  /** The machines that were removed. */
  removed: string[];
}

/** How many machines a catalog is to have. */
export interface ScaleRequest {
  /** So many. */
  count: number;
  /** Also remove machines whose disk is kept, or that are pinned, if there are not enough others. */
  force?: boolean;
  /** Start those that are made. */
  start?: boolean;
}

/** The versions of the scheme of a catalog. */
export interface SchemeList {
  /** Newest first. Machines take the first one at their next boot. */
  versions: SchemeVersion[];
}

/** The settings that the machines of a catalog have alike. */
export interface SchemeSettings {
  /** Their write caches. */
  cache: CacheSettings;
  /** Their guests' processors. */
  cpus: number;
  /** What shows their screens. */
  display: Display;
  /** What they boot with. */
  firmware: Firmware;
  /** Their guests' memory. */
  memory_bytes: number;
  /** How their network cards are connected: `user` or `bridge:NAME`. */
  network: string;
  /** Size of their scratch disks; 0: none. */
  scratch_bytes: number;
  /** Whether their firmware runs only loaders that are signed with Microsoft's keys. */
  secure_boot: boolean;
  /** Whether each has a TPM 2.0. */
  tpm: boolean;
  /** How they reach their disks. */
  transport: DiskTransport;
  /** Their cloud-init user data. */
  user_data?: string;
}

/** A version of a scheme. */
export interface SchemeVersion {
  /** When. */
  created_at_ms: number;
  /** Who made it. */
  created_by: string;
  /** The names of machines that have them. */
  machines: string[];
  /** Its settings. */
  settings: SchemeSettings;
  /** Its number. */
  version: number;
}

/** The only catalogs and images that a caller sees and may act on, with what their role permits. In a pattern, `*` stands for any characters. */
export interface Scopes {
  /** Patterns of names of catalogs. Their machines, claims, tasks and events belong to them. */
  catalogs?: string[];
  /** Patterns of names of images. Their versions, and machines without a catalog that boot them, belong to them. */
  images?: string[];
}

/** What a version that is made of a disk is called. */
export interface SealRequest {
  /** Whether the version may hold the machine's identity: nothing is removed in its guest, and what is found on its disk does not refuse the seal. */
  keep_identity?: boolean;
  /** A line about the version, for people. */
  note?: string;
  /** Whether what was edited becomes a version also where the image has versions that are newer than the one it was edited over: what they changed is not in it. What a machine that edits nothing has is sealed in any case. */
  over_newer?: boolean;
}

/** A version that was made of a disk. */
export interface Sealed {
  /** Bytes in chunks that the machine changed: so much was read. */
  changed_bytes: number;
  /** The parts of the machine's identity that are in the version. */
  identity?: string[];
  /** The newest version there was, as `IMAGE@NUMBER`, where that is not the one that it was made from: what it changed is in this one only where the machine did it, too. */
  newer?: string;
  /** File systems that could not be looked into for that. */
  not_looked_into?: string[];
  /** The version that it was made from, as `IMAGE@NUMBER`. */
  parent: string;
  pause?: Pause;
  /** The version that `production` was set to before, as it was not set and machines would have booted this one. */
  production?: number;
  /** The files and settings that were removed in the guest before the machine was switched off. */
  removed?: string[];
  /** It. */
  version: ImageVersion;
}

/** What is to change of a catalog; what is absent stays. */
export interface SetCatalog {
  /** What its machines boot from now on: `IMAGE`, `IMAGE:CHANNEL`, `IMAGE@NUMBER` or `IMAGE@HASH`. */
  image?: string;
  /** How many of its machines are kept on, fresh and unclaimed. */
  keep_ready?: number;
  on_host_loss?: OnHostLoss;
  /** `keep_ready` counts at all hours again. */
  ready_always?: boolean;
  ready_hours?: Hours;
  scheme?: SetScheme;
  /** All files that a seal also removes in the guests of its machines: absolute paths, which may have wildcards. */
  seal_removes?: string[];
  /** Seconds until an unclaimed machine beyond `keep_ready` is switched off; 0: never. */
  stop_idle_s?: number;
}

/** What to change of a host. */
export interface SetHost {
  /** Whether new machines go to other hosts. */
  cordoned: boolean;
}

/** New limits of a machine's write cache, and its weight; memory and processors of its guest. What is absent stays as it is. */
export interface SetMachine {
  /** The guest's processors; only while the machine is off. */
  cpus?: number;
  /** The most disk space it may take. */
  disk_bytes?: number;
  /** The guest's memory; only while the machine is off. */
  memory_bytes?: number;
  /** The most memory it may take. */
  ram_bytes?: number;
  /** Its weight among the write caches of the host. */
  weight?: number;
}

/** New settings for the machines of a catalog; what is absent stays. */
export interface SetScheme {
  cache?: CacheSettings;
  /** Their guests' processors. */
  cpus?: number;
  display?: Display;
  firmware?: Firmware;
  /** Their guests' memory. */
  memory_bytes?: number;
  /** How their network cards are connected: `user` or `bridge:NAME`. */
  network?: string;
  /** Size of their scratch disks; 0: none. */
  scratch_bytes?: number;
  /** Whether their firmware runs only loaders that are signed with Microsoft's keys. */
  secure_boot?: boolean;
  /** Whether each has a TPM 2.0. */
  tpm?: boolean;
  transport?: DiskTransport;
  /** Their cloud-init user data; an empty text removes it. */
  user_data?: string;
}

/** The format of a file that is imported. */
export type SourceFormat = "raw" | "qcow2" | "vhd" | "vhdx" | "vmdk";

/** All metrics at a moment. */
export interface Stats {
  /** When. */
  at_ms: number;
  /** In the order of [`FAMILIES`], then by labels. */
  samples: Sample[];
}

/** What `headwater status` shows. */
export interface Status {
  /** What stands in machines' way, a store that does not answer, and versions that were found damaged. */
  alarms: Alarm[];
  /** The URL of the API over TCP, if the daemon serves one. */
  api_url?: string;
  /** Why boots of images are not recorded, as where `--boot-trace off` says so. Absent where they are, and from a daemon that does not tell. */
  boots_unrecorded?: string;
  /** The URL of the web console, if the daemon serves one. */
  console_url?: string;
  /** Its data directory. */
  data_dir: string;
  /** Disk space of the write caches in use, in all. */
  disk_used_bytes: number;
  /** The fingerprint of the certificate of both, if the daemon made it: `sha256:` and 64 hexadecimal digits. */
  fingerprint?: string;
  /** Free bytes on the file system of the data directory. */
  free_bytes: number;
  /** The memory that all write caches share. */
  host_ram: HostRam;
  /** How machines are run: for instance `KVM`, `TCG: /dev/kvm does not exist`, or why they cannot be. */
  hypervisor: string;
  /** How many images there are; absent where the store does not tell, as a plain web server. */
  images?: number;
  /** How many machines there are. */
  machines: number;
  /** How many of them are starting, booting, running or stopping. */
  machines_active: number;
  /** Its process. */
  pid: number;
  /** Memory of the write caches in use, in all. */
  ram_used_bytes: number;
  /** Since when it runs. */
  started_at_ms: number;
  /** How long ago the store was asked for the two: more than a minute where it does not answer soon. Absent where neither is known. */
  store_age_ms?: number;
  /** Bytes that the store's files take. Absent where the store does not tell, as one that is read from servers. */
  store_bytes?: number;
  /** Whether the two may be others by now: this daemon changed the store since, or that does not answer. It answers where no alarm has `store` as its subject. */
  store_outdated?: boolean;
  /** Whether images are only read here, as where the store is one of servers: nothing can be imported. */
  store_read_only?: boolean;
  /** How many long operations run: imports, verifications, comparisons, seals, exports. */
  tasks_running?: number;
  /** How many wait for these. */
  tasks_waiting?: number;
  /** The daemon's version. */
  version: string;
}

/** A task. */
export interface Task {
  /** Who asked for it. */
  caller: string;
  /** Somebody asked for its end. */
  cancelling: boolean;
  /** When it was asked for. */
  created_at_ms: number;
  /** When it ended. */
  ended_at_ms?: number;
  /** Its number; later tasks have higher ones. */
  id: number;
  /** What it does: `import`, `pull`, `verify`, `compare`, `seal`, `export`, `scale` or `roll`. */
  kind: string;
  problem?: Problem;
  progress?: Progress;
  result?: TaskResult;
  /** When it began. */
  started_at_ms?: number;
  /** How far it is. */
  state: TaskState;
  /** On what: `image debian`, `catalog class`. */
  subject: string;
}

/** One line of the answer. */
export type TaskEvent = {
  event: "waiting";
  /** How many others run, as many as may at once. */
  running: number;
} | Progress & {
  event: "progress";
} | {
  event: "done";
  /** What came of it. */
  result: TaskResult;
} | {
  event: "failed";
  /** Why. */
  problem: Problem;
};

/** The newest tasks. */
export interface TaskList {
  /** Newest first. */
  tasks: Task[];
}

/** What an operation ended with. */
export type TaskResult = {
  /** Whether the import made it. */
  created: boolean;
  /** Chunks that the store had, and that are damaged there. This version has sound ones in their place; older versions that share them need a repair. */
  damaged_chunks?: number;
  /** The machine that edits the image, over an older version: what it does is sealed over that version only where the request says so. */
  edited_by?: string;
  kind: "imported";
  /** Remarks on the disk, a line each: machines cannot boot it, nothing on it is known, its sectors have 4,096 bytes. */
  remarks?: string[];
  /** It. */
  version: ImageVersion;
} | PullReport & {
  kind: "pulled";
} | VerifyReport & {
  kind: "verified";
} | DiffReport & {
  kind: "compared";
} | Sealed & {
  kind: "sealed";
} | {
  kind: "exported";
  /** The file's size. */
  size_bytes: number;
  /** It. */
  version: ImageVersion;
} | ScaleReport & {
  kind: "scaled";
} | RollReport & {
  kind: "rolled";
} | DrainReport & {
  kind: "drained";
};

/** How far a task is. */
export type TaskState = "waiting" | "running" | "done" | "failed" | "cancelled";

/** A token, without its secret. */
export interface TokenInfo {
  /** When. */
  created_at_ms: number;
  /** Who made it. */
  created_by: string;
  /** When it ends. Absent: when it is revoked. */
  expires_at_ms?: number;
  /** Its name. */
  name: string;
  /** The role of its holder. */
  role: Role;
  scopes?: Scopes;
}

/** All tokens. */
export interface TokenList {
  /** By name. */
  tokens: TokenInfo[];
}

/** Where a boot trace is kept. */
export type TracePlace = "store" | "host";

/** What a verification found. */
export interface VerifyReport {
  /** Bytes that were read and compared with their hashes. */
  checked_bytes: number;
  /** What is damaged still, one line each: where in the disk, and what is wrong. Empty: all is well. */
  damage: string[];
  /** Chunks that are damaged still, more of them than have a line where there are very many. None where the manifest is. */
  damaged_chunks?: number;
  /** Files that cannot be read because of the damage. */
  files?: string[];
  /** Why there may be more of them: what could not be looked into, one line each. */
  remarks?: string[];
  /** Chunks and data objects that were damaged and are right again. */
  repaired?: number;
  /** Who uses these versions: machines, catalogs, channels, persistent disks. Where that cannot be told, why. */
  uses?: string[];
  /** The version that was read. */
  version: ImageVersion;
  /** The versions that hold what is damaged: this one, and others that share it, as `IMAGE@NUMBER`. */
  versions?: string[];
}

/** How to verify a version. */
export interface VerifyRequest {
  /** How many bytes of the store are read a second at most; absent: as many as it gives. Not 0. */
  rate_bytes_s?: number;
  /** Stores and servers that may have what is damaged here: directories of the daemon's host by their absolute paths, `s3://BUCKET/PREFIX`, `https://HOST[,https://HOST..]`. The first one that has it is taken. Servers are shown the daemon's token only where all of a list were named when it was started. */
  repair_from?: string[];
}

/** What a machine should do. */
export type Wanted = "running" | "stopped";
