// Light or dark, before anything is drawn: the choice made here earlier, else what the system prefers.
(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    root.dataset.theme = localStorage.getItem("theme") ?? (system.matches ? "dark" : "light");
    dispatchEvent(new Event("themechange"));
  };
  system.addEventListener("change", apply);
  addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const show = () => button.setAttribute("aria-pressed", root.dataset.theme === "dark");
    button.addEventListener("click", () => {
      localStorage.setItem("theme", root.dataset.theme === "dark" ? "light" : "dark");
      apply();
    });
    addEventListener("themechange", show);
    show();
  });
  apply();
})();
