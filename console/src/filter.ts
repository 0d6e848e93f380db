// The filter of the list of machines: words that all match, in any of a machine's names.

import type { Machine } from "./api";

/** Whether a machine matches. `state:` and `version:` ask for one property, other words for a part of any. */
export function matches(machine: Machine, query: string): boolean {
  return query
    .toLowerCase()
    .split(/\s+/)
    .filter(Boolean)
    .every((term) => (term.startsWith("-") && term.length > 1 ? !has(machine, term.slice(1)) : has(machine, term)));
}

function has(machine: Machine, term: string): boolean {
  const [, key, value] = /^(state|version):(.*)$/.exec(term) ?? [];
  if (key === "state") return machine.state.startsWith(value ?? "");
  if (key === "version") return value === "old" ? machine.old : (machine.version ?? "").toLowerCase().includes(value ?? "");
  const texts = [machine.name, machine.image, machine.version ?? "", machine.catalog ?? "", machine.state];
  return texts.some((text) => text.toLowerCase().includes(term));
}
