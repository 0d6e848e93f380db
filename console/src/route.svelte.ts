// Which screen is shown: the part of the address after the `#`, such as `#/machines?q=running`.

export type Screen = "overview" | "machines";

function read(): { screen: Screen; query: string } {
  const [path, parameters] = location.hash.slice(1).split("?");
  return { screen: path === "/machines" ? "machines" : "overview", query: new URLSearchParams(parameters).get("q") ?? "" };
}

class Route {
  #now = $state(read());

  constructor() {
    addEventListener("hashchange", () => (this.#now = read()));
  }

  get screen(): Screen {
    return this.#now.screen;
  }

  get query(): string {
    return this.#now.query;
  }

  /** Changes the filter without a new entry in the browser's history. */
  filter(query: string): void {
    history.replaceState(null, "", machinesWith(query));
    this.#now = read();
  }
}

export const machinesWith = (query: string) => `#/machines${query ? `?q=${encodeURIComponent(query)}` : ""}`;

export const route = new Route();

/** Takes the ticket out of the address: it is not to stay in the browser's history. */
export function takeTicket(): string | null {
  const ticket = /^#ticket=(\w+)$/.exec(location.hash)?.[1] ?? null;
  if (ticket) history.replaceState(null, "", "#/");
  return ticket;
}
