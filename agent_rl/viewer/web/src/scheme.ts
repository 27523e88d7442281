/** Whether the reader's system asks for light or dark. */

import { computed } from "@preact/signals";
import { media } from "./media";

const dark = media("(prefers-color-scheme: dark)");
export const scheme = computed(() => (dark.value ? "dark" : "light"));

/** The page's colours for what is drawn on a canvas: read once, since reading lays the page's styles out anew. */
export const colours = computed(() => {
  void scheme.value;
  const style = getComputedStyle(document.documentElement);
  return { ink: style.getPropertyValue("--dim").trim(), line: style.getPropertyValue("--line").trim() };
});
