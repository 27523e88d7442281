/** The trajectories of one group: where they part, and side by side. */

import { useMemo } from "preact/hooks";
import { type Loaded, stepOf, useResource } from "./data";
import { Outcome, Resource } from "./parts";
import { type PrefixTree, prefixTree } from "./prefix_tree";
import { link, route } from "./route";
import { number, oneLine, plural, visible } from "./text";
import type { Step, Trajectory } from "./types";

export function GroupPage() {
  const [, run, n, group] = route.value.path;
  const loaded = useResource<Step>(`${run}/steps/${n}`);
  return (
    <main id="main" class="page wide">
      <Resource of={loaded}>
        {(step) => {
          const found = step.groups.find((one) => one.group === Number(group));
          if (!found) return <p class="note bad">{`There is no group ${visible(group)} in ${visible(n)}.`}</p>;
          return (
            <>
              <h1>{visible(found.task)}</h1>
              <p>
                Group {group} of <a href={link(["step", run, n])}>{n}</a>: {found.members.length} trajectories,{" "}
                {found.trained ? "trained on" : "not trained on"}
              </p>
              <Members key={found.members.join()} run={run} ids={found.members} />
            </>
          );
        }}
      </Resource>
    </main>
  );
}

function Members({ run, ids }: { run: string; ids: string[] }) {
  const loaded = ids.map((id) => useResource<Trajectory>(`${run}/t/${id}`, stepOf(run, id)));
  const values = loaded.map(({ value }) => value);
  const known = values.every((value) => value !== null);
  return (
    <>
      {known && ids.length > 1 && <Divergence run={run} values={values} />}
      <div class="side" tabIndex={0} role="region" aria-label="Trajectories side by side">
        {ids.map((id, i) => (
          <Member key={id} run={run} id={id} loaded={loaded[i]} />
        ))}
      </div>
    </>
  );
}

interface Parting {
  run: string;
  /** The trajectories by their ids. */
  of: Map<string, Trajectory>;
  /** Whether the tree counts tokens; without tokens it counts turns. */
  tokens: boolean;
}

/** The samples as a tree: they agree down to a fork, and part there. */
function Divergence({ run, values }: { run: string; values: Trajectory[] }) {
  const tokens = values.every(({ branches }) => branches[0]?.tokens.length);
  const tree = useMemo(() => prefixTree(values.map((value) => ({ id: value.id, units: unitsOf(value, tokens) }))), values);
  const parting = { run, of: new Map(values.map((value) => [value.id, value])), tokens };
  return (
    <section aria-label="Where the samples part">
      <h2>Where the samples part</h2>
      <ul class="tree">
        <Fork {...parting} tree={tree} start={0} />
      </ul>
    </section>
  );
}

function unitsOf({ branches, turns }: Trajectory, tokens: boolean): ArrayLike<number | string> {
  return tokens ? branches[0].tokens : turns.map(({ text }) => text);
}

function Fork({ tree, start, ...parting }: Parting & { tree: PrefixTree; start: number }) {
  const { members, end, children } = tree;
  const first = parting.of.get(members[0])!;
  const resolved = members.filter((id) => parting.of.get(id)!.resolved).length;
  const unit = parting.tokens ? "token" : "turn";
  const parts = `agree on ${plural(end, unit)} and part in ${turnAt(first, parting.tokens, end)}`;
  return (
    <li>
      {start > 0 && <code>{excerpt(first, parting.tokens, start)}</code>}{" "}
      {members.length > 1 && `${plural(members.length, "sample")}, ${resolved} resolved, ${children.length ? parts : "are the same:"} `}
      {!children.length && members.map((id) => <Leaf key={id} {...parting} id={id} start={start} />)}
      {children.length > 0 && (
        <ul>
          {children.map((child) => (
            <Fork key={child.members[0]} {...parting} tree={child} start={end} />
          ))}
        </ul>
      )}
    </li>
  );
}

function Leaf({ run, of, tokens, id, start }: Parting & { id: string; start: number }) {
  const value = of.get(id)!;
  const place = tokens ? { view: "tokens", token: String(Math.min(start, value.branches[0].tokens.length - 1)) } : undefined;
  return (
    <span class="leaf">
      <a href={link(["t", run, id], place)}>{id}</a> <Outcome {...value} />
    </span>
  );
}

/** The turn that a token belongs to: the last that began before it. */
function turnAt({ turns, branches }: Trajectory, tokens: boolean, unit: number): string {
  if (!tokens) return `turn ${unit + 1}`;
  const own = turns.filter(({ branch, span }) => branch === 0 && span !== null);
  const before = own.filter(({ span }) => span![0] <= unit).length;
  return unit >= branches[0].tokens.length ? "their last turn" : before ? `turn ${before}, token ${unit.toLocaleString("en")}` : "the prompt";
}

const EXCERPT = 60;

/** What a sample goes on with. */
function excerpt({ turns, branches }: Trajectory, tokens: boolean, start: number): string {
  const pieces = branches[0]?.pieces;
  const ids = () => branches[0].tokens.slice(start, start + 12).join(" ");
  const text = tokens ? (pieces ? pieces.slice(start, start + EXCERPT).join("") : ids()) : (turns[start]?.text ?? "");
  return oneLine(text.slice(0, EXCERPT)) || "ends";
}

function Member({ run, id, loaded }: { run: string; id: string; loaded: Loaded<Trajectory> }) {
  return (
    <article class="member-card">
      <h2>
        <a href={link(["t", run, id])}>{id}</a>
      </h2>
      <Resource of={loaded}>
        {(value) => (
          <>
            <p>
              <Outcome {...value} /> reward {number(value.reward)}, advantage {number(value.advantage)}, {value.stop}
            </p>
            <ol>
              {value.turns.map((turn, i) => (
                <li key={i}>
                  <b>{visible(turn.tool ?? "no call")}</b>
                  {Object.entries(turn.arguments).map(([name, argument]) => (
                    <pre key={name}>{visible(`${name}: ${clip(typeof argument === "string" ? argument : JSON.stringify(argument))}`)}</pre>
                  ))}
                  {turn.observation && <pre class={turn.parse_failure ? "bad" : "dim"}>{visible(clip(turn.observation))}</pre>}
                </li>
              ))}
            </ol>
          </>
        )}
      </Resource>
    </article>
  );
}

function clip(text: string): string {
  return text.length > 500 ? `${text.slice(0, 500)} …` : text;
}
