/** The place in the page is the address's fragment, so that links, the back button and file:// work alike. */

import { signal } from "@preact/signals";

export interface Route {
  path: string[];
  query: URLSearchParams;
}

function parse(fragment: string): Route {
  const [path, query] = fragment.replace(/^#\/?/, "").split("?", 2);
  return { path: path.split("/").map(decodeURIComponent), query: new URLSearchParams(query ?? "") };
}

export const route = signal<Route>(parse(location.hash));
addEventListener("hashchange", () => (route.value = parse(location.hash)));

export function link(path: (string | number)[], query?: Record<string, string>): string {
  const search = query ? new URLSearchParams(query).toString() : "";
  return `#/${path.map((part) => encodeURIComponent(part)).join("/")}${search && `?${search}`}`;
}

/** Change the query of the current place without an entry in the history; an empty value leaves its key out. */
export function setQuery(values: Record<string, string>): void {
  const { path, query } = route.peek();
  const next = new URLSearchParams(query);
  for (const [key, value] of Object.entries(values)) value ? next.set(key, value) : next.delete(key);
  history.replaceState(null, "", link(path, Object.fromEntries(next)));
  route.value = { path, query: next };
}
