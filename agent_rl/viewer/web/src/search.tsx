/** Search in the texts of a step's trajectories, or of all. */

import { useState } from "preact/hooks";
import { useResource } from "./data";
import { Heads, Resource } from "./parts";
import { link, route, setQuery } from "./route";
import { oneLine, plural, visible } from "./text";
import type { Found, Hit, Run } from "./types";

export function SearchPage() {
  const { path, query } = route.value;
  const run = path[1] || "0";
  const [text, n] = [query.get("text") ?? "", query.get("n") ?? ""];
  const asked = text.trim() ? `${run}/search?${new URLSearchParams({ text, n })}` : null;
  const loaded = useResource<Found>(asked);
  return (
    <main id="main" class="page">
      <h1>Search in texts</h1>
      <SearchForm key={text} run={run} text={text} n={n} />
      {asked && <Resource of={loaded}>{(found) => <Hits run={run} text={text} found={found} />}</Resource>}
    </main>
  );
}

function SearchForm({ run, text, n }: { run: string; text: string; n: string }) {
  const filed = useResource<Run>(`${run}/run`).value?.filed ?? [];
  const [typed, setTyped] = useState(text);
  const submit = (event: SubmitEvent) => {
    event.preventDefault();
    setQuery({ text: typed });
  };
  return (
    <form class="filters" role="search" aria-label="Texts" onSubmit={submit}>
      <label>
        text
        <input type="search" maxLength={200} value={typed} onInput={(event) => setTyped(event.currentTarget.value)} />
      </label>
      <label>
        filed under
        <select value={n} onChange={(event) => setQuery({ n: event.currentTarget.value })}>
          <option value="">all</option>
          {filed.map((one) => (
            <option key={one} value={one}>
              {visible(one)}
            </option>
          ))}
        </select>
      </label>
      <button type="submit">Search</button>
    </form>
  );
}

function Hits({ run, text, found }: { run: string; text: string; found: Found }) {
  return (
    <>
      <p role="status">
        {plural(found.hits.length, "hit")}; {found.searched.toLocaleString("en")} of {found.total.toLocaleString("en")} trajectories searched
      </p>
      <div class="scroll" tabIndex={0} role="region" aria-label="Table of hits">
        <table class="hits">
          <thead>
            <Heads names={["trajectory", "task", "place", "text"]} />
          </thead>
          <tbody>
            {found.hits.map((hit, i) => (
              <tr key={i}>
                <td>
                  <a href={link(["t", run, hit.id], { at: placeOf(hit), find: text })}>{hit.id}</a>
                </td>
                <td>{visible(hit.task)}</td>
                <td>{hit.turn === null ? hit.part : `turn ${hit.turn + 1}, ${hit.part === "turn" ? "written" : "output"}`}</td>
                <td>
                  <code>
                    {oneLine(hit.before)}
                    <mark>{oneLine(hit.match)}</mark>
                    {oneLine(hit.after)}
                  </code>
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </>
  );
}

/** The id of the place in the trajectory's page. */
function placeOf({ turn, part }: Hit): string {
  return turn === null ? part : `turn-${turn + 1}`;
}
