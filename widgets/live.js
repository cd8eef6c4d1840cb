// Plotly's own code is some 5 MB. It lies in one widget that all figures of a kernel share, and is loaded once a page.
const loaded = (globalThis.superoffloadFigureCode ??= new Map());
const sourceOf = async (model) => {
  const id = model.get("_code_source").slice("IPY_MODEL_".length);
  for (let tries = 0; ; tries++) {
    try { return await model.widget_manager.get_model(id); }
    catch (error) {  // a reopened page makes its models in any order
      if (tries === 50) throw error;
      await new Promise((again) => setTimeout(again, 100));
    }
  }
};
const load = async (model) => {
  const source = await sourceOf(model);
  const url = URL.createObjectURL(new Blob([source.get("code")], { type: "text/javascript" }));
  try { return (await import(/* webpackIgnore: true */ url)).default; }
  finally { URL.revokeObjectURL(url); }
};
const CHANGES = ["addTraces", "deleteTraces", "moveTraces", "restyle", "relayout", "update", "animate",
  "removeLayoutProps", "removeTraceProps"].map((kind) => `_py2js_${kind}`);
export default () => {
  let figure, source, ears;
  // plotly's views go on listening when they are gone: such a one would fail at the next change, before the view that
  // has taken its place has heard of it. So what a view listens to is kept while it is made.
  const overheard = (model) => new Proxy(model, { get(to, key) {
    if (key === "on") return (event, hear) => { ears?.push([event, hear]); to.on(event, hear); };
    return typeof to[key] === "function" ? to[key].bind(to) : to[key];
  } });
  const prepare = async (context, missed, deaf) => {
    const { model } = context, version = model.get("_code_version");
    if (!loaded.has(version)) loaded.set(version, load(model));
    let made;
    try { made = await (await loaded.get(version))(); }
    catch (error) { loaded.delete(version); throw error; }
    finally { deaf(); }
    await made.initialize({ ...context, model: overheard(model) });
    for (const [kind, change] of missed) { model.set(kind, change); model.set(kind, null); }
    return made;
  };
  return {
    // Does not wait: anywidget holds up the kernel's messages until this returns, and gives up after two seconds.
    initialize(context) {
      const { model } = context, missed = [];
      source = model;
      const early = CHANGES.map((kind) => [`change:${kind}`, () => model.get(kind) && missed.push([kind, model.get(kind)])]);
      for (const [event, hear] of early) model.on(event, hear);
      figure = prepare(context, missed, () => { for (const [event, hear] of early) model.off(event, hear); });
      figure.catch((error) => console.error("[superoffload] plotly could not be loaded", error));
    },
    async render(context) {
      const made = await figure, mine = ears = [];
      let gone;
      try { gone = made.render(context); } finally { ears = undefined; }
      return () => { for (const [event, hear] of mine) source.off(event, hear); gone(); };
    },
  };
};
