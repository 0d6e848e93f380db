// The progress and the outcome of tasks, in words.

import { bytes, counted } from "./format";
import type { Result, Task } from "./types";

/** How far a task is. */
export function progress(task: Task): string {
  if (task.cancelling) return "ending";
  if (task.state === "waiting") return "waiting for others";
  const { doing, done_bytes, total_bytes } = task.progress ?? { done_bytes: 0, total_bytes: 0 };
  const of = total_bytes > 0 ? `${bytes(done_bytes)} of ${bytes(total_bytes)}` : done_bytes > 0 ? bytes(done_bytes) : "";
  return [doing, doing ? "" : of].filter(Boolean).join(", ") || "running";
}

/** The part of a task that is done, from 0 to 1, if that is known. */
export function share(task: Task): number | null {
  const { doing, done_bytes = 0, total_bytes = 0 } = task.progress ?? {};
  // A roll and a scale count machines in words.
  const [, done, whole] = /^(\d+) of (\d+) machines/.exec(doing ?? "") ?? [];
  if (done !== undefined && whole !== undefined && Number(whole) > 0) return Number(done) / Number(whole);
  return total_bytes > 0 ? done_bytes / total_bytes : null;
}

/** The outcome of a task that has ended. */
export function outcome(task: Task): string {
  if (task.problem) return task.problem.message;
  return task.result ? ofResult(task.result) : task.state;
}

function ofResult(result: Result): string {
  switch (result.kind) {
    case "imported": {
      const name = `${result.version.image}@${result.version.number}`;
      return result.created ? `made ${name}: ${bytes(result.version.stored_bytes)} are new in the store` : `nothing new: ${name} holds the same bytes`;
    }
    case "scaled":
      return `now ${counted(result.count, "machine")}: ${result.created.length} made, ${result.removed.length} removed`;
    case "rolled":
      return `moved ${counted(result.moved.length, "machine")} from ${result.from} to ${result.to}`;
    case "drained":
      return `moved ${counted(result.moved.length, "machine")} from host ${result.host}`;
    case "sealed":
      return `made ${result.version.image}@${result.version.number}`;
    case "exported":
      return `exported ${result.version.image}@${result.version.number}`;
    case "verified":
      return result.damaged_chunks
        ? `${counted(result.damaged_chunks, "damaged chunk")}, ${result.repaired} repaired`
        : `no damage in ${result.version.image}@${result.version.number}`;
    case "pulled":
      return `${counted(result.versions, "version")} pulled, ${result.present} were here`;
    case "compared":
      return `${bytes(result.changed_bytes)} changed`;
    case "published": {
      const { image, version, connection } = result.published;
      return result.created
        ? `published ${image}@${version} with ${connection}: ${bytes(result.sent_bytes)} sent`
        : `${image}@${version} was published with ${connection} before`;
    }
    case "unpublished":
      return `removed ${result.image}@${result.version} from the gallery of ${result.connection}`;
    case "swept":
      return `${counted(result.orphans.length, "unneeded resource")} found with ${result.connection}`;
  }
}

/** The rest of the outcome of a task, a line each. */
export function remarks(task: Task): string[] {
  const { result, problem } = task;
  if (problem) return [...(problem.causes ?? []), ...(problem.advice ? [problem.advice] : [])];
  if (result?.kind === "imported") {
    return [
      ...(result.remarks ?? []),
      ...(result.damaged_chunks ? [`${counted(result.damaged_chunks, "chunk")} in the store had been damaged; older versions need a repair`] : []),
      ...(result.edited_by ? [`machine ${result.edited_by} edits this image over an older version`] : []),
    ];
  }
  if (result?.kind === "published") return result.remarks ?? [];
  if (result?.kind === "rolled") {
    return [
      ...result.failed.map(({ machine, why }) => `${machine} is not healthy: ${why}`),
      ...result.left.map(({ machine, why }) => `${machine} was left alone: ${why}`),
      ...(result.pinned ? [`the catalog is pinned to ${result.to}: promote that version and unpin the catalog to follow its image again`] : []),
    ];
  }
  if (result?.kind === "drained") {
    return [
      ...result.moved.map(({ machine, to }) => `${machine} is on host ${to} now`),
      ...result.left.map(({ machine, why }) => `${machine} was left alone: ${why}`),
    ];
  }
  if (result?.kind === "verified") return result.remarks ?? [];
  return [];
}
