/** Two trajectories side by side, turn by turn. */

import type { ComponentChildren } from "preact";
import { ChatPrompt, ChatTurn } from "./chat";
import { type Loaded, stepOf, useResource } from "./data";
import { LongText, Outcome, Resource } from "./parts";
import { link, route } from "./route";
import { number, plural, seconds, visible } from "./text";
import type { Runs, Trajectory } from "./types";

export function PairPage() {
  const [, run, id, otherRun, otherId] = route.value.path;
  const left = useResource<Trajectory>(`${run}/t/${id}`, stepOf(run, id));
  const right = useResource<Trajectory>(`${otherRun}/t/${otherId}`, stepOf(otherRun, otherId));
  const names = useResource<Runs>("runs").value?.runs.map(({ name }) => name) ?? [];
  const tasks = [...new Set([left, right].flatMap(({ value }) => (value ? [value.task] : [])))];
  const sides = [
    { run, loaded: left, name: names[Number(run)] },
    { run: otherRun, loaded: right, name: names[Number(otherRun)] },
  ];
  return (
    <main id="main" class="page wide">
      <h1>{tasks.length ? visible(tasks.join(" and ")) : "Two trajectories"}</h1>
      <div class="row both">
        {sides.map((side, i) => (
          <Head key={i} {...side} />
        ))}
      </div>
      {left.value && right.value && <Turns left={left.value} right={right.value} />}
    </main>
  );
}

function Head({ run, loaded, name }: { run: string; loaded: Loaded<Trajectory>; name: string | undefined }) {
  return (
    <div class="cell">
      <Resource of={loaded}>
        {(value) => (
          <p>
            <a href={link(["t", run, value.id])}>{`${visible(name ?? run)} ${value.id}`}</a> <Outcome {...value} /> reward{" "}
            {number(value.reward)}, {plural(value.turns.length, "turn")}, {value.stop}, {seconds(value.times.total)}
          </p>
        )}
      </Resource>
    </div>
  );
}

function Turns({ left, right }: { left: Trajectory; right: Trajectory }) {
  const count = Math.max(left.turns.length, right.turns.length);
  const parting = Array.from({ length: count }, (_, i) => i).find((i) => left.turns[i]?.text !== right.turns[i]?.text);
  return (
    <>
      <p class="note">{sameUntil(parting)}</p>
      <Row left={<ChatPrompt trajectory={left} open={false} />} right={<ChatPrompt trajectory={right} open={false} />} />
      {Array.from({ length: count }, (_, i) => (
        <Row
          key={i}
          left={left.turns[i] && <ChatTurn turn={left.turns[i]} number={i + 1} />}
          right={right.turns[i] && <ChatTurn turn={right.turns[i]} number={i + 1} />}
        />
      ))}
      <Row left={<PatchOf value={left} />} right={<PatchOf value={right} />} />
    </>
  );
}

function sameUntil(turn: number | undefined): string {
  if (turn === undefined) return "All turns are the same.";
  return `They differ from turn ${turn + 1} on.`;
}

function PatchOf({ value }: { value: Trajectory }) {
  return (
    <>
      <h2>Patch</h2>
      {value.patch ? <LongText text={value.patch} name={`Patch of ${value.id}`} diff /> : <p class="dim">none</p>}
    </>
  );
}

function Row({ left, right }: { left: ComponentChildren; right: ComponentChildren }) {
  return (
    <div class="row both">
      <div class="cell chat">{left}</div>
      <div class="cell chat">{right}</div>
    </div>
  );
}
