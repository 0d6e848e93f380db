// Messages about actions that are over: failures, which stay until they are dismissed, and words for screen readers.

import { Problem } from "./api";

class Notices {
  failures = $state.raw<{ command: string; problem: Problem }[]>([]);
  said = $state("");

  fail(command: string, error: unknown): void {
    this.dismiss(command);
    this.failures = [...this.failures, { command, problem: asProblem(error) }];
  }

  dismiss(command: string): void {
    this.failures = this.failures.filter((failure) => failure.command !== command);
  }

  say(text: string): void {
    this.said = text;
  }
}

export const asProblem = (error: unknown) => (error instanceof Problem ? error : new Problem("failed", String(error)));

export const notices = new Notices();
