/** Where an episode's seconds went: waiting, starting, writing, tools, grading, and what nothing accounts for. */

import { seconds, visible } from "./text";
import type { Trajectory } from "./types";

interface Piece {
  kind: "queue" | "start" | "generate" | "tool" | "grade" | "rest";
  name: string;
  from: number;
  length: number;
}

const NAMES = {
  queue: "waited",
  start: "started the sandbox",
  generate: "wrote",
  tool: "ran tools",
  grade: "was graded",
  rest: "other",
};

/** In order, from the moment it began to wait. Without the turns' own times they follow each other without a gap. */
function pieces({ times, turns }: Trajectory): Piece[] {
  const queue = times.queue ?? 0;
  const found: Piece[] = [
    { kind: "queue", name: NAMES.queue, from: 0, length: queue },
    { kind: "start", name: NAMES.start, from: queue, length: times.start ?? 0 },
  ];
  let now = queue + (times.start ?? 0);
  turns.forEach((turn, i) => {
    const from = turn.began === null ? now : queue + turn.began;
    const ran = from + turn.generate_seconds;
    found.push({ kind: "generate", name: `turn ${i + 1} wrote`, from, length: turn.generate_seconds });
    found.push({ kind: "tool", name: `turn ${i + 1} ran ${visible(turn.tool ?? "nothing")}`, from: ran, length: turn.tool_seconds });
    now = ran + turn.tool_seconds;
  });
  const graded = times.grade_began === null ? now : queue + times.grade_began;
  found.push({ kind: "grade", name: NAMES.grade, from: graded, length: times.grade ?? 0 });
  return found.filter((piece) => piece.length > 0);
}

export function TimeBar({ trajectory }: { trajectory: Trajectory }) {
  const found = pieces(trajectory);
  const end = Math.max(0, ...found.map((piece) => piece.from + piece.length), (trajectory.times.queue ?? 0) + (trajectory.times.total ?? 0));
  if (!end) return null;
  const sums = sumsOf(found, end);
  const share = (length: number) => `${(100 * length) / end}%`;
  return (
    <figure class="times" aria-label={`Time: ${sums.map(([kind, sum]) => `${NAMES[kind]} ${seconds(sum)}`).join(", ")}`}>
      <div class="bar" aria-hidden="true">
        {found.map((piece, i) => (
          <i
            key={i}
            class={piece.kind}
            title={`${piece.name} ${seconds(piece.length)}`}
            style={{ left: share(piece.from), width: share(piece.length) }}
          />
        ))}
      </div>
      <figcaption>
        {sums.map(([kind, sum]) => (
          <span key={kind}>
            <i class={kind} /> {NAMES[kind]} {seconds(sum)}
          </span>
        ))}
        <span>in all {seconds(end)}</span>
      </figcaption>
    </figure>
  );
}

function sumsOf(found: Piece[], end: number): [Piece["kind"], number][] {
  const sums = new Map<Piece["kind"], number>();
  for (const { kind, length } of found) sums.set(kind, (sums.get(kind) ?? 0) + length);
  const rest = end - [...sums.values()].reduce((a, b) => a + b, 0);
  if (rest > 0.01 * end) sums.set("rest", rest);
  return [...sums];
}
