/** Where the page's data comes from: the server, a folder beside the page, or the page's own file. */

import { signal } from "@preact/signals";
import { useEffect, useState } from "preact/hooks";
import type { Failure } from "./types";

const source = document.querySelector<HTMLMetaElement>('meta[name="agent-rl-source"]')?.content ?? "api";
export const live = source === "api";
export const connected = signal<boolean | null>(null);

/** How often each resource has changed since the page was opened. */
const revisions = signal<ReadonlyMap<string, number>>(new Map());
/** How often all was to be read again: what changed while no tab listened is not known. */
const epoch = signal(0);

export interface Loaded<T> {
  value: T | null;
  error: string | null;
}

/** The resource at `path`. Rejects with a line for people where there is none. */
export async function get<T>(path: string): Promise<T> {
  const value = source === "embedded" ? await embedded(path) : await fetched(path);
  const error = (value as { error?: string | Failure }).error;
  if (error && typeof error === "object") throw new Error(error.text);
  return value as T;
}

async function fetched(path: string): Promise<unknown> {
  const answer = await fetch(live ? `api/${path}` : `data/${path}.json`).catch(() => null);
  if (!answer) throw new Error("The server does not answer. Is agent-rl view still running?");
  const isJson = answer.headers.get("content-type")?.startsWith("application/json");
  if (!isJson) throw new Error(live ? `The server answered ${answer.status}.` : notExported(path));
  return answer.json();
}

function notExported(path: string): string {
  return `${path} is not in this export; agent-rl view RUN shows all of it.`;
}

async function embedded(path: string): Promise<unknown> {
  const held = document.getElementById(`data:${path}`);
  if (!held) throw new Error(notExported(path));
  const packed = Uint8Array.from(atob(held.textContent ?? ""), (letter) => letter.charCodeAt(0));
  const plain = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(plain).json();
}

/** The step or evaluation that trajectory `id` is part of. */
export function stepOf(run: string, id: string): string {
  return `${run}/steps/${id.slice(0, id.lastIndexOf("-"))}`;
}

interface Held<T> extends Loaded<T> {
  path: string | null;
}

/** The resource at `path` (none while null), read again when it changes, or when what it is `part` of does; what it was
 * stays until then, and after a failure. */
export function useResource<T>(path: string | null, part = path): Loaded<T> {
  const [held, hold] = useState<Held<T>>({ path: null, value: null, error: null });
  const revision = part === null ? 0 : (revisions.value.get(part) ?? 0);
  useEffect(() => {
    if (path === null) return;
    let wanted = true;
    get<T>(path).then(
      (value) => wanted && hold({ path, value, error: null }),
      ({ message }: Error) =>
        wanted && hold((before) => ({ path, value: before.path === path ? before.value : null, error: message })),
    );
    return () => {
      wanted = false;
    };
  }, [path, revision, epoch.value]);
  return held.path === path ? held : { value: null, error: null };
}

function changed(paths: string[]): void {
  const next = new Map(revisions.peek());
  for (const path of paths) next.set(path, (next.get(path) ?? 0) + 1);
  revisions.value = next;
}

/** What the tab that listens tells the others. `opened`: it listens from now on; what came before, it may have missed. */
interface News {
  paths?: string[];
  connected?: boolean;
  opened?: boolean;
}

/** Hear of changes for as long as the tab is open. A browser opens few connections to one server, so of all tabs only
 * the one that holds the lock listens, and hands on what it hears. */
export function hearChanges(): void {
  if (!live) return;
  const tabs = new BroadcastChannel("agent-rl changes");
  const hear = (news: News) => {
    if (news.paths) changed(news.paths);
    if (news.opened && connected.value !== null) epoch.value++;
    if (news.connected !== undefined) connected.value = news.connected;
  };
  tabs.onmessage = (event) => hear(event.data);
  const tell = (news: News) => {
    hear(news);
    tabs.postMessage(news);
  };
  tabs.postMessage({ ask: true });
  void navigator.locks.request("agent-rl changes", () => listen(tell, tabs));
}

/** Listens until the tab is closed. */
function listen(tell: (news: News) => void, tabs: BroadcastChannel): Promise<void> {
  const events = new EventSource("api/changes");
  events.onopen = () => tell({ connected: true, opened: true });
  events.onerror = () => tell({ connected: false });
  events.onmessage = (event) => tell({ paths: JSON.parse(event.data) });
  tabs.addEventListener("message", (event) => {
    if (event.data.ask) tabs.postMessage({ connected: events.readyState === EventSource.OPEN });
  });
  return new Promise(() => {});
}
