// A list of the daemon that is fetched while a screen shows it, and again after each event that may have changed it.

import type { Problem } from "./api";

export class Watched<T> {
  /** The last answer. It stays when a later request fails. */
  value = $state.raw<T | null>(null);
  /** Why the last request failed. */
  problem = $state<Problem | null>(null);
  /** When the last answer came. */
  asOf = $state(0);

  #watchers = 0;
  #isStale = true;
  #isFetching = false;

  constructor(readonly fetch: () => Promise<T>) {}

  /** Keeps the list current until the result is called. For `$effect`. */
  watch(): () => void {
    this.#watchers += 1;
    void this.#refresh();
    return () => (this.#watchers -= 1);
  }

  /** Fetches the list again, now or when a screen shows it. */
  invalidate(): Promise<void> {
    this.#isStale = true;
    return this.#refresh();
  }

  /** Forgets the list. */
  clear(): void {
    this.value = null;
    this.problem = null;
    this.#isStale = true;
  }

  async #refresh(): Promise<void> {
    if (this.#isFetching) return;
    this.#isFetching = true;
    // A change during a request makes its answer stale.
    while (this.#isStale && this.#watchers > 0) {
      this.#isStale = false;
      try {
        this.value = await this.fetch();
        this.asOf = Date.now();
        this.problem = null;
      } catch (error) {
        this.problem = error as Problem;
        this.#isStale = true;
        break;
      }
    }
    this.#isFetching = false;
  }
}
