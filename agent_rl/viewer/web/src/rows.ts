/** A click anywhere in a table's row opens the link of the cell, or else of the row; a middle click opens a new tab. */

const OWN = "a, button, input, select, label, summary";

export function openRows(): void {
  document.addEventListener("click", open);
  document.addEventListener("auxclick", (event) => event.button === 1 && open(event));
}

function open(event: MouseEvent): void {
  const target = event.target as Element;
  if (target.closest(OWN) || getSelection()?.toString()) return;
  const row = target.closest("tbody tr");
  const link = target.closest("td, th")?.querySelector<HTMLAnchorElement>("a[href]") ?? row?.querySelector<HTMLAnchorElement>("a[href]");
  if (!row || !link) return;
  if (event.button === 1 || event.ctrlKey || event.metaKey) window.open(link.href, "_blank", "noopener");
  else location.assign(link.href);
}
