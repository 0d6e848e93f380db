// Requests to the API of the daemon.

import type { CreateMachine, CreateToken, NewToken, PromoteRequest, SealRequest, TokenInfo } from "./generated";
import type { CacheContents, Catalog, CatalogAdvice, Channel, Event, ImageList, Machine, Refusal, Role, Status, Task } from "./types";

/** Why a request failed: what the daemon said, or that it said nothing. */
export class Problem extends Error {
  constructor(
    readonly kind: string,
    message: string,
    readonly advice = "",
    readonly causes: string[] = [],
  ) {
    super(message);
  }
}

/** How long an answer may take that is not waited for on purpose. */
const ANSWER_TIMEOUT_MS = 20_000;

/** How long the answer to a login may take: the daemon asks the identity provider. */
const LOGIN_TIMEOUT_MS = 60_000;

/** The secret of the session. It is only here: another page, or this one loaded again, has none. */
let secret = "";

interface Ask {
  method?: string;
  body?: unknown;
  signal?: AbortSignal;
  timeout_ms?: number;
}

/** The answer to a request that the daemon did not refuse, and its body. */
async function send<T>(path: string, { method = "GET", body, signal, timeout_ms = ANSWER_TIMEOUT_MS }: Ask, read: (response: Response) => Promise<T>): Promise<T> {
  const headers: Record<string, string> = {};
  if (secret) headers["Authorization"] = `Bearer ${secret}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const limit = timeout_ms > 0 ? [AbortSignal.timeout(timeout_ms)] : [];
  let response: Response;
  let refusal = "";
  try {
    const request: RequestInit = { method, headers, cache: "no-store", credentials: "omit", redirect: "error" };
    if (body !== undefined) request.body = JSON.stringify(body);
    request.signal = AbortSignal.any([...(signal ? [signal] : []), ...limit]);
    response = await fetch(path, request);
    if (response.ok) return await read(response);
    refusal = await response.text();
  } catch (error) {
    if (error instanceof Problem) throw error;
    if (signal?.aborted) throw new Problem("aborted", "nobody waits for this answer any more");
    const late = error instanceof DOMException && error.name === "TimeoutError";
    throw new Problem("unreachable", late ? "the daemon takes too long to answer" : "the daemon does not answer");
  }
  const told = (parsed(refusal) ?? {}) as Partial<Refusal>;
  throw new Problem(told.kind ?? "failed", told.message ?? `the daemon answered ${response.status}`, told.advice, told.causes);
}

function parsed(text: string): unknown {
  try {
    return text ? JSON.parse(text) : undefined;
  } catch {
    throw new Problem("failed", "the daemon's answer makes no sense: is it of another release? Load the page again");
  }
}

/** Asks the daemon. `undefined` is an answer without a body. */
const ask = (path: string, request: Ask = {}): Promise<unknown> => send(path, request, async (response) => parsed(await response.text()));

/** Begins a long operation, and gives the number of its task. The task goes on without this request, so its progress is not read. */
const begin = (path: string, body: unknown): Promise<number> =>
  send(path, { method: "POST", body }, async (response) => {
    const task = Number(response.headers.get("headwater-task"));
    void response.body?.cancel().catch(() => undefined);
    return task;
  });

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

/** The URL of the identity provider with which people can log in, if there is one. */
export const loginIssuer = async () => ((await ask("/login")) as { issuer?: string }).issuer;

/** The key in the storage of this tab for a login that was begun. */
const LOGIN = "headwater-login";

/** Where the identity provider sends the browser back. */
const redirect = () => `${location.origin}/`;

/** Goes to the identity provider. The tab keeps what a login needs that comes back to it; alone it opens nothing. */
export async function beginLogin(): Promise<void> {
  const begun = (await ask("/login", { method: "POST", body: { redirect: redirect() } })) as { url: string; state: string; secret: string };
  sessionStorage.setItem(LOGIN, JSON.stringify({ state: begun.state, secret: begun.secret }));
  location.assign(begun.url);
}

/** Finishes a login with what the identity provider sent back. */
export async function finishLogin(answer: URLSearchParams): Promise<Session> {
  const begun = parsed(sessionStorage.getItem(LOGIN) ?? "") as { state: string; secret: string } | undefined;
  sessionStorage.removeItem(LOGIN);
  if (!begun || begun.state !== answer.get("state")) throw new Problem("unauthorized", "this page did not begin this login");
  if (answer.has("error")) {
    const why = `${answer.get("error")} ${answer.get("error_description") ?? ""}`.trim();
    throw new Problem("unauthorized", `the identity provider refuses the login: ${why}`);
  }
  const body = { secret: begun.secret, code: answer.get("code") ?? "", redirect: redirect() };
  const token = (await ask("/login/code", { method: "POST", body, timeout_ms: LOGIN_TIMEOUT_MS })) as NewToken;
  return useToken(token.secret);
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

/** All machines, or those that match a filter of the API, in as many answers as they take. */
export async function getMachines(filter = ""): Promise<Machine[]> {
  const machines: Machine[] = [];
  let after = "";
  for (;;) {
    const query = `filter=${encodeURIComponent(filter)}${after && `&after=${encodeURIComponent(after)}`}`;
    const page = (await ask(`/api/v1/machines?${query}`)) as { machines: Machine[]; next?: string };
    machines.push(...page.machines);
    if (!page.next) return machines;
    after = page.next;
  }
}

const machine = (name: string, rest = "") => `/api/v1/machines/${encodeURIComponent(name)}${rest}`;
const image = (reference: string, rest = "") => `/api/v1/images/${encodeURIComponent(reference)}${rest}`;
const catalog = (name: string, rest = "") => `/api/v1/catalogs/${encodeURIComponent(name)}${rest}`;

export const getMachine = async (name: string) => (await ask(machine(name))) as Machine;

/** A scan that nobody waits for any more ends. */
const SCAN_TIMEOUT_MS = 150_000;

/** Who fills a machine's write cache. */
export const getContents = async (name: string, signal: AbortSignal) => (await ask(machine(name, "/cache/contents"), { signal, timeout_ms: SCAN_TIMEOUT_MS })) as CacheContents;

export const getImages = async () => (await ask("/api/v1/images")) as ImageList;

export const getCatalogs = async () => ((await ask("/api/v1/catalogs")) as { catalogs: Catalog[] }).catalogs;

export const getAdvice = async (catalog: string) => (await ask(`/api/v1/catalogs/${encodeURIComponent(catalog)}/advice`)) as CatalogAdvice;

/** A page of tasks, newest first; `before` has those that are older than a task. */
export const getTasks = async (query: string) => ((await ask(`/api/v1/tasks?${query}`)) as { tasks: Task[] }).tasks;

export const getTask = async (id: number) => (await ask(`/api/v1/tasks/${id}`)) as Task;

export const cancelTask = async (id: number) => (await ask(`/api/v1/tasks/${id}/cancel`, { method: "POST" })) as Task;

/** Events, newest first, or oldest first if `query` has `after`. */
export const getEvents = async (query: string) => ((await ask(`/api/v1/events?${query}`)) as { events: Event[] }).events;

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
  (await ask(machine(name, `/${verb}`), { method: "POST", timeout_ms: 0 })) as Machine;

const post = (path: string, body: unknown) => ask(path, { method: "POST", body });

export const setMachine = (name: string, body: unknown) => ask(machine(name), { method: "PATCH", body }) as Promise<Machine>;

/** What a machine printed on its serial console since its last start. */
export const getConsole = (name: string) => send(machine(name, "/console"), {}, (response) => response.text());

/** A ticket for the terminal on a machine's console, valid once. */
export const consoleTicket = async (name: string) => ((await ask(machine(name, "/console/ticket"), { method: "POST" })) as { ticket: string }).ticket;

export const displayTicket = async (name: string) => ((await ask(machine(name, "/display/ticket"), { method: "POST" })) as { ticket: string }).ticket;

export const getScreenshot = (name: string) => send(machine(name, "/screenshot"), {}, (response) => response.blob());

/** Makes a machine; it is not started. */
export const createMachine = (body: CreateMachine) => post("/api/v1/machines", body) as Promise<Machine>;
export const removeMachine = (name: string) => ask(machine(name), { method: "DELETE", timeout_ms: 0 });
export const sealMachine = (name: string, body: SealRequest) => begin(machine(name, "/seal"), body);

export const importImage = (body: unknown) => begin("/api/v1/images", body);
export const promote = (version: string, body: PromoteRequest) => post(image(version, "/promotion"), body);
export const forgetPromotion = (name: string, channel: Channel) => ask(image(name, `/promotion?channel=${channel}`), { method: "DELETE" });
export const revert = (name: string, channel: Channel) => post(image(name, "/revert"), { channel });
export const retire = (version: string, retired: boolean) => post(image(version, "/retire"), { retired });
export const setNote = (version: string, note: string) => post(image(version, "/note"), { note });
export const removeImage = (reference: string, force: boolean) => ask(image(reference, force ? "?force=true" : ""), { method: "DELETE" });

export const verify = (version: string) => begin(image(version, "/verify"), {});
export const editImage = (name: string, machine: string) => post(image(name, "/edit"), { machine });
export const sealImage = (name: string, body: SealRequest) => begin(image(name, "/seal"), body);
export const discardSession = (name: string) => ask(image(name, "/edit"), { method: "DELETE" });

export const getTokens = async () => ((await ask("/api/v1/tokens")) as { tokens: TokenInfo[] }).tokens;
export const createToken = (body: CreateToken) => post("/api/v1/tokens", body) as Promise<NewToken>;
export const revokeToken = (name: string) => ask(`/api/v1/tokens/${encodeURIComponent(name)}`, { method: "DELETE" });

export const createCatalog = (body: unknown) => post("/api/v1/catalogs", body);
export const setCatalog = (name: string, body: { image: string }) => ask(catalog(name), { method: "PATCH", body });
export const removeCatalog = (name: string) => ask(catalog(name), { method: "DELETE" });
export const pinCatalog = (name: string, version: string) => ask(catalog(name, "/pin"), { method: "PUT", body: { version } });
export const unpinCatalog = (name: string) => ask(catalog(name, "/pin"), { method: "DELETE" });
export const scaleCatalog = (name: string, body: unknown) => begin(catalog(name, "/scale"), body);
export const rollCatalog = (name: string, body: unknown) => begin(catalog(name, "/roll"), body);
