// One model: its sliders, the picture of a head, its tokens, and all heads at a glance.
import { theme } from "./colours.js";
import { makeControls } from "./controls.js";
import { lists, numbers, readout } from "./details.js";
import { element, tableBehind } from "./dom.js";
import { savePicture } from "./export.js";
import { cellAt, drawHead, layout } from "./head_picture.js";
import { makeImage } from "./image.js";
import { settingsLabel } from "./labels.js";
import { makeOverview } from "./overview.js";
import { makePoints } from "./points.js";
import { makeSentence } from "./sentence.js";
import { layerAt, shownIn } from "./state.js";
import { onTokens } from "./subject.js";
import { canvasSurface } from "./surfaces.js";
import { headTable } from "./tables.js";

export function makePanel(state, panel) {
  const heading = element("h2");
  const where = element("p", { class: "where" });
  const controls = makeControls(panel, (settings) => {
    Object.assign(panel, settings);
    state.change({ settings: panel });
  });
  const canvas = element("canvas", { class: "head", tabindex: 0, role: "img" });
  const said = element("p", { class: "readout", "aria-live": "polite" });
  const figures = element("div", { class: "statistics" });
  const listed = element("div", { class: "lists" });
  const behind = tableBehind("Table of this head", () => headTable(state.data, shownIn(panel, state.place)));
  const overview = makeOverview(state, panel);
  const subject = makeSubject(state, panel);
  const save = (kind) => () => savePicture(state, panel, shownIn(panel, state.place), kind);
  const buttons = ["png", "svg"].map((kind) =>
    element("button", { type: "button", class: kind, onclick: save(kind) }, `Save ${kind.toUpperCase()}`),
  );
  const main = element(
    "figure",
    { class: "one" },
    figures,
    canvas,
    said,
    element("div", { class: "buttons" }, ...buttons),
    behind.details,
  );
  const missing = element("p", { class: "note" }, "This head is not on the page.");
  const body = element(
    "div",
    { class: "body" },
    main,
    element("div", { class: "side" }, subject.figure, ...(overview.isSingle ? [] : [overview.figure]), listed),
  );
  const section = element(
    "section",
    { class: "panel" },
    element("header", {}, heading, where),
    controls.element,
    missing,
    body,
  );
  let place = null;
  addPointing(canvas, state, () => ({ place, head: shownIn(panel, state.place)?.head }));

  // Bring everything up to date with the state, or what depends on the named changes.
  function update(changes = new Set(["all"])) {
    const shown = shownIn(panel, state.place);
    missing.hidden = shown !== null;
    main.hidden = controls.element.hidden = shown === null;
    const colours = theme(state.look.theme);
    const all = changes.has("all") || changes.has("look") || changes.has("settings");
    if (all) overview.draw(colours);
    overview.mark();
    if (!shown) return;
    draw(shown, colours);
    subject.draw(shown, colours);
    listed.replaceChildren(...lists(state, shown));
    said.replaceChildren(...readout(state, shown));
    if (!all && !changes.has("place")) return;
    heading.textContent = `${panel.model.name}: ${settingsLabel(shown.head, shown.settings)}`;
    const layer = layerAt(panel.model, state.place);
    where.textContent = `layer ${layer.number} · head ${shown.head.number} · ${layer.name}`;
    controls.update(shown);
    figures.replaceChildren(numbers(shown));
    behind.update();
  }

  function draw(shown, colours) {
    const width = Math.max(260, Math.min(900, main.clientWidth || 600));
    place = layout(state.data, shown.head, width);
    const surface = canvasSurface(canvas, place.width, place.height, window.devicePixelRatio || 1);
    drawHead(surface, place, shown, { colours, root: state.look.root, focus: state.focus });
    const { head, result } = shown;
    canvas.setAttribute(
      "aria-label",
      `Weights of layer ${head.layer}, head ${head.number}: ${head.n} queries by ${head.m} keys, column sums from ` +
        `${result.smallestSum.toFixed(2)} to ${result.largestSum.toFixed(2)}. The table below has the numbers.`,
    );
  }
  return { section, update };
}

// The tokens as text, image or points, with the choice of what is coloured.
function makeSubject(state, panel) {
  const { subject, tokens } = state.data;
  const count = tokens?.length ?? subject?.places?.length ?? panel.model.layers[0].shape[1];
  const make = { image: () => makeImage(state, count), points: () => makePoints(state) };
  const made = make[subject?.kind]?.() ?? makeSentence(state, [...Array(count).keys()], count);
  const caption = element("span");
  const choices = [false, true].map((from) =>
    element(
      "button",
      { type: "button", onclick: () => state.change({ look: { ...state.look, from } }) },
      from ? "looked at by" : "looks at",
    ),
  );
  const figure = element(
    "figure",
    { class: "subject" },
    element(
      "figcaption",
      {},
      caption,
      element("span", { class: "choice", role: "group", "aria-label": "Colour by" }, ...choices),
    ),
    made.line,
  );
  function draw(shown, colours) {
    caption.textContent = onTokens(state, shown, count).caption;
    choices.forEach((choice, k) =>
      choice.setAttribute("aria-pressed", String(Boolean(state.look.from) === Boolean(k))),
    );
    made.draw(shown, colours);
  }
  return { figure, draw };
}

// Pointer and arrow keys on the picture of a head choose a query and a key.
function addPointing(canvas, state, current) {
  const cell = (event) => {
    const { place, head } = current();
    const box = canvas.getBoundingClientRect();
    const { row, column } = cellAt(place, head, event.clientX - box.left, event.clientY - box.top);
    return { query: head.rows[row] ?? null, key: head.columns[column] ?? null };
  };
  canvas.addEventListener("pointermove", (event) => {
    if (!state.pinned) state.change({ focus: cell(event) });
  });
  canvas.addEventListener("pointerleave", () => {
    if (!state.pinned) state.change({ focus: { query: null, key: null } });
  });
  canvas.addEventListener("click", (event) => state.change({ pinned: !state.pinned, focus: cell(event) }));
  canvas.addEventListener("keydown", (event) => {
    const { head } = current();
    const steps = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] };
    if (event.key === "Enter") return state.change({ pinned: !state.pinned });
    if (!steps[event.key]) return undefined;
    event.preventDefault();
    const [down, across] = steps[event.key];
    const moved = (ids, id, by) =>
      ids[Math.min(ids.length - 1, Math.max(0, ids.indexOf(id ?? -1) + (id === null ? 1 : by)))];
    const focus = {
      query: moved(head.rows, state.focus.query, down),
      key: moved(head.columns, state.focus.key, across),
    };
    return state.change({ focus });
  });
}
