// Which versions the machines of a catalog run.

import { isOn } from "./format";
import type { Machine } from "./types";

export interface VersionCount {
  version: string;
  machines: number;
  on: number;
  /** Whether its machines boot another version next. */
  isOld: boolean;
}

/** How many machines are on each version, the largest first. Machines that never ran have none. */
export function countVersions(machines: Machine[]): VersionCount[] {
  const groups = Map.groupBy(
    machines.filter((machine) => machine.version),
    (machine) => `${machine.version} ${machine.old}`,
  );
  return [...groups.values()]
    .map((group) => ({
      version: group[0]?.version ?? "",
      machines: group.length,
      on: group.filter((machine) => isOn(machine.state)).length,
      isOld: group[0]?.old ?? false,
    }))
    .sort((a, b) => b.machines - a.machines);
}
