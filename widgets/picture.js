// Draws figures out of sight and hands their PNG or SVG to the kernel, which writes the files. Plotly's code comes with the
// first request and is kept by the page.
const plotly = (code) => (globalThis.superoffloadPlotly ??= new Promise((done, failed) => {
  const others = globalThis.Plotly, script = document.createElement("script");
  script.src = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
  script.onload = () => {
    const mine = globalThis.Plotly;
    if (others) globalThis.Plotly = others;  // somebody else's version stays what they loaded
    script.remove();
    mine ? done(mine) : failed(new Error("the drawing code could not be loaded"));
  };
  script.onerror = () => failed(new Error("the page does not let the drawing code run"));
  document.head.append(script);
}));
const utf8 = new TextEncoder();
const bytes = async (url, format) => format === "svg"
  ? utf8.encode(decodeURIComponent(url.slice(url.indexOf(",") + 1)))
  : new Uint8Array(await (await fetch(url)).arrayBuffer());
function render({ model }) {
  const hear = async (message, buffers) => {
    if (message.kind === "ask") { model.send({ kind: "here", id: message.id, has_code: !!globalThis.superoffloadPlotly }); return; }
    if (message.kind !== "draw") return;
    try {
      const code = buffers.length ? new TextDecoder().decode(buffers[0]) : "";
      const { toImage } = await plotly(code), { format, width, scale } = message, made = [];
      for (const figure of message.figures) {
        const url = await toImage({ data: figure.data, layout: figure.layout },
          { format, width, height: figure.layout.height, scale });
        made.push(await bytes(url, format));
      }
      model.send({ kind: "drawn", id: message.id }, undefined, made.map((b) => b.buffer));
    } catch (error) {
      globalThis.superoffloadPlotly = undefined;
      model.send({ kind: "failed", id: message.id, what: String(error?.message ?? error) });
    }
  };
  model.on("msg:custom", hear);
  return () => model.off("msg:custom", hear);
}
export default { render };
