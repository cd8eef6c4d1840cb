const bodyIsDark = () => {
  const flag = document.body.dataset.jpThemeLight;
  if (flag) return flag === "false";
  const rgb = getComputedStyle(document.body).backgroundColor.match(/[\d.]+/g);
  if (!rgb || (rgb.length > 3 && Number(rgb[3]) === 0)) return matchMedia("(prefers-color-scheme: dark)").matches;
  return 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2] < 128;
};
function render({ model, el }) {
  const report = () => {
    const theme = bodyIsDark() ? "dark" : "light";
    el.closest(".so-panel")?.classList.toggle("so-dark", theme === "dark");
    if (model.get("theme") !== theme) { model.set("theme", theme); model.save_changes(); }
  };
  const label = () => {
    const root = el.closest(".so-panel");
    if (!root) return;
    // The notebook's own shortcuts would take the arrow keys (and letters) away from menus and lists.
    for (const menu of root.querySelectorAll("select:not([data-lm-suppress-shortcuts])"))
      menu.setAttribute("data-lm-suppress-shortcuts", "true");
    // A small control that shares its line with another has a tooltip "Name: what it does" and no label of its own.
    for (const control of root.querySelectorAll("select[title], input[title]")) {
      const name = control.title.split(":")[0];
      const labelled = [...(control.labels ?? [])].some((l) => l.textContent.trim() && l.offsetParent);
      if (name && !labelled && control.getAttribute("aria-label") !== name)
        control.setAttribute("aria-label", name);
    }
    for (const slider of root.querySelectorAll(".widget-slider, .widget-hslider")) {
      const name = slider.querySelector(".widget-label")?.textContent || slider.title;
      const text = slider.querySelector(".widget-readout")?.textContent;
      for (const handle of slider.querySelectorAll(".noUi-handle")) {
        if (name && handle.getAttribute("aria-label") !== name) handle.setAttribute("aria-label", name);
        if (text && handle.getAttribute("aria-valuetext") !== text) handle.setAttribute("aria-valuetext", text);
      }
    }
  };
  // A figure drawn before its place had a width keeps plotly's default; a responsive one listens to the window.
  const fit = () => {
    for (const plot of el.closest(".so-panel")?.querySelectorAll(".js-plotly-plot") ?? []) {
      const drawn = plot.querySelector(".main-svg")?.clientWidth;
      if (drawn && plot.clientWidth > 0 && Math.abs(drawn - plot.clientWidth) > 1) {
        window.dispatchEvent(new Event("resize"));
        return;
      }
    }
  };
  let pending = 0;
  const soon = () => { cancelAnimationFrame(pending); pending = requestAnimationFrame(() => { label(); fit(); }); };
  const sizes = new ResizeObserver(soon);
  const themes = new MutationObserver(report);
  const marks = ["data-jp-theme-light", "data-jp-theme-name", "class"];
  themes.observe(document.body, { attributes: true, attributeFilter: marks });
  const content = new MutationObserver(soon);
  // The element joins the document after render returns.
  const start = setTimeout(() => {
    report(); label();
    const root = el.closest(".so-panel");
    if (root) {
      content.observe(root, { childList: true, subtree: true, characterData: true });
      sizes.observe(root);
    }
  }, 0);
  return () => {
    clearTimeout(start);
    cancelAnimationFrame(pending);
    for (const observer of [themes, content, sizes]) observer.disconnect();
  };
}
export default { render };
