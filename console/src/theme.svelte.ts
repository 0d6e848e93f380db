// Light, dark, or what the system prefers. The choice stays in this browser, where nobody else reads it: the daemon is not asked.

export const THEMES = ["system", "light", "dark"] as const;
export type Theme = (typeof THEMES)[number];

/** Its key in the storage of the browser, which holds nothing else of the console. */
const KEY = "theme";

/** The choice that was kept; a browser that keeps nothing has the system's theme. */
function kept(): Theme {
  try {
    return THEMES.find((theme) => theme === localStorage.getItem(KEY)) ?? "system";
  } catch {
    return "system";
  }
}

class Choice {
  theme = $state<Theme>(kept());

  constructor() {
    this.#show();
    // Another tab has changed it.
    addEventListener("storage", ({ key }) => {
      if (key !== KEY && key !== null) return;
      this.theme = kept();
      this.#show();
    });
  }

  choose(theme: Theme): void {
    this.theme = theme;
    this.#show();
    try {
      if (theme === "system") localStorage.removeItem(KEY);
      else localStorage.setItem(KEY, theme);
    } catch {
      // It holds until the page is closed.
    }
  }

  #show(): void {
    if (this.theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = this.theme;
  }
}

export const choice = new Choice();
