/** Whether the reader's system asks for light or dark. */

import { signal } from "@preact/signals";

const asked = matchMedia("(prefers-color-scheme: dark)");
export const scheme = signal<"light" | "dark">(asked.matches ? "dark" : "light");
asked.addEventListener("change", () => (scheme.value = asked.matches ? "dark" : "light"));

/** The value of a custom property of the page, for what is drawn on a canvas. */
export function css(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
