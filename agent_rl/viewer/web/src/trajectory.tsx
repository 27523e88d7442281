/** One trajectory: its conversation with coloured tokens, where its time went, its patch, its tests. */

import { useEffect } from "preact/hooks";
import { Chat, Conversation, type View } from "./conversation";
import { live, stepOf, useResource } from "./data";
import { markText } from "./highlights";
import { media } from "./media";
import { Fact, LongText, Outcome, Resource } from "./parts";
import { link, route, setQuery } from "./route";
import { number, plural, visible } from "./text";
import { TimeBar } from "./timebar";
import type { Branch, ModelCall, Run, Trajectory } from "./types";

const VIEWS: Record<View, string> = { chat: "Chat", tokens: "Tokens", both: "Side by side" };
/** Where chat and tokens have room side by side. */
const wide = media("(min-width: 1200px)");

export function TrajectoryPage() {
  const [, run, id] = route.value.path;
  const loaded = useResource<Trajectory>(`${run}/t/${id}`, stepOf(run, id));
  const facts = useResource<Run>(`${run}/run`).value?.facts;
  return (
    <main id="main" class="page">
      <Resource of={loaded}>{(value) => <Whole run={run} value={value} layers={facts?.moe_layers ?? 0} />}</Resource>
    </main>
  );
}

function Whole({ run, value, layers }: { run: string; value: Trajectory; layers: number }) {
  const query = route.value.query;
  const index = Math.max(0, Math.min(Number(query.get("branch") ?? 0), value.branches.length - 1));
  const branch: Branch | undefined = value.branches[index];
  const hasTokens = branch?.tokens.length > 0;
  const view = hasTokens ? viewOf(query) : "chat";
  const [at, find] = [query.get("at"), query.get("find")];
  useEffect(() => (at && find ? markText(document.getElementById(at), find) : undefined), [value, at, find, view]);
  return (
    <>
      <Heading run={run} value={value} />
      <TimeBar trajectory={value} />
      <div class="choices">
        {hasTokens && <Views view={view} />}
        {value.branches.length > 1 && <Branches value={value} index={index} />}
      </div>
      {view === "chat" ? (
        <Chat key={value.id} value={value} index={index} found={at} />
      ) : (
        <Conversation key={`${value.id} ${index}`} {...{ run, value, branch, index, layers, view }} />
      )}
      <Patch patch={value.patch} />
      <Tests value={value} />
      <ModelCalls calls={value.model_calls} />
    </>
  );
}

/** What the address asks for; else both where there is room, and the tokens where it names one. */
function viewOf(query: URLSearchParams): View {
  const asked = query.get("view");
  if (asked && asked in VIEWS) return asked as View;
  return wide.value ? "both" : query.has("by") || query.has("token") ? "tokens" : "chat";
}

function Views({ view }: { view: View }) {
  return (
    <span class="tabs" role="group" aria-label="View">
      {Object.entries(VIEWS).map(([key, name]) => (
        <button key={key} aria-pressed={view === key} onClick={() => setQuery({ view: key })}>
          {name}
        </button>
      ))}
    </span>
  );
}

function Heading({ run, value }: { run: string; value: Trajectory }) {
  const at = value.siblings.indexOf(value.id);
  const sibling = (step: number, name: string) =>
    value.siblings[at + step] && <a href={link(["t", run, value.siblings[at + step]])}>{name}</a>;
  return (
    <header class="heading">
      <h1>{visible(value.task)}</h1>
      <nav aria-label="Around this trajectory">
        <a href={link(["trajectories", run], { n: value.n })}>filed under {value.n}</a>
        <a href={link(["group", run, value.n, value.group])}>group of {value.siblings.length}</a>
        <a href={link(["step", run, value.n])}>expert loads</a>
        {sibling(-1, "← previous of the group")}
        {sibling(1, "next of the group →")}
        {live && <a href={link(["search", run], { n: value.n })}>search in texts</a>}
      </nav>
      <dl class="facts">
        <Fact name="outcome">
          <Outcome {...value} />
        </Fact>
        <Fact name="reward">{number(value.reward)}</Fact>
        {Object.entries({ ...prefixed("reward", value.parts), ...prefixed("env", value.metrics) }).map(([name, part]) => (
          <Fact name={visible(name)} key={name}>
            {number(part)}
          </Fact>
        ))}
        <Fact name="ending">{value.stop}</Fact>
        <Fact name="training_status">{value.training_status ?? "–"}</Fact>
        <Fact name="advantage">{number(value.advantage)}</Fact>
        <Fact name="turns">{value.turns.length}</Fact>
        <Fact name="tokens">{value.branches.reduce((sum, branch) => sum + branch.tokens.length, 0).toLocaleString("en")}</Fact>
        <Fact name="trajectory">{value.id}</Fact>
        {value.hacks.length > 0 && <Fact name="suspected hacks">{visible(value.hacks.join(", "))}</Fact>}
      </dl>
      {value.error && (
        <p class="note bad" id="error">
          {visible(value.error)}
        </p>
      )}
    </header>
  );
}

/** The numbers of a grade by the names of their metrics. */
function prefixed(group: string, numbers: Record<string, number>) {
  return Object.fromEntries(Object.entries(numbers).map(([name, part]) => [`${group}/${name}`, part]));
}

function Branches({ value, index }: { value: Trajectory; index: number }) {
  return (
    <label>
      Branch{" "}
      <select value={index} onChange={(event) => setQuery({ branch: event.currentTarget.value, token: "" })}>
        {value.branches.map((branch, i) => (
          <option value={i} key={i}>
            {i}: {visible(branch.cause)}, {plural(branch.tokens.length, "token")}
            {branch.parent !== null && `, shares ${branch.shared} with ${branch.parent}`}
          </option>
        ))}
      </select>
    </label>
  );
}

function Patch({ patch }: { patch: string }) {
  if (!patch) return null;
  return (
    <section aria-label="Patch" id="patch">
      <h2>Patch</h2>
      <LongText text={patch} name="Patch" first={Infinity} diff />
    </section>
  );
}

function Tests({ value }: { value: Trajectory }) {
  const tests = Object.entries(value.tests);
  if (!tests.length && !value.test_log) return null;
  const passed = tests.filter(([, status]) => status.toLowerCase().startsWith("pass")).length;
  return (
    <section aria-label="Tests" id="test_log">
      <h2>Hidden tests {tests.length > 0 && <span class="dim">{passed} of {tests.length} passed</span>}</h2>
      {tests.length > 0 && (
        <ul class="tests">
          {tests.map(([name, status]) => (
            <li key={name} class={status.toLowerCase().startsWith("pass") ? "good" : "bad"}>
              <b>{visible(status)}</b> {visible(name)}
            </li>
          ))}
        </ul>
      )}
      {value.test_log && <LongText text={value.test_log} name="Log of the tests" />}
    </section>
  );
}

/** What judges and simulated users were sent, and what they answered. */
function ModelCalls({ calls }: { calls: ModelCall[] }) {
  if (!calls.length) return null;
  return (
    <section aria-label="Model calls" id="model_calls">
      <h2>Judges and users</h2>
      {calls.map((call, at) => {
        const name = `${visible(call.client)} ${visible(call.model)}, ${call.cached ? "cached" : `${number(call.seconds)} s`}`;
        const texts = [...call.messages.map((message) => `[${message.role}] ${message.content}`), `[answer] ${call.response}`];
        return (
          <div key={at}>
            <h3>{name}</h3>
            <LongText text={texts.join("\n\n")} name={name} />
          </div>
        );
      })}
    </section>
  );
}
