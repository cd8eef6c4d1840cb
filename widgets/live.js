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
  let figure;
  const prepare = async (context, missed, deaf) => {
    const { model } = context, version = model.get("_code_version");
    if (!loaded.has(version)) loaded.set(version, load(model));
    let made;
    try { made = await (await loaded.get(version))(); }
    catch (error) { loaded.delete(version); throw error; }
    finally { deaf(); }
    await made.initialize(context);
    for (const [kind, change] of missed) { model.set(kind, change); model.set(kind, null); }
    return made;
  };
  return {
    // Does not wait: anywidget holds up the kernel's messages until this returns, and gives up after two seconds.
    initialize(context) {
      const { model } = context, missed = [];
      const ears = CHANGES.map((kind) => [`change:${kind}`, () => model.get(kind) && missed.push([kind, model.get(kind)])]);
      for (const [event, hear] of ears) model.on(event, hear);
      figure = prepare(context, missed, () => { for (const [event, hear] of ears) model.off(event, hear); });
      figure.catch((error) => console.error("[superoffload] plotly could not be loaded", error));
    },
    async render(context) { return (await figure).render(context); },
  };
};
