// Tasks: which ones run, and how those ended that this page has seen running.

import * as api from "./api";
import type { Task } from "./types";

const ENDED_KEPT = 50;

export const hasEnded = (task: Task) => task.state !== "waiting" && task.state !== "running";

class Tasks {
  unended = $state.raw<Task[]>([]);
  /** Newest first. */
  ended = $state.raw<Task[]>([]);

  /** Tasks that this page began and that no answer has had yet. */
  #begun = new Set<number>();

  /** Follows a task that this page has begun. */
  begun(id: number): Promise<boolean> {
    this.#begun.add(id);
    return this.refresh();
  }

  /** Fetches the tasks that have not ended. Gives whether one has ended since the last time. */
  async refresh(): Promise<boolean> {
    const before = new Set([...this.unended.map((task) => task.id), ...this.#begun]);
    const unended = await api.getTasks("unended=true&limit=50");
    for (const task of unended) before.delete(task.id);
    this.unended = unended;
    // A task that runs replaces the earlier ones on the same subject.
    this.ended = this.ended.filter((task) => !unended.some((other) => other.subject === task.subject));
    if (before.size === 0) return false;
    const found = await Promise.all([...before].map((id) => api.getTask(id)));
    for (const id of before) this.#begun.delete(id);
    const ended = found.filter((task) => hasEnded(task) && !this.ended.some((other) => other.id === task.id));
    this.ended = [...ended, ...this.ended].slice(0, ENDED_KEPT);
    return ended.length > 0;
  }

  async cancel(id: number): Promise<void> {
    const task = await api.cancelTask(id);
    this.unended = this.unended.map((other) => (other.id === id ? task : other));
  }

  /** Those on a subject, or on all subjects of a kind: `catalog class`, `image `. */
  of(subject: string): Task[] {
    // A version of an image is a part of it.
    const isMatch = (task: Task) =>
      subject.endsWith(" ") ? task.subject.startsWith(subject) : task.subject === subject || task.subject.startsWith(`${subject}@`);
    return [...this.unended, ...this.ended].filter(isMatch);
  }

  dismiss(id: number): void {
    this.ended = this.ended.filter((task) => task.id !== id);
  }

  clear(): void {
    this.unended = [];
    this.ended = [];
    this.#begun.clear();
  }
}

export const tasks = new Tasks();
