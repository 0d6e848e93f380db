// The types of the API. Generated from docs/openapi.json; do not change this file by hand:
// HEADWATER_BLESS=1 cargo test -p headwater-service --test openapi writes it again.

/** Sizes of a write cache. */
export interface AdvisedSizes {
  /** Overflow disk that is enough for the same runs if nothing stays in RAM. */
  disk_bytes: number;
  /** RAM with which nothing is spilled in 95 % of all runs, with a certainty of 95 %. */
  ram_bytes: number;
}

/** A problem of a machine, an image or the store that a person can solve. */
export interface Alarm {
  /** What to do. */
  advice: string;
  /** What is wrong. */
  message: string;
  /** When it began. */
  since_ms: number;
  /** The subject: `machine web-1`, `image debian@3`, `store`. */
  subject: string;
}

export type Batch = string;

/** What starts a machine. */
export type BootFrom = "vm" | "network";

/** A version's boot trace. */
export interface BootTrace {
  /** The number of boots from which it was made. */
  boots: number;
  /** The number of boots after which recording ends. */
  boots_wanted: number;
  /** The number of chunks of the disk that these boots read. */
  chunks: number;
  /** Uncompressed bytes of these chunks. */
  image_bytes: number;
  /** The time from the start of the machine to the last of these reads, in milliseconds. */
  lasts_ms: number;
  /** Where it is kept. */
  place: TracePlace;
  /** Bytes of these chunks in the store, which are fetched before a boot. */
  stored_bytes: number;
  /** The version. */
  version: ImageVersion;
}

/** The report of what occupies a machine's write cache. */
export interface CacheContents {
  /** When the scan began. */
  at_ms: number;
  /** The largest directories, largest first, each with everything below it. */
  directories: PathContents[];
  /** The largest files, largest first. */
  files: PathContents[];
  /** The number of files with blocks in the write cache. */
  files_total: number;
  /** All blocks that take space in the write cache, with their uncompressed size. */
  held: HeldBytes;
  /** Actions that would free space in the write cache, the largest gain first. */
  hints: CacheHint[];
  /** The bytes by kind, largest first. Their sum is `held`. */
  kinds: KindContents[];
  /** The machine. */
  machine: string;
  /** The bytes by partition. */
  partitions: PartitionContents[];
  /** How long the scan took. */
  took_ms: number;
}

/** An action that would free space in the write cache. */
export interface CacheHint {
  /** The command that does so, if a single command does. */
  command?: string;
  /** What occupies how much, and how to free it. */
  message: string;
}

/** Where a machine's writes go. */
export type CacheMode = "ram" | "ram+disk" | "disk";

/** The settings of a machine's write cache. */
export interface CacheSettings {
  /** The limit of overflow disk space; at least 16 MiB, and not used in mode `ram`. */
  disk_bytes?: number;
  /** Where writes go. */
  mode?: CacheMode;
  /** Whether its contents stay when the machine stops, restarts, or its host fails. It then belongs to the version that the machine booted first, until a reset. Not possible in mode `ram`. */
  persistent?: boolean;
  /** The memory limit; at least 16 MiB. */
  ram_bytes?: number;
  /** Its weight, 1 to 10,000, among the write caches of the host while memory is short for all. */
  weight?: number;
}

/** The caller of a request: its name in the history, and its permissions. */
export interface CallerInfo {
  /** For instance `uid 1000 (anna)` or `token nightly`. */
  principal: string;
  /** The caller's role. */
  role: Role;
  scopes?: Scopes;
}

/** A catalog: machines that boot the same image with the same settings. */
export interface Catalog {
  /** The write cache of each machine. */
  cache: CacheSettings;
  cloud?: CloudScheme;
  /** The processors of each machine's guest. */
  cpus: number;
  /** When it was created. */
  created_at_ms: number;
  /** The display of each machine. */
  display: Display;
  /** The firmware of each machine. */
  firmware: Firmware;
  /** The number of the first machine that `scale` creates. */
  first_number: number;
  /** What its machines boot, as given. */
  image: string;
  /** How many machines are kept on, freshly booted and unclaimed. */
  keep_ready?: number;
  /** The names of its machines. */
  machines: string[];
  /** The memory of each machine's guest, in bytes. */
  memory_bytes: number;
  /** Its name. */
  name: string;
  /** The pattern for names of machines that `scale` creates. */
  name_rule: string;
  /** The connection of each machine's network card: `user` or `bridge:NAME`. */
  network: string;
  /** The version to which `pin` or `image` resolves now. Absent if there is none. */
  next_version?: string;
  /** The names of its machines whose running version, or last version if they are off, is not `next_version`. */
  old: string[];
  /** The policy for its machines whose host is lost. */
  on_host_loss?: OnHostLoss;
  /** The version that its machines boot instead of `image`, as `IMAGE@NUMBER`. The pin of a machine has priority. */
  pin?: string;
  ready_hours?: Hours;
  /** Seconds after which an SSH host key is replaced when its machine boots; 0: never. */
  rotate_after_s?: number;
  /** The number of the newest version of its scheme, whose settings follow. */
  scheme: number;
  /** The names of machines that have settings of an older version of it. They take the newest ones when the controller next starts them. */
  scheme_old?: string[];
  /** Size of the scratch disk of each machine in bytes, whole MiB from 64 MiB to 4 TiB; 0: no scratch disk. */
  scratch_bytes?: number;
  /** Additional files that a seal removes in the guests of its machines. */
  seal_removes?: string[];
  /** Whether the firmware of each machine, which is then `uefi`, runs only loaders that are signed with Microsoft's keys. */
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

/** How much RAM and disk the write caches of a catalog's machines need. */
export interface CatalogAdvice {
  advised?: AdvisedSizes;
  /** The catalog. */
  catalog: string;
  /** The host that the runs are of. */
  host: HostAdvice;
  /** Runs in which writes waited for space. They could have needed more. */
  limited_runs: number;
  /** The highest peak of live bytes of all runs. */
  live_max_bytes: number;
  /** The median over all runs of a run's peak of live bytes. */
  live_median_bytes: number;
  /** The write cache of a machine that is made now. */
  now: CacheSettings;
  /** The share of all written bytes that never went to the overflow disk, with the limits of that time. */
  ram_share?: number;
  /** The reason for the advice, or for its absence, in one sentence. */
  reason: string;
  /** Runs from which the advice is computed: the newest 1,000 on this host. */
  runs: number;
  /** Runs that are needed for an advice. */
  runs_needed: number;
}

/** All catalogs. */
export interface CatalogList {
  /** Ordered by name. */
  catalogs: Catalog[];
}

/** The fields that a change of settings changed, before and after. The name of a field within a group has a dot: `cache.ram_bytes`. A field that has no value is null. The values of secret fields are not shown: each is `given`, and `other` after a change. */
export interface Change {
  /** The values after. */
  after: Record<string, unknown>;
  /** The values before. */
  before: Record<string, unknown>;
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

/** The role of a machine. A channel of an image points to the version that machines of this role boot. */
export type Channel = "maintenance" | "test" | "production";

/** The change of a channel. */
export interface ChannelMove {
  /** The channel. */
  channel: Channel;
  /** The version to which it pointed before. Absent: it was not set. */
  from?: number;
  /** The version to which it points now. Absent: it is not set any more. */
  to?: number;
}

/** A past, present or scheduled position of a channel. */
export interface ChannelPointer {
  /** When it began, or is scheduled to begin. */
  at_ms: number;
  /** The caller that requested it. */
  author: string;
  /** The channel. */
  channel: Channel;
  /** The version's number. */
  version: number;
}

/** A channel of the image that the path names. */
export interface ChannelRequest {
  /** The channel. */
  channel: Channel;
}

/** A claim: one holder has a machine of a catalog until the claim ends. */
export interface Claim {
  /** The guest's addresses as its guest agent reports them, IPv4 first. Empty until the agent has reported. */
  addresses?: string[];
  /** The catalog. */
  catalog: string;
  /** The caller that sent the request. */
  claimed_by: string;
  /** The command that opens its console. */
  console?: string;
  /** When the claim was created. */
  created_at_ms: number;
  /** Why the claim has ended. Its machine is being reset; then the claim is removed. */
  ended?: string;
  /** When the claim expires. Absent: never. */
  expires_at_ms?: number;
  /** The holder, as given in the request. */
  for: string;
  /** Its identity. */
  id: string;
  /** The key of the request, if it had one. */
  key?: string;
  /** The machine's network address. */
  mac: string;
  /** The machine. */
  machine: string;
  /** The event in the guest that ends the claim. */
  reset_on?: ResetOn;
  /** The secret that the guest knows. Only the answer to the request that created it contains it. */
  secret?: string;
}

/** All claims. */
export interface ClaimList {
  /** Oldest first. */
  claims: Claim[];
}

/** A machine to claim. */
export interface ClaimRequest {
  /** The holder, as free text: for instance the name of a person or of a CI job. */
  for: string;
  /** An idempotency key. If a claim with this key exists, the answer is that claim, so that a client can repeat a request whose answer was lost. */
  key?: string;
  /** The event in the guest that ends the claim. */
  reset_on?: ResetOn;
  /** Create a secret that only the guest and the holder know. The guest must run the QEMU guest agent, and gets the secret in `/run/headwater/claim.json`. */
  secret?: boolean;
  /** The duration of the claim in seconds. Absent: until the claim is released or the guest shuts down. */
  ttl_s?: number;
  /** How long to wait, in seconds, if no machine is ready. A machine that is off is then started. At most 3,600. */
  wait_s?: number;
}

/** A machine in a cloud as it was last created there. */
export interface CloudMachine {
  /** The place of its OS disk: `cache`, `temp`, `nvme` or `managed`. */
  place: string;
  /** Its size, which may be a backup size. */
  size: string;
  /** The cloud's identifier. Another identifier means a new machine with a pristine OS disk. */
  vm_id: string;
  /** Its zone. */
  zone?: string;
}

/** How the machines of a catalog are created in a cloud. It is set when the catalog is created, and stays. */
export interface CloudScheme {
  /** The user with administrator rights in each guest. */
  admin_user?: string;
  /** Sizes that are tried in this order if the cloud has no machine of `size`. */
  backup_sizes?: string[];
  /** The connection whose resource group the machines are in. */
  connection: string;
  /** Whether the OS disk is on the host if `places` permits it, and then lost with the host. */
  ephemeral?: boolean;
  /** Whether the whole image is copied to the host. Needs `ephemeral`. */
  full_copy?: boolean;
  /** The size of the OS disk, in whole GiB. Default: that of the version, rounded up. */
  os_disk_bytes?: number;
  /** The allowed places of the OS disk, in order of preference: `cache`, `temp`, `nvme`, `managed`. By default, all of them if `ephemeral`, else `managed`. */
  places?: string[];
  /** The identifier of the network security group. */
  security_group?: string;
  /** The size, such as `Standard_D8ds_v5`. */
  size: string;
  /** The public SSH key of that user. */
  ssh_key: string;
  /** The identifier of the subnet. */
  subnet: string;
  /** The zones in which machines are created: 1, 2, 3. Empty: the region chooses. */
  zones?: number[];
}

/** A resource group of a subscription of Azure, and the identity with which the controller uses it. */
export interface Connection {
  /** How the controller authenticates itself. */
  auth: ConnectionAuth;
  /** The URL of the login service. */
  authority: string;
  /** The client ID of the application or of the managed identity. */
  client_id?: string;
  /** When it was added. */
  created_at_ms: number;
  /** The caller that added it. */
  created_by: string;
  /** The resource group. All resources are made in it. */
  group: string;
  /** The URL of the management service. */
  management: string;
  /** Its name. */
  name: string;
  /** The region, such as `westeurope`. */
  region: string;
  /** The subscription's UUID. */
  subscription: string;
  /** The tenant of the identity: a UUID or a domain. */
  tenant: string;
}

/** How the controller authenticates itself in a cloud. */
export type ConnectionAuth = "secret" | "identity" | "workload";

/** What a check of a connection found. */
export interface ConnectionCheck {
  /** The connection. */
  connection: string;
  /** The region of the resource group. The resources may be in another region. */
  group_region: string;
  /** The identity that the cloud sees, as its token names it. */
  identity: string;
  /** The rights that are needed and that the identity does not have on the resource group. */
  lacks: string[];
  /** Remarks, for people. */
  remarks?: string[];
}

/** All connections. */
export interface ConnectionList {
  /** Ordered by name. */
  connections: Connection[];
}

/** A link that opens the web console once. */
export interface ConsoleLink {
  /** When the link expires. */
  expires_at_ms: number;
  /** The URL, for a browser on the daemon's host. It contains a secret. */
  url: string;
}

/** A ticket that permits one connection to the serial console of a machine. */
export interface ConsoleTicket {
  /** When the ticket expires. */
  expires_at_ms: number;
  /** The secret. The page sends it as a subprotocol of its WebSocket. */
  ticket: string;
}

/** The purpose of changed blocks. */
export type ContentsKind = "file" | "free" | "journal" | "swap" | "metadata" | "unknown" | "outside" | "other";

/** A catalog to create: what its machines boot, and how they are made. */
export interface CreateCatalog {
  /** The write cache of each machine. */
  cache?: CacheSettings;
  cloud?: CloudScheme;
  /** The processors of each machine's guest. */
  cpus?: number;
  /** The display of each machine. */
  display?: Display;
  /** The firmware of each machine. */
  firmware?: Firmware;
  /** The number of the first machine that `scale` creates. */
  first_number?: number;
  /** `IMAGE`, `IMAGE:CHANNEL`, `IMAGE@NUMBER` or `IMAGE@HASH`. */
  image: string;
  /** How many machines are kept on, freshly booted and unclaimed. Default: 0. */
  keep_ready?: number;
  /** The memory of each machine's guest, in bytes. */
  memory_bytes?: number;
  /** 1 to 63 of a-z, 0-9 and '-'. It must not be the name of a machine. */
  name: string;
  /** The pattern for names of machines that `scale` creates: `#` signs stand for the digits of a number. Default: `NAME-##`. */
  name_rule?: string;
  /** How the network card of each machine is connected: `user` or `bridge:NAME`. */
  network?: string;
  /** The policy for its machines whose host is lost. */
  on_host_loss?: OnHostLoss;
  ready_hours?: Hours;
  /** Size of the scratch disk of each machine in bytes, whole MiB from 64 MiB to 4 TiB; 0: no scratch disk. */
  scratch_bytes?: number;
  /** Additional files that a seal removes in the guests of its machines: absolute paths, which may have wildcards. */
  seal_removes?: string[];
  /** Whether the firmware of each machine runs only loaders that are signed with Microsoft's keys. */
  secure_boot?: boolean;
  /** Seconds until an unclaimed machine beyond `keep_ready` is switched off, at most 604800 (7 days); 0: never. Default: 900 with `ready_hours`, 0 without. */
  stop_idle_s?: number;
  /** Whether each machine has a TPM 2.0. */
  tpm?: boolean;
  /** How each machine reaches its disk. */
  transport?: DiskTransport;
  /** The cloud-init user data of each machine. */
  user_data?: string;
}

/** The request to add a connection. */
export interface CreateConnection {
  /** How the controller authenticates itself. */
  auth: ConnectionAuth;
  /** The URL of the login service. Default: that of the public cloud. */
  authority?: string;
  /** The client ID of the application or of the managed identity. Needed except for a managed identity, if the machine has only one. */
  client_id?: string;
  /** The resource group, which must exist. */
  group: string;
  /** The URL of the management service. Default: that of the public cloud. */
  management?: string;
  /** Its name: 1 to 63 of a-z, 0-9 and '-'. */
  name: string;
  /** The region, such as `westeurope`. */
  region: string;
  /** The client secret. No answer contains it. */
  secret?: string;
  /** The subscription's UUID. */
  subscription: string;
  /** The tenant of the identity: a UUID or a domain. */
  tenant: string;
}

/** The request to create a link to the web console. */
export interface CreateConsoleTicket {
  /** The role of the session that it opens: `viewer`, `operator` or `admin`. */
  role: Role;
}

/** The request to create a token with which one node joins. */
export interface CreateJoinToken {
  /** How long the token is valid, in seconds. Default: one hour. */
  valid_s?: number;
}

/** A machine to create. */
export interface CreateMachine {
  address?: FixedAddress;
  boot?: BootFrom;
  cache?: CacheSettings;
  /** The catalog that it belongs to: the catalog decides what it boots, and is the default of the fields below. */
  catalog?: string;
  /** The guest's processors. Default: 1. */
  cpus?: number;
  display?: Display;
  firmware?: Firmware;
  /** The host that will run it. Absent: the controller's own, or for a machine of a catalog that keeps none ready, the one with the most free memory. */
  host?: string;
  /** The guest's host name. Default: the machine's name. */
  host_name?: string;
  /** `IMAGE`, `IMAGE:CHANNEL`, `IMAGE@NUMBER` or `IMAGE@HASH`; absent for a machine of a catalog. */
  image?: string;
  /** The MAC address of its network card. Required for a machine that boots from the network. Default of others: it is generated. */
  mac?: string;
  /** The guest's memory. Default: 512 MiB. */
  memory_bytes?: number;
  /** 1 to 63 of a-z, 0-9 and '-'. */
  name: string;
  /** The connection of its network card, `user` or `bridge:NAME`. Default: `user`. */
  network?: string;
  /** Size of its scratch disk in bytes, whole MiB from 64 MiB to 4 TiB; 0: no scratch disk. */
  scratch_bytes?: number;
  /** Whether its firmware runs only loaders that are signed with Microsoft's keys. Default: `false`. If `true`, the default of `firmware` is `uefi`. */
  secure_boot?: boolean;
  /** Whether it has a TPM 2.0. Default: `false`. */
  tpm?: boolean;
  transport?: DiskTransport;
  /** Cloud-init user data. */
  user_data?: string;
}

/** The request to create a token. */
export interface CreateToken {
  /** The client certificate of its holder, in PEM. The token then has no secret, and expires with the certificate. */
  certificate?: string;
  /** 1 to 63 of a-z, 0-9 and '-': the history names it. */
  name: string;
  /** The role of callers with this token. */
  role: Role;
  scopes?: Scopes;
  /** How long the token is valid, in seconds. Absent: until it is revoked. */
  valid_s?: number;
}

/** The differences between two versions. */
export interface DiffReport {
  /** Bytes in blocks of 4 KiB that differ. */
  changed_bytes: number;
  /** Chunks that differ. */
  changed_chunks: number;
  /** The older version, which the path names. */
  from: ImageVersion;
  /** By partition of the newer one. */
  partitions: PartitionDifference[];
  /** The newer one. */
  to: ImageVersion;
}

/** The version to compare with. */
export interface DiffRequest {
  /** `IMAGE@NUMBER` or `IMAGE@HASH`; it may be a version of another image. */
  with: string;
}

/** Counters of a machine's disk since its start. */
export interface DiskCounters {
  /** Bytes of these that are copied. */
  copied_bytes: number;
  /** Overflow disk space that the write cache uses now. */
  disk_used_bytes: number;
  /** Bytes read from the image, not from the write cache. */
  image_read_bytes: number;
  /** Read and write requests per second, over about the last second. */
  iops: number;
  /** Bytes that live in the write cache: in memory, packed and on the overflow disk. A packed block counts with its unpacked size. */
  live_bytes?: number;
  /** How often a write waited for space. */
  pauses: number;
  /** Memory that the write cache takes now. */
  ram_used_bytes: number;
  /** Bytes read by the machine. */
  read_bytes: number;
  /** Read requests answered. */
  reads: number;
  /** Bytes that were spilled from memory to the overflow disk. */
  spilled_bytes: number;
  /** Compressed bytes of the image that `--hydrate` copies to this host; 0 without `--hydrate`. */
  to_copy_bytes: number;
  /** Write requests answered. */
  writes: number;
  /** Bytes written by the machine. */
  written_bytes: number;
}

/** How a machine reaches its disk. */
export type DiskTransport = "vhost-user" | "nbd";

/** The display of a virtual machine. */
export type Display = "none" | "vnc";

/** The result of draining a host. */
export interface DrainReport {
  /** The host. */
  host: string;
  /** Machines that are still on the host, or that were moved but do not start. */
  left: LeftMachine[];
  /** The machines that were moved. A machine that was on is started on its new host. */
  moved: MovedMachine[];
}

/** One change. */
export interface Event {
  /** The action: `created`, `start`, `state`, ... */
  action: string;
  /** When it happened. */
  at_ms: number;
  /** Who caused it: `uid 1000 (anna)` for a client of the socket, `uid 1000` if `/etc/passwd` has no name, `token NAME`, `oidc NAME (SUBJECT)` for a login, `tcp 127.0.0.1:5000` with the token of the data directory, or `daemon`. `console of ` before one of these means a session of the web console whose link that caller created. */
  caller: string;
  change?: Change;
  /** A sentence that describes the event. */
  detail: string;
  /** The number of the event. Later events have larger numbers. */
  id: number;
  /** The subject: `machine web-1`, `image debian`. */
  subject: string;
}

/** A list of events. */
export interface EventList {
  /** Newest first, or oldest first if they were asked for by `after`. */
  events: Event[];
}

/** A command to run in a guest. */
export interface ExecRequest {
  /** The program (an absolute path, or found in the guest agent's search path) and its arguments. */
  argv: string[];
  /** Its standard input, in base64; at most 1 MiB. Absent: empty. */
  stdin_base64?: string;
  /** Timeout of the command, and before that of the wait until the guest has booted. */
  timeout_ms?: number;
}

/** The result of a command in a guest. */
export interface ExecResult {
  /** Its exit code, or 128 + the signal that ended it. */
  exit_code: number;
  /** Its standard error, in base64. */
  stderr_base64: string;
  /** Its standard output, in base64. */
  stdout_base64: string;
  /** Whether the guest agent cut the output. */
  truncated: boolean;
}

/** The format of an exported disk. */
export type ExportFormat = "raw" | "qcow2" | "vhd" | "vhd-fixed" | "vhdx" | "vmdk";

/** The request to write a version to a file. */
export interface ExportRequest {
  /** The format. Default: raw. */
  format?: ExportFormat;
  /** An absolute path on the daemon's host. No file of that name may exist yet. */
  target: string;
}

/** What happened to a file. */
export type FileChange = "added" | "removed" | "changed" | "attributes";

/** The identity of a file on a host, as `stat` returns it. */
export interface FileId {
  /** `st_dev`. */
  device: number;
  /** `st_ino`. */
  inode: number;
}

/** The firmware of a virtual machine. */
export type Firmware = "bios" | "uefi";

/** A fixed IPv4 address of a machine's network card. */
export interface FixedAddress {
  /** The DNS servers, 3 at most. */
  dns?: string[];
  /** The router of the network. Absent: the guest reaches only its own network. */
  gateway?: string;
  /** The address. */
  ip: string;
  /** The length of the network's prefix: 1 to 30. */
  prefix: number;
}

/** The users of a guest. */
export interface GuestUsers {
  /** How many are logged in. A user with several sessions counts several times. */
  users: number;
}

/** Bytes of a disk whose newest contents are in its write cache. Packed (compressed) blocks count with their uncompressed size. */
export interface HeldBytes {
  /** On the overflow disk. */
  disk_bytes: number;
  /** Compressed in RAM (uncompressed size). */
  packed_bytes: number;
  /** Uncompressed in RAM. */
  ram_bytes: number;
  /** The sum of the three fields below. */
  total_bytes: number;
}

/** A computer that runs machines. */
export interface Host {
  /** The address of its node; absent unless the node is connected. */
  address?: string;
  /** How far its clock is ahead of the controller's, in milliseconds; absent unless its node is connected. */
  clock_ahead_ms?: number;
  /** Whether new machines are placed on other hosts. */
  cordoned: boolean;
  /** The number of its processors. */
  cpus: number;
  /** The fingerprint of its certificate. */
  fingerprint?: string;
  /** Its permanent identity. */
  id: string;
  /** When it joined. */
  joined_at_ms: number;
  /** The number of its machines. */
  machines: number;
  /** The number of its machines that are on, as far as is known. */
  machines_active: number;
  /** Its memory in bytes. */
  memory_bytes: number;
  /** The memory that would be free if all its machines were on, with full write caches. */
  memory_free_bytes: number;
  /** Its name. */
  name: string;
  /** Whether it is the controller's own host, which needs no node. */
  own: boolean;
  /** When its node was last connected. */
  seen_at_ms?: number;
  /** Whether its node is connected. */
  state: HostState;
  /** The release of its node; absent unless the node is connected. */
  version?: string;
}

/** What the write caches of a host take together. */
export interface HostAdvice {
  /** RAM that all write caches may use, as configured. */
  configured_bytes: number;
  /** Days until that is full, if it goes on as in the samples. Absent if the free space does not shrink, or not surely. */
  days_to_full?: number;
  /** Lower bound of `days_to_full`, with a certainty of 95 %. */
  days_to_full_at_least?: number;
  /** Free bytes of the file system of the data directory. */
  free_bytes: number;
  /** The most bytes that lived in all write caches at the same time, except in 1 % of the samples. Machines do not peak together, so that this is less than the sum of their peaks. Absent with fewer than 100 samples. */
  live_p99_bytes?: number;
  /** RAM with which nothing of that is spilled: a value for `serve --cache-ram`. */
  ram_bytes?: number;
  /** Number of measurements since the daemon started: one every five minutes, at most those of a week. */
  samples: number;
}

/** All hosts. */
export interface HostList {
  /** Ordered by name. */
  hosts: Host[];
}

/** The memory that the write caches of a host share. */
export interface HostRam {
  /** The configured limit of all write caches together. */
  configured_bytes: number;
  /** The present limit: lower than the configured one under memory pressure. */
  limit_bytes: number;
  /** How often memory pressure lowered the limit. */
  pressure_shrinks: number;
  /** The memory that the write caches use, including buffers and index. */
  used_bytes: number;
}

/** Whether the node of a host is connected. */
export type HostState = "joined" | "up" | "lost";

export type Hours = string;

/** The identity of a guest, which it gets on the seed disk at every start. */
export interface Identity {
  address?: FixedAddress;
  /** Its host name. */
  host_name: string;
  /** Its machine-id: 32 hexadecimal digits. */
  machine_id: string;
  /** The personality strings that the guest reads from its next boot on: those of its catalog, and its own. Not in lists of machines. */
  personality?: Record<string, string>;
  /** The public half of its SSH host key, as in `known_hosts`. */
  ssh_host_key_public: string;
  /** Cloud-init user data (`#cloud-config ...`) from the machine's creation. Not in lists of machines. */
  user_data?: string;
}

/** A named golden disk. */
export interface Image {
  edit?: MaintenanceSession;
  /** Its name. */
  name: string;
  /** The positions of its channels, oldest first. The last entry of a channel is its present position. */
  pointers?: ChannelPointer[];
  /** Scheduled promotions. */
  scheduled?: ChannelPointer[];
  /** Its versions, oldest first. */
  versions: ImageVersion[];
}

/** All images. */
export interface ImageList {
  /** Ordered by name. */
  images: Image[];
  /** Why other images are missing from the list: their version lists are damaged, or were written by a later release. */
  unreadable?: Problem[];
}

/** One immutable state of an image. */
export interface ImageVersion {
  /** The caller that made it. */
  author?: string;
  /** The channels that point to it now. */
  channels?: Channel[];
  /** When it was made. */
  created_at_ms: number;
  /** BLAKE3 of the version's manifest: its identity, 64 hexadecimal digits. */
  hash: string;
  /** The image. */
  image: string;
  /** Whether it was not generalised, so that it may contain the identity of a machine, such as its private SSH host key. `production` is promoted to such a version only with `force`. */
  keeps_identity?: boolean;
  /** A note for people. */
  note?: string;
  /** The number of the version: 1, 2, .. for each image. */
  number: number;
  /** Whether it was retired (taken out of use). */
  retired?: boolean;
  /** Size of the disk. */
  size_bytes: number;
  /** Where it came from. */
  source: string;
  /** Compressed bytes that this version added to the store when it was made. Data that the store already had is not counted, even if the image that it came from was removed since. */
  stored_bytes: number;
}

/** The request to import a disk as a version of an image. */
export interface ImportRequest {
  /** Whether a qcow2 image may have devices as backing files, or files outside of its own directory. The author of the image chooses their names, so this permits any file that the daemon can read. */
  backing?: boolean;
  format?: SourceFormat;
  /** The image's name. If the image exists, it gets a new version. */
  name: string;
  /** One line about the version, for people. */
  note?: string;
  /** Size of the disk's sectors: 512 or 4096. Absent: it is taken from the partition table, or else from the file, device or server. */
  sector_bytes?: number;
  /** An absolute path on the daemon's host (raw, qcow2, VHD, VHDX, VMDK), or an NBD URI such as `nbd+unix:///name?socket=/path` or `nbd://127.0.0.1:10809/name`. */
  source: string;
  source_id?: FileId;
  /** The name of the source in the version and in errors, if it is not `source`. */
  source_name?: string;
}

/** A token with which one node joins. */
export interface JoinToken {
  /** When the token expires. */
  expires_at_ms: number;
  /** The secret, with the fingerprint of the controller's authority. */
  token: string;
  /** The URL at which nodes reach the controller. */
  url: string;
}

/** The bytes of one kind. */
export interface KindContents {
  /** Its bytes in the write cache. */
  held: HeldBytes;
  /** The kind. */
  kind: ContentsKind;
}

/** A machine, and why a task did not move it or why it is not healthy. */
export interface LeftMachine {
  /** Its name. */
  machine: string;
  /** Why. */
  why: string;
}

/** A machine of a list. */
export interface ListedMachine {
  address?: FixedAddress;
  /** The number of its line in a file, or of its place in the list: errors name it. */
  line: number;
  /** The MAC address of its network card. Absent: it is generated. */
  mac?: string;
  /** Its name: 1 to 63 of a-z, 0-9 and '-'. */
  name: string;
}

/** A machine, its settings and its present state. */
export interface Machine {
  /** The accelerator (`kvm`, `tcg`), while it is on. */
  accelerator?: string;
  alarm?: Alarm;
  /** What starts it. */
  boot?: BootFrom;
  /** How long the last boot took, until the guest reported that it has booted. */
  boot_ms?: number;
  /** Its write cache. */
  cache: CacheSettings;
  /** The catalog that it belongs to. */
  catalog?: string;
  /** The holder of its claim. The claim may have ended, and the machine be about to be reset. */
  claimed_for?: string;
  cloud?: CloudMachine;
  /** The connection of the cloud that it is in. Absent: it runs on a host. Otherwise the settings of machines on hosts have no effect. */
  connection?: string;
  /** The guest's processors. */
  cpus: number;
  /** When it was created. */
  created_at_ms: number;
  disk?: DiskCounters;
  /** Its display. */
  display?: Display;
  /** The unix socket of its display, while it is on. */
  display_socket?: string;
  /** The version below the private disk of its maintenance session. It boots that disk until it is sealed or discarded. */
  edits?: string;
  /** Whether its node ends it when the node's lease is over, so that another host can start it. */
  fenced?: boolean;
  /** Its firmware, if the daemon runs it. */
  firmware?: Firmware;
  /** The host that runs it. Absent if there is only one. */
  host?: string;
  /** The identity that its guest gets. */
  identity: Identity;
  /** The image it boots, as given (`IMAGE`, `IMAGE:CHANNEL`, `IMAGE@NUMBER`), or that of its catalog. It is resolved to a version at every start. */
  image: string;
  /** The version below its persistent disk, if it has one. It boots that version until it is reset. */
  kept?: string;
  /** The MAC address of its network card. */
  mac: string;
  /** The guest's memory. */
  memory_bytes: number;
  /** Its name. */
  name: string;
  /** The connection of its network card: `user` or `bridge:NAME`. */
  network?: string;
  /** The version that it would boot now. Absent if there is none, and in answers to changes. */
  next_version?: string;
  /** Whether the version that it runs, or ran last, is not the one to which its image or pin resolves now. It then changes at its next boot, or if its disk is persistent, when it is reset. In answers to changes it is set only if the image or pin names a version, because these answers do not wait for the store, which knows the channels. */
  old?: boolean;
  /** The process that runs it, while it is on. */
  pid?: number;
  /** The version to which it, or its catalog, is pinned, whatever the channels of its image say, as `IMAGE@NUMBER`. */
  pin?: string;
  /** Why it is in this state, if there is something to explain. */
  reason?: string;
  /** The version of its catalog's scheme whose settings it has. */
  scheme?: number;
  /** Whether the scheme has a newer version, which it takes when the controller next starts it. */
  scheme_old?: boolean;
  /** Size of its scratch disk, which is empty at each start; 0: no scratch disk. */
  scratch_bytes?: number;
  /** Whether its firmware runs only loaders that are signed with Microsoft's keys. */
  secure_boot?: boolean;
  /** When it was last started. */
  started_at_ms?: number;
  /** The present state. */
  state: MachineState;
  /** Whether it has a TPM 2.0. */
  tpm?: boolean;
  /** How it reaches its disk. */
  transport?: DiskTransport;
  /** Its permanent identity. */
  uuid: string;
  /** The version it runs, or ran last. */
  version?: string;
  /** What it should do. */
  wanted: Wanted;
  /** Why it could not be started now for lack of disk space. Only in answers to `POST` and `PATCH`, and if it is off. */
  warning?: string;
}

/** Machines that match a filter. */
export interface MachineList {
  /** The machines of this page, in order: at most as many as requested, and 200 KB. */
  machines: Machine[];
  /** The number of machines that match. */
  matching: number;
  /** The `after` of the next page, if there is one. */
  next?: string;
  /** The number of all machines. */
  total: number;
}

/** An order of machines. Names and states ascend, numbers descend. Equal machines are ordered by name. */
export type MachineSort = "name" | "state" | "ram" | "disk" | "cache" | "iops" | "boot";

/** The state of a machine. */
export type MachineState = "created" | "starting" | "booting" | "running" | "stopping" | "stopped" | "crashed" | "lost" | "unknown";

/** The request to begin a maintenance session. */
export interface MaintenanceRequest {
  /** The name of the machine that edits the image. */
  machine: string;
}

/** A maintenance session: one machine has a private disk over a version of the image, until the disk is sealed or discarded. */
export interface MaintenanceSession {
  /** The caller that began it. */
  author: string;
  /** The image. */
  image: string;
  /** The machine. */
  machine: string;
  /** When the session began. */
  since_ms: number;
  /** The number of the version below the private disk. */
  version: number;
  /** Why the machine could not be started now for lack of disk space; only in the answer to the request that begins the session. */
  warning?: string;
}

/** The request to merge a boot trace from a file. */
export interface MergeTraceRequest {
  /** The file: an absolute path on the daemon's host. */
  source: string;
}

/** A machine that was moved to another host. */
export interface MovedMachine {
  /** Its name. */
  machine: string;
  /** Its new host. */
  to: string;
}

/** A new token. Only this answer contains its secret: the daemon stores a hash. */
export type NewToken = TokenInfo & {
  /** For the header `Authorization: Bearer SECRET`. Empty if the token has a client certificate instead. */
  secret: string;
};

/** A note about the version that the path names. */
export interface NoteRequest {
  /** One line for people, at most 1024 bytes. An empty note removes the present one. */
  note: string;
}

/** The policy for machines of a catalog whose host is lost. */
export type OnHostLoss = "wait" | "restart";

/** A resource in a cloud that this controller made, and that nothing here needs. */
export interface OrphanResource {
  /** Whether a sweep may remove it. */
  removable: boolean;
  /** Whether this sweep removed it. */
  removed: boolean;
  /** Its identifier. */
  resource: string;
  /** When a sweep found it first. */
  seen_at_ms: number;
  /** Why it could not be removed. */
  why?: string;
}

/** The bytes of one partition. */
export interface PartitionContents {
  /** What is in it: `ext4`, `NTFS`, `LVM with the volumes ..`. */
  file_system: string;
  /** The part of `held` that is free in the file system. */
  free_bytes: number;
  /** Its bytes in the write cache. */
  held: HeldBytes;
  /** From 1; 0 is the whole disk. */
  number: number;
  /** Notes on incomplete figures. */
  remarks: string[];
}

/** The changes in a partition. */
export interface PartitionDifference {
  /** Bytes in it that changed, in blocks of 4 KiB. */
  changed_bytes: number;
  /** Changed files by path. Absent if nothing changed, or if no file system could be read. */
  files?: ChangedFile[];
  /** Its length. */
  len_bytes: number;
  /** Its number, from 1; 0 is the whole disk. */
  number: number;
  /** Its first byte on the disk. */
  offset_bytes: number;
  /** Why files are missing from the list. */
  remark?: string;
}

/** A file or a directory. */
export interface PathContents {
  /** Its bytes in the write cache; for a directory the sum of everything below it. */
  held: HeldBytes;
  /** Its purpose. */
  kind: ContentsKind;
  /** The number of its partition; 0 is the whole disk. */
  partition: number;
  /** From the root of its file system. Control characters, bidirectional control characters and bytes that are not UTF-8 are written as `\u{..}` and `\xNN`, and a backslash as two. `(no name, 17)`: no path leads to inode 17. */
  path: string;
}

/** How long a running machine was paused for the snapshot from which a version was made. */
export interface Pause {
  /** How long its disk did not answer requests. */
  disk_us: number;
  /** The longest time for which its guest's file systems were frozen, from the request to freeze them to the answer that they are thawed. Absent if the guest agent could not freeze them: the version is then as after a power cut, and its file systems may need a check. */
  guest_ms?: number;
  /** Why the guest's file systems were not frozen. */
  remark?: string;
}

/** The personality strings of a machine or a catalog. */
export interface Personality {
  /** Those of the machine's catalog. Strings of the machine with the same names replace them. */
  of_catalog?: Record<string, string>;
  /** Its own, by name. */
  strings: Record<string, string>;
}

/** The version to pin a machine to. */
export interface PinRequest {
  /** `IMAGE@NUMBER` or `IMAGE@HASH`, of the machine's image. */
  version: string;
}

/** Why a task or a request failed. */
export interface Problem {
  /** What the user can do. */
  advice?: string;
  /** Why it failed. The first cause is the nearest to `message`. */
  causes?: string[];
  /** The class of the failure, for programs. */
  kind: ProblemKind;
  /** What was tried, and on what. */
  message: string;
  /** The number of seconds after which the same request may succeed. It is also the answer's `Retry-After`. */
  retry_after_s?: number;
}

/** The body of every failed request: the members of RFC 9457, and the problem. */
export type ProblemDetails = Problem & {
  /** The message, its causes and the advice in one line. */
  detail: string;
  /** The status of the answer. */
  status: number;
  /** A title; the same for each problem of a kind. */
  title: string;
  /** `tag:headwater,2026:problem/KIND`. An identifier: nothing can be loaded from there. */
  type: string;
};

/** The class of a failure. Kinds differ only if a caller would act differently. */
export type ProblemKind = "invalid" | "unauthorized" | "forbidden" | "not_found" | "conflict" | "no_space" | "damaged" | "unavailable" | "cancelled" | "failed";

/** The progress of a task. */
export interface Progress {
  /** The present step, for people, if the bytes do not show it. Examples: a verification has read all bytes and repairs, or searches for the files that damage affects; a comparison has read all changes and compares files; a pull reads lists and manifests before it copies, or waits for a server. */
  doing?: string;
  /** Bytes that are done. */
  done_bytes: number;
  /** The total of bytes; 0 if it is unknown. */
  total_bytes: number;
}

/** The promotion of the version that the path names. */
export interface PromoteRequest {
  /** When. Absent: now. A scheduled promotion takes place when the daemon's clock reaches this time, or at the daemon's next start after it. */
  at_ms?: number;
  /** The channel that will point to the version. */
  channel: Channel;
  /** Whether to promote `production` to the version even if it was not generalised. */
  force?: boolean;
}

/** The result of a promotion. */
export interface Promoted {
  /** When this begins. */
  at_ms: number;
  /** The caller that requested it. */
  author: string;
  /** The channel. */
  channel: Channel;
  forgets?: ChannelPointer;
  /** The version to which it points now, or will point at `at_ms`. */
  version: number;
}

/** The result of publishing a version. */
export interface PublishReport {
  /** Whether this task published it. If not, it was published before. */
  created: boolean;
  /** The published version. */
  published: PublishedImage;
  /** Remarks, for people. */
  remarks?: string[];
  /** Bytes that this task sent. */
  sent_bytes: number;
}

/** The request to publish a version of an image. */
export interface PublishRequest {
  /** The connection. */
  connection: string;
  /** Publish a version in which no provisioning agent was found. */
  no_agent_check?: boolean;
  /** The image also boots from NVMe disks, which machine sizes of v6 need. */
  nvme?: boolean;
  /** The number of replicas in the region, 1 if absent. A version that is published already must have this number. */
  replicas?: number;
}

/** The state of a published version. */
export type PublishState = "publishing" | "published" | "removing";

/** A version of an image in the gallery of a connection. */
export interface PublishedImage {
  /** The connection. */
  connection: string;
  /** When it was begun. */
  created_at_ms: number;
  /** The caller that published it. */
  created_by: string;
  /** The generation of virtual hardware that it boots on: 1 (BIOS) or 2 (UEFI). */
  generation: number;
  /** The hash of the version's manifest. */
  hash: string;
  /** The image. */
  image: string;
  /** The number of replicas in the region. */
  replicas: number;
  /** The identifier in the cloud. */
  resource: string;
  /** Its state. */
  state: PublishState;
  /** The version's number. */
  version: number;
}

/** The published versions. */
export interface PublishedList {
  /** Ordered by image, version and connection. */
  published: PublishedImage[];
}

/** The result of a pull. */
export interface PullReport {
  /** Bytes of these data objects. */
  bytes: number;
  /** The number of images whose channels, scheduled promotions, notes or retired marks were changed to those of the source. */
  followed: number;
  /** The images that were changed. */
  images: PulledImage[];
  /** Why other versions did not come: the source has lost or damaged some of them, or a list of versions cannot be read. */
  not_copied?: Problem[];
  /** The number of data objects that were copied. */
  objects: number;
  /** The number of versions that this store already had. */
  present: number;
  /** The number of versions that are new in this store. */
  versions: number;
}

/** The request to copy versions from another store. */
export interface PullRequest {
  /** Versions, each as `IMAGE`, `IMAGE:CHANNEL`, `IMAGE@NUMBER` or `IMAGE@HASH` of that store. Empty: all versions, with the channels, scheduled promotions, notes and retired marks. */
  images?: string[];
  /** The store to copy from: an absolute path of a directory on the daemon's host, `s3://BUCKET/PREFIX`, or `https://HOST[,https://HOST..]`. Servers get the daemon's token only if all of them were named when the daemon was started. */
  source: string;
}

/** The changes that a pull made to one image. Changes by others at the same time are not included. */
export interface PulledImage {
  /** The version that machines booted before the pull if they name only the image. Absent: there was none. Equal to `boots` if the pull did not change it. */
  booted?: number;
  /** The version that these machines boot from their next start on. Absent: there is none. */
  boots?: number;
  /** The channels that were moved. */
  channels?: ChannelMove[];
  /** The machine of the image's maintenance session, if the pull brought a version that is newer than the one below its disk. To seal the session, the request then needs `over_newer`. */
  edited_by?: string;
  /** Whether its channels, scheduled promotions, notes or retired marks were changed to those of the source. */
  followed: boolean;
  /** Scheduled promotions that were cancelled, because the source does not have them. */
  forgets?: ChannelPointer[];
  /** Its name. */
  image: string;
  /** Whether one of these was the newest version of the image when it was copied. */
  newest: boolean;
  /** Versions that existed here and whose note was changed. */
  noted?: number[];
  /** Versions that existed here and were retired. */
  retired?: number[];
  /** Scheduled promotions that were copied from the source. */
  scheduled?: ChannelPointer[];
  /** Versions that existed here and were brought back into use. */
  unretired?: number[];
  /** The numbers of its versions that are new in this store. */
  versions: number[];
}

/** The result of a removal. */
export interface Removed {
  /** Space that was freed. */
  freed_bytes: number;
  /** The names of what was removed. */
  removed: string[];
}

/** The event in a guest that ends its claim. A claim also ends when it is released or expires. */
export type ResetOn = "shutdown" | "logoff";

/** The request to retire a version, or to bring it back into use. */
export interface RetireRequest {
  /** `true` retires the version, `false` brings it back into use. */
  retired: boolean;
}

/** A version of a scheme to go back to. */
export interface RevertScheme {
  /** Its number. Its settings become a new version. */
  version: number;
}

/** The result of reverting a promotion. */
export interface Reverted {
  /** When this began. */
  at_ms: number;
  /** The caller that requested it. */
  author: string;
  /** The channel. */
  channel: Channel;
  /** The version to which it points now. Absent: the channel is not set, as before its first promotion. */
  version?: number;
}

/** The set of permissions of a caller. Each role may also do what the roles before it may. */
export type Role = "metrics" | "viewer" | "operator" | "admin";

/** The result of a roll. */
export interface RollReport {
  /** The catalog. */
  catalog: string;
  /** The machines that were moved and are not healthy: at most `max_failures` of the request. */
  failed: LeftMachine[];
  /** The version that its machines ran before the roll. */
  from: string;
  /** The machines that were not moved. */
  left: LeftMachine[];
  /** The machines that were moved and are healthy. */
  moved: string[];
  /** Whether the roll pinned the catalog to the version. It does not if the catalog's image already resolves to that version. */
  pinned: boolean;
  /** The version that they run now. */
  to: string;
}

/** The version that a catalog's machines are to run, and how they are moved to it. */
export interface RollRequest {
  /** No machine is moved before this time, in milliseconds since 1970 UTC. */
  at_ms?: number;
  /** How many of the other machines are moved at once. */
  batch?: Batch;
  /** The timeout of a machine's boot, in seconds. */
  boot_s?: number;
  /** The number of machines that are moved first. The roll continues only if they are healthy. 0: none. */
  canary?: number;
  /** The time after which no machine waits any more, in seconds: machines that are in use then are not restarted. It begins when the roll asks the first machine, and again in each window. */
  deadline_s?: number;
  /** A shell command in the guest that exits with 0 if the machine is healthy. Absent: a machine that has booted is healthy. */
  health?: string;
  /** The timeout of the health command, in seconds. */
  health_s?: number;
  /** How many machines besides the canaries may fail before all machines are moved back. */
  max_failures?: number;
  /** The message that users of such a machine see when the machine begins to wait, and again when more users log in: 1 to 1000 characters. */
  message?: string;
  /** How long to wait after a batch, in seconds. */
  pause_s?: number;
  /** `IMAGE@NUMBER`, or a channel, which is resolved once, now. */
  to: string;
  /** If somebody is logged in to a machine, it is restarted when nobody is, or after this time, in seconds. Absent: machines are restarted at once. */
  wait_idle_s?: number;
  window?: Hours;
}

/** One value of a metric at a moment. */
export interface Sample {
  /** The labels, for instance `machine` or `served`. */
  labels?: Record<string, string>;
  /** The metric's name; for parts of a summary with `_sum` or `_count` at its end. */
  metric: string;
  /** The value. */
  value: number;
}

/** The request to write a boot trace to a file. */
export interface SaveTraceRequest {
  /** The file: an absolute path on the daemon's host. It must not exist yet. */
  target: string;
}

/** The result of scaling. */
export interface ScaleReport {
  /** The catalog. */
  catalog: string;
  /** The number of machines of the catalog after the change. */
  count: number;
  /** The machines that were created. */
  created: string[];
  /** The machines that were removed. */
  removed: string[];
}

/** The request to change the number of machines of a catalog: either `count` or `machines` is given. */
export interface ScaleRequest {
  /** The number of machines that the catalog is to have. */
  count?: number;
  /** If there are not enough other machines, also remove claimed and pinned machines, and machines with a persistent disk. Machines with a maintenance session always stay. */
  force?: boolean;
  /** Machines that the catalog is to have in addition: at most 10,000. */
  machines?: ListedMachine[];
  /** Start the machines that are created, and those of `machines` that exist already. */
  start?: boolean;
}

/** The versions of the scheme of a catalog. */
export interface SchemeList {
  /** Newest first. Machines take the first one when the controller next starts them. */
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

/** A version of the scheme of a catalog, which is the settings of its machines. */
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

/** The only catalogs and images that a caller sees and may act on, within the permissions of its role. In a pattern, `*` stands for any characters. */
export interface Scopes {
  /** Patterns of names of catalogs. Their machines, claims, tasks and events belong to them. */
  catalogs?: string[];
  /** Patterns of names of images. Their versions, and machines without a catalog that boot them, belong to them. */
  images?: string[];
}

/** The options of a seal. */
export interface SealRequest {
  /** Whether the version may contain the machine's identity: nothing is removed in its guest, and an identity found on its disk does not make the seal fail. */
  keep_identity?: boolean;
  /** One line about the new version, for people. */
  note?: string;
  /** Whether a maintenance session may be sealed although the image has versions newer than the one below its disk; the changes of those versions are not in the new one. Other machines are sealed in any case. */
  over_newer?: boolean;
}

/** A version that was made of a disk. */
export interface Sealed {
  /** Bytes of the chunks that the machine changed, all of which were read. */
  changed_bytes: number;
  /** The parts of the machine's identity that are in the version. */
  identity?: string[];
  /** The newest version at that time, as `IMAGE@NUMBER`, if it is not `parent`. Its changes are not in the new version, unless the machine made them too. */
  newer?: string;
  /** File systems that could not be searched for the machine's identity. */
  not_looked_into?: string[];
  /** The version that it was made from, as `IMAGE@NUMBER`. */
  parent: string;
  pause?: Pause;
  /** The version to which `production` was set by this seal. It was not set before, and machines would have booted the new version. */
  production?: number;
  /** The files and settings that were removed in the guest before the machine was switched off. */
  removed?: string[];
  /** The new version. */
  version: ImageVersion;
}

/** The change of a catalog. Absent fields do not change. */
export interface SetCatalog {
  /** What its machines boot from their next boot on: `IMAGE`, `IMAGE:CHANNEL`, `IMAGE@NUMBER` or `IMAGE@HASH`. */
  image?: string;
  /** How many of its machines are kept on, fresh and unclaimed. */
  keep_ready?: number;
  on_host_loss?: OnHostLoss;
  /** Makes `keep_ready` count at all hours again. */
  ready_always?: boolean;
  ready_hours?: Hours;
  /** Seconds after which an SSH host key is replaced when its machine boots, from 3600 (an hour) to 315360000 (ten years); 0: never. */
  rotate_after_s?: number;
  scheme?: SetScheme;
  /** The complete list of additional files that a seal removes in the guests of its machines: absolute paths, which may have wildcards. */
  seal_removes?: string[];
  /** Seconds until an unclaimed machine beyond `keep_ready` is switched off; 0: never. */
  stop_idle_s?: number;
}

/** The change of a connection. */
export interface SetConnection {
  /** Its new client secret. No answer contains it. */
  secret: string;
}

/** The change of a host. */
export interface SetHost {
  /** Whether new machines are placed on other hosts. */
  cordoned: boolean;
}

/** New limits of a machine's write cache, and its weight; memory and processors of its guest. Absent fields do not change. */
export interface SetMachine {
  /** The guest's processors; only while the machine is off. */
  cpus?: number;
  /** The limit of overflow disk space of the write cache. */
  disk_bytes?: number;
  /** The guest's memory; only while the machine is off. */
  memory_bytes?: number;
  /** The memory limit of the write cache. */
  ram_bytes?: number;
  /** Its weight among the write caches of the host. */
  weight?: number;
}

/** A change of personality strings. Guests read it from their next boot on. */
export interface SetPersonality {
  /** Names of strings to remove. */
  remove?: string[];
  /** Strings to add or replace. A name has 1 to 250 characters and no `=`, a value at most 1000; neither has control characters. */
  set?: Record<string, string>;
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

/** The values of all metrics at a moment. */
export interface Stats {
  /** When they were read. */
  at_ms: number;
  /** In the order of [`FAMILIES`], then by labels. */
  samples: Sample[];
}

/** What `headwater status` shows. */
export interface Status {
  /** Alarms: machines that cannot work, a store that does not answer, damaged versions. */
  alarms: Alarm[];
  /** The URL of the API over TCP, if the daemon serves one. */
  api_url?: string;
  /** Why boots of images are not recorded, for instance because of `--boot-trace off`. Absent if they are recorded, and in answers of older daemons. */
  boots_unrecorded?: string;
  /** The URL of the web console, if the daemon serves one. */
  console_url?: string;
  /** The daemon's data directory. */
  data_dir: string;
  /** Disk space of the write caches in use, in all. */
  disk_used_bytes: number;
  /** The fingerprint of the certificate of the API and the web console, if the daemon made it: `sha256:` and 64 hexadecimal digits. */
  fingerprint?: string;
  /** Free bytes on the file system of the data directory. */
  free_bytes: number;
  /** The memory that all write caches share. */
  host_ram: HostRam;
  /** How machines are run: `KVM`, or `TCG: /dev/kvm does not exist`, or why they cannot be run. */
  hypervisor: string;
  /** The number of images. Absent if the store cannot list them, like a plain web server. */
  images?: number;
  /** The number of machines. */
  machines: number;
  /** The number of machines that are starting, booting, running or stopping. The number of running tasks (imports, verifications, comparisons, seals, exports and others). */
  machines_active: number;
  /** The daemon's process id. */
  pid: number;
  /** Memory that all write caches use. */
  ram_used_bytes: number;
  /** When the daemon started. */
  started_at_ms: number;
  /** The age of `images` and `store_bytes`. More than a minute if the store answers slowly or not at all. Absent if neither is known. */
  store_age_ms?: number;
  /** Bytes of the store's files. Absent if the store cannot tell, like a store that is read from servers. */
  store_bytes?: number;
  /** Whether `images` and `store_bytes` may be outdated, because this daemon changed the store since, or the store does not answer. If the store does not answer, there is an alarm with the subject `store`. */
  store_outdated?: boolean;
  /** Whether the store is read-only, like a store that is read from servers: nothing can be imported. */
  store_read_only?: boolean;
  /** How many long operations run: imports, verifications, comparisons, seals, exports. */
  tasks_running?: number;
  /** The number of tasks that wait for these. */
  tasks_waiting?: number;
  /** The daemon's version. */
  version: string;
}

/** The result of a sweep. */
export interface SweepReport {
  /** The connection. */
  connection: string;
  /** The resources, ordered by their identifiers. */
  orphans: OrphanResource[];
}

/** The request to find resources in a cloud that nothing here needs. */
export interface SweepRequest {
  /** Remove those that were found before, at least 30 minutes ago. */
  remove?: boolean;
}

/** A task: a long operation that continues if the client disconnects. */
export interface Task {
  /** The caller that requested it. */
  caller: string;
  /** Whether a user has requested to cancel it. */
  cancelling: boolean;
  /** When the task was requested. */
  created_at_ms: number;
  /** When the task ended. */
  ended_at_ms?: number;
  /** Its number; later tasks have higher ones. */
  id: number;
  /** The operation: `import`, `pull`, `verify`, `compare`, `seal`, `export`, `scale`, `roll`, `drain`, `publish`, `unpublish` or `sweep`. */
  kind: string;
  problem?: Problem;
  progress?: Progress;
  result?: TaskResult;
  /** When the task began. */
  started_at_ms?: number;
  /** The task's state. */
  state: TaskState;
  /** The subject: `image debian`, `catalog class`. */
  subject: string;
}

/** One line of the answer. */
export type TaskEvent = {
  event: "waiting";
  /** How many other tasks run, which is the most that may run at once. */
  running: number;
} | Progress & {
  event: "progress";
} | {
  event: "done";
  /** The result. */
  result: TaskResult;
} | {
  event: "failed";
  /** Why it failed. */
  problem: Problem;
};

/** The newest tasks. */
export interface TaskList {
  /** Newest first. */
  tasks: Task[];
}

/** The result of a task that succeeded. */
export type TaskResult = {
  /** Whether the import made it. */
  created: boolean;
  /** The number of chunks of this disk that the store already had, but damaged. The new version has intact copies; older versions that share the damaged chunks need a repair. */
  damaged_chunks?: number;
  /** The machine of the image's maintenance session, which has an older version below its disk. To seal the session, the request then needs `over_newer`. */
  edited_by?: string;
  kind: "imported";
  /** Notes on the disk, one line each: machines cannot boot it, its contents are unknown, its sectors have 4,096 bytes. */
  remarks?: string[];
  /** The version. */
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
  /** The version. */
  version: ImageVersion;
} | ScaleReport & {
  kind: "scaled";
} | RollReport & {
  kind: "rolled";
} | DrainReport & {
  kind: "drained";
} | PublishReport & {
  kind: "published";
} | PublishedImage & {
  kind: "unpublished";
} | SweepReport & {
  kind: "swept";
};

/** The state of a task. */
export type TaskState = "waiting" | "running" | "done" | "failed" | "cancelled";

/** A token, without its secret. */
export interface TokenInfo {
  /** The fingerprint of the client certificate, if the token has one instead of a secret. */
  certificate?: string;
  /** When it was created. */
  created_at_ms: number;
  /** The caller that created it. */
  created_by: string;
  /** When it expires. Absent: it is valid until it is revoked. */
  expires_at_ms?: number;
  /** The token's name. */
  name: string;
  /** The role of callers with this token. */
  role: Role;
  scopes?: Scopes;
}

/** The list of all tokens. */
export interface TokenList {
  /** Ordered by name. */
  tokens: TokenInfo[];
}

/** Where a boot trace is kept. */
export type TracePlace = "store" | "host";

/** The request to remove a published version. */
export interface UnpublishRequest {
  /** The connection. */
  connection: string;
}

/** The result of a verification. */
export interface VerifyReport {
  /** Bytes that were read and compared with their hashes. */
  checked_bytes: number;
  /** Damage that remains, one line each: its position on the disk and what is wrong. Empty: there is none. */
  damage: string[];
  /** The number of chunks that remain damaged. It can exceed the number of lines in `damage`. 0 if the manifest is damaged. */
  damaged_chunks?: number;
  /** Files that cannot be read because of the damage. */
  files?: string[];
  /** What could not be examined, so that more files may be damaged; one line each. */
  remarks?: string[];
  /** The number of damaged chunks and data objects that were repaired. */
  repaired?: number;
  /** Machines, catalogs, channels and persistent disks that use these versions. If that could not be determined, the reason. */
  uses?: string[];
  /** The version that was read. */
  version: ImageVersion;
  /** The versions that contain the damaged data: this one and others that share it, as `IMAGE@NUMBER`. */
  versions?: string[];
}

/** The options of a verification. */
export interface VerifyRequest {
  /** The most bytes to read from the store per second, greater than 0. Absent: no limit. */
  rate_bytes_s?: number;
  /** Stores and servers that may have intact copies of damaged data: absolute paths of directories on the daemon's host, `s3://BUCKET/PREFIX`, `https://HOST[,https://HOST..]`. The first one that has a copy is used. Servers get the daemon's token only if all servers of a list were named when the daemon was started. */
  repair_from?: string[];
}

/** The wanted state of a machine. */
export type Wanted = "running" | "stopped";
