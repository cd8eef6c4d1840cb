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
export default () => {
  let figure;
  return {
    async initialize(context) {
      const version = context.model.get("_code_version");
      if (!loaded.has(version)) loaded.set(version, load(context.model));
      try { figure = await (await loaded.get(version))(); }
      catch (error) { loaded.delete(version); throw error; }
      return figure.initialize(context);
    },
    render(context) { return figure.render(context); },
  };
};
