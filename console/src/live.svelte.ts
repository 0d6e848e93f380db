// What the daemon knows, kept current: one long poll for events, a refetch of what they changed, and the figures every few seconds.
// Nothing is asked while the tab is hidden or the user has paused it.

import * as api from "./api";
import { filtered } from "./filtered.svelte";
import { isOn } from "./format";
import { tasks } from "./tasks.svelte";
import type { Catalog, Event, ImageList, Machine, Role, Status } from "./types";
import { Watched } from "./watched.svelte";

const WAIT_S = 30;
const FIGURES_MS = 5_000;
/** How often the progress of tasks is fetched. */
const PROGRESS_MS = 1_000;
/** A fetch of the figures takes at most this part of the time: a long list is fetched less often. */
const FIGURES_SHARE = 1 / 20;
const RETRY_MAX_MS = 15_000;
const EVENTS_KEPT = 60;
const SAMPLES_KEPT = 120;
/** More changed machines than this are fetched as a list. */
const SINGLE_FETCHES_MAX = 4;

const ROLES: Role[] = ["metrics", "viewer", "operator", "admin"];

export type Phase = "signed-out" | "loading" | "live" | "stale" | "ended";

/** What a machine does while a request changes it. */
export const ADVERBS: Record<api.Verb, string> = { start: "starting", stop: "stopping", reset: "resetting" };

const pause = (ms: number) => new Promise((done) => setTimeout(done, ms));

class Live {
  phase = $state<Phase>("signed-out");
  session = $state<api.Session | null>(null);
  status = $state.raw<Status | null>(null);
  machines = $state.raw<Machine[]>([]);
  /** Whether these are all: a long list takes longer than the first figures. */
  isListed = $state(false);
  events = $state.raw<Event[]>([]);
  images = new Watched<ImageList>(api.getImages);
  catalogs = new Watched<Catalog[]>(api.getCatalogs);
  /** Requests a second of all machines, oldest first. */
  iops = $state.raw<number[]>([]);
  /** When the figures were current. */
  asOf = $state(0);
  /** Why they are not, or why there is no session. */
  problem = $state<api.Problem | null>(null);
  retryAt = $state(0);
  paused = $state(false);
  /** The machines that a request of this page changes, with what it does. */
  pending = $state<Record<string, api.Verb>>({});

  #abort = new AbortController();
  #wake: () => void = () => {};
  #failures = 0;

  constructor() {
    document.addEventListener("visibilitychange", () => this.#interrupt());
  }

  /** Whether the session has a role, or one that may do more. */
  has(role: Role): boolean {
    return ROLES.indexOf(this.session?.role ?? "metrics") >= ROLES.indexOf(role);
  }

  /** Why the page may not do now what needs a role. */
  refusal(role: Role): string | null {
    if (!this.has(role)) return `your session has the role ${this.session?.role}, and this needs ${role}`;
    return this.phase === "stale" ? "the daemon does not answer" : null;
  }

  /** Goes on with the session that a link or a login opens. */
  async open(opening: Promise<api.Session>): Promise<void> {
    this.phase = "loading";
    try {
      this.session = await opening;
    } catch (error) {
      this.problem = error as api.Problem;
      this.phase = "signed-out";
      return;
    }
    this.#begin();
  }

  /** Goes on with a named token in place of a session. */
  async signIn(token: string): Promise<void> {
    this.problem = null;
    try {
      this.session = await api.useToken(token);
    } catch (error) {
      this.problem = error as api.Problem;
      return;
    }
    this.phase = "loading";
    this.#begin();
  }

  /** Leaves the page for the identity provider. */
  async logIn(): Promise<void> {
    this.problem = null;
    try {
      await api.beginLogin();
    } catch (error) {
      this.problem = error as api.Problem;
    }
  }

  #begin(): void {
    void this.#follow();
    void this.#measure();
    void this.#followTasks();
  }

  async close(): Promise<void> {
    this.#end(null);
    await api.closeSession().catch(() => undefined);
  }

  togglePause(): void {
    this.paused = !this.paused;
    this.#interrupt();
  }

  /** Tries again at once. */
  retry(): void {
    this.#interrupt();
  }

  async change(name: string, verb: api.Verb): Promise<void> {
    this.pending[name] = verb;
    try {
      this.#put(await api.changeMachine(name, verb));
    } finally {
      delete this.pending[name];
      void this.#refetch([name]).catch(() => undefined);
    }
  }

  /** Begins a long operation and follows its task. */
  async begin(operation: Promise<number>): Promise<void> {
    const id = await operation;
    if (await tasks.begun(id)) this.#changed();
  }

  /** Fetches again what a change of this page may have changed: its event comes later. */
  #changed(): void {
    void Promise.all([this.images.invalidate(), this.catalogs.invalidate(), this.#fetchMachines()]).catch(() => undefined);
  }

  /** Makes a change that is not of one machine. */
  async make(change: Promise<unknown>): Promise<void> {
    await change;
    this.#changed();
  }

  get #isOpen(): boolean {
    return this.phase !== "signed-out" && this.phase !== "ended";
  }

  get #isQuiet(): boolean {
    return document.hidden || this.paused;
  }

  #end(problem: api.Problem | null): void {
    this.phase = problem ? "ended" : "signed-out";
    this.problem = problem;
    this.session = null;
    this.status = null;
    this.machines = [];
    this.isListed = false;
    this.events = [];
    this.images.clear();
    this.catalogs.clear();
    tasks.clear();
    this.#interrupt();
  }

  #interrupt(): void {
    this.#abort.abort();
    this.#abort = new AbortController();
    this.#wake();
  }

  async #sleep(ms: number): Promise<void> {
    await Promise.race([pause(ms), new Promise<void>((wake) => (this.#wake = wake))]);
  }

  /** Follows the events until the session ends. */
  async #follow(): Promise<void> {
    let isCurrent = false;
    while (this.#isOpen) {
      if (this.#isQuiet) {
        isCurrent = false;
        await new Promise<void>((wake) => (this.#wake = wake));
        continue;
      }
      try {
        if (!isCurrent) await this.#fetchAll();
        isCurrent = true;
        this.#succeeded();
        await this.#nextEvents();
        this.#succeeded();
      } catch (error) {
        isCurrent = isCurrent && (error as api.Problem).kind === "aborted";
        await this.#failed(error as api.Problem);
      }
    }
  }

  async #nextEvents(): Promise<void> {
    const asked = performance.now();
    const events = await api.waitForEvents(this.events[0]?.id ?? 0, WAIT_S, this.#abort.signal);
    if (events.length === 0) {
      // A daemon that stops answers at once.
      if (performance.now() - asked < 1_000) await pause(1_000);
      return;
    }
    this.events = [...events.reverse(), ...this.events].slice(0, EVENTS_KEPT);
    const subjects = new Set(events.map((event) => event.subject));
    const isOf = (kind: string) => [...subjects].some((subject) => subject.startsWith(kind));
    if (isOf("image ")) void this.images.invalidate();
    if (isOf("image ") || isOf("catalog ") || isOf("machine ")) void this.catalogs.invalidate();
    const names = [...subjects].flatMap((it) => (it.startsWith("machine ") ? [it.slice("machine ".length)] : []));
    // An event of an image or of a catalog may change the version that machines boot next.
    const isAll = names.length < subjects.size;
    await Promise.all([this.#fetchHost(), isAll ? this.#fetchMachines() : this.#refetch(names)]);
  }

  async #fetchAll(): Promise<void> {
    // First: a change after the newest of them is told by the long poll, and the others are in the answers that follow.
    this.events = await api.getEvents(`limit=${EVENTS_KEPT}`);
    void this.images.invalidate();
    void this.catalogs.invalidate();
    const listing = this.#fetchMachines();
    // A failure of both is that of the first.
    listing.catch(() => undefined);
    await this.#fetchHost();
    this.#succeeded();
    await listing;
  }

  async #fetchHost(): Promise<void> {
    const [status, hasTaskEnded] = await Promise.all([api.getStatus(), tasks.refresh()]);
    this.status = status;
    if (hasTaskEnded) this.#changed();
  }

  async #fetchMachines(): Promise<void> {
    this.machines = await api.getMachines();
    this.isListed = true;
    const sum = this.machines.reduce((all, machine) => all + (machine.disk?.iops ?? 0), 0);
    this.iops = [...this.iops, sum].slice(-SAMPLES_KEPT);
    await filtered.refetch();
  }

  async #refetch(names: string[]): Promise<void> {
    if (names.length > SINGLE_FETCHES_MAX) return this.#fetchMachines();
    await Promise.all(
      names.map(async (name) => {
        try {
          this.#put(await api.getMachine(name));
        } catch (error) {
          if ((error as api.Problem).kind !== "not_found") throw error;
          this.machines = this.machines.filter((machine) => machine.name !== name);
        }
      }),
    );
    await filtered.refetch();
  }

  #put(machine: Machine): void {
    const at = this.machines.findIndex((other) => other.name === machine.name);
    // A new machine has its place in the order of the daemon.
    if (at < 0) void this.#fetchMachines().catch(() => undefined);
    else this.machines = this.machines.with(at, { ...machine, next_version: machine.next_version ?? this.machines[at]?.next_version } as Machine);
  }

  /** Fetches the figures every few seconds while a machine is on or a task runs: these have no events. */
  async #measure(): Promise<void> {
    let wait_ms = FIGURES_MS;
    while (this.#isOpen) {
      await pause(wait_ms);
      const moves = tasks.unended.length > 0 || this.machines.some((machine) => isOn(machine.state));
      if (this.#isQuiet || this.phase !== "live" || !moves) continue;
      const asked = performance.now();
      try {
        await Promise.all([this.#fetchHost(), this.#fetchMachines()]);
        this.#succeeded();
      } catch {
        // The long poll finds out too, and says so.
      }
      wait_ms = Math.max(FIGURES_MS, (performance.now() - asked) / FIGURES_SHARE);
    }
  }

  /** Fetches the progress of tasks while there are any. */
  async #followTasks(): Promise<void> {
    while (this.#isOpen) {
      await pause(PROGRESS_MS);
      if (this.#isQuiet || this.phase !== "live" || tasks.unended.length === 0) continue;
      try {
        if (await tasks.refresh()) this.#changed();
      } catch {
        // The long poll finds out too, and says so.
      }
    }
  }

  #succeeded(): void {
    if (!this.#isOpen) return;
    this.#failures = 0;
    this.phase = "live";
    this.problem = null;
    this.asOf = Date.now();
  }

  async #failed(problem: api.Problem): Promise<void> {
    if (problem.kind === "aborted" || !this.#isOpen) return;
    if (problem.kind === "unauthorized") return this.#end(problem);
    this.#failures += 1;
    this.problem = problem;
    this.phase = this.status ? "stale" : "loading";
    // Many open pages do not come back at the same moment.
    const wait_ms = Math.min(RETRY_MAX_MS, 500 * 2 ** this.#failures) * (0.75 + Math.random() / 2);
    this.retryAt = Date.now() + wait_ms;
    await this.#sleep(wait_ms);
  }
}

export const live = new Live();
