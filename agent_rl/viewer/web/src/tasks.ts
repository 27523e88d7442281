/** What an evaluation says of one task. */

import { number, percent } from "./text";
import type { Evaluation, Outcome } from "./types";

export function verdictOf({ graded, resolved }: Outcome): string {
  if (!graded) return "not graded";
  if (graded > 1) return `${resolved} of ${graded} resolved`;
  return resolved ? "resolved" : "not resolved";
}

/** Green, red, or neither for a task that some samples resolved. */
export function shadeOf({ graded, resolved }: Outcome): string {
  return !graded ? "none" : resolved === graded ? "good" : resolved ? "some" : "bad";
}

export function mean(values: number[]): number | null {
  return values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
}

export function secondsOf({ seconds_mean, samples }: Outcome): number | null {
  return seconds_mean ?? mean(samples.map(({ seconds }) => seconds));
}

/** Tokens of a task's trajectories; null where an evaluation keeps none. */
export function tokensOf({ samples }: Outcome): number | null {
  return mean(samples.flatMap(({ tokens }) => (tokens === null ? [] : [tokens])));
}

/** `39 of 64 tasks`, and of how many the evaluation could have had, where it says so. */
export function denominator({ tasks, graded, available, requested }: Evaluation): string {
  const of = `${number(graded)} of ${number(tasks)} tasks graded`;
  const known = available === null ? "" : `; ${number(available)} available`;
  return `${of}${known}${requested === null ? "" : `, ${number(requested)} requested`}`;
}

export function interval({ interval: bounds }: Evaluation): string {
  return bounds ? bounds.map(percent).join(" to ") : "–";
}

/** The name of an evaluation: its directory's, or the run's and its key. */
export function titleOf(run: string, key: string): string {
  return key === "eval" ? run : `${run} ${key}`;
}
