// The API of the daemon, as far as the console uses it. docs/openapi.json describes all of it.

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
  cache: { mode: "ram" | "ram+disk" | "disk"; ram_bytes: number; disk_bytes: number; persistent: boolean };
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

export interface Task {
  id: number;
  kind: string;
  subject: string;
  caller: string;
  state: "waiting" | "running" | "done" | "failed" | "cancelled";
  cancelling: boolean;
  progress?: { done_bytes: number; total_bytes: number; doing?: string };
  created_at_ms: number;
}

export interface Event {
  id: number;
  at_ms: number;
  caller: string;
  subject: string;
  action: string;
  detail: string;
}

/** Why a request failed: what the daemon said, or that it said nothing. */
export class Problem extends Error {
  constructor(
    readonly kind: string,
    message: string,
    readonly advice = "",
  ) {
    super(message);
  }
}

/** How long an answer may take that is not waited for on purpose. */
const ANSWER_TIMEOUT_MS = 20_000;

/** The secret of the session. It is only here: another page, or this one loaded again, has none. */
let secret = "";

interface Ask {
  method?: string;
  body?: unknown;
  signal?: AbortSignal;
  timeout_ms?: number;
}

/** Asks the daemon. `undefined` is an answer without a body. */
async function ask(path: string, { method = "GET", body, signal, timeout_ms = ANSWER_TIMEOUT_MS }: Ask = {}): Promise<unknown> {
  const headers: Record<string, string> = {};
  if (secret) headers["Authorization"] = `Bearer ${secret}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const limit = timeout_ms > 0 ? [AbortSignal.timeout(timeout_ms)] : [];
  let response: Response;
  let text: string;
  try {
    const request: RequestInit = { method, headers, cache: "no-store", credentials: "omit", redirect: "error" };
    if (body !== undefined) request.body = JSON.stringify(body);
    request.signal = AbortSignal.any([...(signal ? [signal] : []), ...limit]);
    response = await fetch(path, request);
    text = await response.text();
  } catch (error) {
    if (signal?.aborted) throw new Problem("aborted", "nobody waits for this answer any more");
    const late = error instanceof DOMException && error.name === "TimeoutError";
    throw new Problem("unreachable", late ? "the daemon takes too long to answer" : "the daemon does not answer");
  }
  let answer: unknown;
  try {
    answer = text ? JSON.parse(text) : undefined;
  } catch {
    throw new Problem("failed", "the daemon's answer makes no sense: is it of another release? Load the page again");
  }
  if (!response.ok) {
    const told = (answer ?? {}) as { kind?: string; message?: string; advice?: string };
    throw new Problem(told.kind ?? "failed", told.message ?? `the daemon answered ${response.status}`, told.advice);
  }
  return answer;
}

export interface Session {
  principal: string;
  role: Role;
}

/** Opens a session with the ticket of a link. */
export async function openSession(ticket: string): Promise<Session> {
  const opened = (await ask("/session", { method: "POST", body: { ticket } })) as Session & { secret: string };
  secret = opened.secret;
  return { principal: opened.principal, role: opened.role };
}

/** Uses a named token in place of a session. */
export async function useToken(token: string): Promise<Session> {
  secret = token;
  try {
    return (await ask("/api/v1/caller")) as Session;
  } catch (error) {
    secret = "";
    throw error;
  }
}

/** Ends the session. */
export async function closeSession(): Promise<void> {
  try {
    await ask("/session", { method: "DELETE" });
  } finally {
    secret = "";
  }
}

export const getStatus = async () => (await ask("/api/v1/status")) as Status;

export const getMachines = async () => ((await ask("/api/v1/machines")) as { machines: Machine[] }).machines;

export const getMachine = async (name: string) => (await ask(`/api/v1/machines/${encodeURIComponent(name)}`)) as Machine;

export const getTasks = async () => ((await ask("/api/v1/tasks?unended=true&limit=50")) as { tasks: Task[] }).tasks;

export const getEvents = async (limit: number) =>
  ((await ask(`/api/v1/events?limit=${limit}`)) as { events: Event[] }).events;

/** Waits for events after one, oldest first. */
export const waitForEvents = async (after: number, wait_s: number, signal: AbortSignal) =>
  (
    (await ask(`/api/v1/events?after=${after}&wait_s=${wait_s}&limit=200`, {
      signal,
      timeout_ms: (wait_s + 15) * 1000,
    })) as { events: Event[] }
  ).events;

export type Verb = "start" | "stop" | "reset";

/** Changes a machine. That takes as long as the guest takes. */
export const changeMachine = async (name: string, verb: Verb) =>
  (await ask(`/api/v1/machines/${encodeURIComponent(name)}/${verb}`, { method: "POST", timeout_ms: 0 })) as Machine;
