// Which screen is shown: the part of the address after the `#`, such as `#/machines?q=running` or `#/images/debian`.

export const SCREENS = ["overview", "machines", "images", "catalogs", "tasks", "history", "server"] as const;
export type Screen = (typeof SCREENS)[number];

interface Place {
  screen: Screen;
  /** The machine, image or catalog that is shown alone. */
  name: string;
  query: string;
}

function read(): Place {
  const [path = "", parameters] = location.hash.slice(1).split("?");
  const [, first = "", name = ""] = path.split("/");
  const screen = SCREENS.find((screen) => screen === first) ?? "overview";
  return { screen, name: decoded(name), query: new URLSearchParams(parameters).get("q") ?? "" };
}

function decoded(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

export const address = (screen: Screen, name = "", query = "") =>
  `#/${screen === "overview" ? "" : screen}${name && `/${encodeURIComponent(name)}`}${query && `?q=${encodeURIComponent(query)}`}`;

class Route {
  #now = $state(read());

  constructor() {
    addEventListener("hashchange", () => (this.#now = read()));
  }

  get screen(): Screen {
    return this.#now.screen;
  }

  get name(): string {
    return this.#now.name;
  }

  get query(): string {
    return this.#now.query;
  }

  /** Changes the filter without a new entry in the browser's history. */
  filter(query: string): void {
    history.replaceState(null, "", address(this.screen, "", query));
    this.#now = read();
  }

  go(screen: Screen, name = ""): void {
    location.hash = address(screen, name);
  }
}

export const machinesWith = (query: string) => address("machines", "", query);

/** The address of what an event is about: `machine desk-1`, `image debian`, `catalog class`. */
export function addressOf(subject: string): string | null {
  const [kind, name = ""] = subject.split(" ");
  if (kind === "machine") return address("machines", name);
  if (kind === "catalog") return address("catalogs", name);
  return kind === "image" ? address("images", name.split(/[:@]/)[0]) : null;
}

export const route = new Route();

/** Takes the answer of an identity provider out of the address: it is not to stay in the browser's history. */
export function takeLogin(): URLSearchParams | null {
  const answer = new URLSearchParams(location.search);
  if (!answer.has("state")) return null;
  history.replaceState(null, "", "/#/");
  return answer;
}

/** Takes the ticket out of the address, likewise. */
export function takeTicket(): string | null {
  const ticket = /^#ticket=(\w+)$/.exec(location.hash)?.[1] ?? null;
  if (ticket) history.replaceState(null, "", "#/");
  return ticket;
}
