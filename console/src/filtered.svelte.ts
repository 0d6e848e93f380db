// Which machines match a filter. The daemon reads the filter; the rows shown stay until it has answered.

import * as api from "./api";

/** How long to wait for the next key before a filter is sent. */
const TYPING_MS = 150;

class Filtered {
  /** The machines that match; all if there is no filter. Undefined before the first answer. */
  names = $state.raw<Set<string> | "all" | undefined>("all");
  /** Why the filter cannot be read. The names are then those of the last filter that could be. */
  problem = $state<api.Problem | null>(null);

  #filter = "";
  #typing = 0;

  /** Begins with a filter: no rows until the daemon has answered. */
  open(filter: string): void {
    if (filter.trim() !== "") this.names = undefined;
    this.set(filter);
  }

  /** Changes the filter. */
  set(filter: string): void {
    if (filter.trim() === this.#filter) return;
    this.#filter = filter.trim();
    clearTimeout(this.#typing);
    if (this.#filter === "") {
      this.names = "all";
      this.problem = null;
    } else {
      this.#typing = setTimeout(() => void this.refetch(), this.names === undefined ? 0 : TYPING_MS);
    }
  }

  /** Asks again, because machines have changed. */
  async refetch(): Promise<void> {
    const filter = this.#filter;
    if (filter === "") return;
    try {
      const found = await api.getMachines(filter);
      if (filter !== this.#filter) return;
      this.names = new Set(found.map((machine) => machine.name));
      this.problem = null;
    } catch (error) {
      // The page says elsewhere that the daemon does not answer.
      if (filter === this.#filter && (error as api.Problem).kind === "invalid") this.problem = error as api.Problem;
    }
  }

  has(name: string): boolean {
    return this.names === "all" || (this.names?.has(name) ?? false);
  }
}

export const filtered = new Filtered();
