// Light, dark, or as the system has it; remembered in this browser.

const KEY = "outrider.theme";

/** Install the switch; `changed` is called when colours have changed. */
export function installTheme(select, changed) {
  const apply = () => {
    if (select.value === "auto") document.documentElement.removeAttribute("data-theme");
    else document.documentElement.dataset.theme = select.value;
  };
  select.value = localStorage.getItem(KEY) ?? "auto";
  apply();
  select.addEventListener("change", () => {
    localStorage.setItem(KEY, select.value);
    apply();
    changed();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
}

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
