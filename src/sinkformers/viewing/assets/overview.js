// All heads of a model at a glance: a grid of small maps, which are computed a few at a time.
import { shade } from "./colours.js";
import { arrowKeys, element, tableBehind } from "./dom.js";
import { scaleEnd } from "./head_picture.js";
import { decimal } from "./labels.js";
import { settingsOf } from "./state.js";
import { attention } from "./statistics.js";
import { cellImage } from "./surfaces.js";
import { overviewTable } from "./tables.js";

const DOTS = 72; // of a small map
const SLICE = 12; // milliseconds of work between two frames

export function makeOverview(state, panel) {
  const numbers = [...new Set(panel.model.layers.flatMap((layer) => layer.heads.map((head) => head.number)))];
  numbers.sort((a, b) => a - b);
  const cells = [];
  const grid = element("div", {
    class: "maps",
    style: { gridTemplateColumns: `auto repeat(${numbers.length}, minmax(22px, 64px))` },
    role: "group",
    "aria-label": "All heads: choose one with the arrow keys",
  });
  grid.append(
    element("span", { class: "corner" }, "head"),
    ...numbers.map((n) => element("span", { class: "axis" }, `${n}`)),
  );
  for (const layer of panel.model.layers) {
    grid.append(
      element(
        "span",
        { class: "axis", title: layer.name },
        layer === panel.model.layers[0] ? `layer ${layer.number}` : `${layer.number}`,
      ),
    );
    for (const number of numbers) {
      const head = layer.heads.find((each) => each.number === number);
      grid.append(head ? makeCell(head) : element("span"));
    }
  }
  arrowKeys(
    grid,
    () => numbers.length,
    (button) => button.click(),
  );

  function makeCell(head) {
    const canvas = element("canvas", { width: DOTS, height: DOTS, "aria-hidden": "true" });
    const choose = () => state.change({ place: { layer: head.layer, head: head.number } });
    const button = element("button", { type: "button", class: "map", onclick: choose }, canvas);
    cells.push({ head, canvas, button, result: null });
    return button;
  }

  const behind = tableBehind("Table of all heads", () => overviewTable(cells));
  let job = 0;

  // Compute and draw all maps; a later call ends this one.
  function draw(colours) {
    const mine = ++job;
    const queue = [...cells];
    const work = () => {
      const until = performance.now() + SLICE;
      while (queue.length && performance.now() < until) drawCell(queue.shift(), colours);
      if (mine !== job) return;
      if (queue.length) setTimeout(work);
      else behind.update();
    };
    setTimeout(work);
  }

  function drawCell(cell, colours) {
    const { head, canvas, button } = cell;
    const result = attention(head, settingsOf(panel, head));
    const strongest = scaleEnd(head, result.largestWeight);
    const share = (weight) => (state.look.root ? Math.sqrt(weight / strongest) : weight / strongest);
    const image = cellImage(head.n, head.m, (i, j) => shade(colours, share(result.weights[i * head.m + j])));
    const context = canvas.getContext("2d");
    context.imageSmoothingEnabled = head.n > DOTS || head.m > DOTS;
    context.imageSmoothingQuality = "high";
    context.drawImage(image, 0, 0, DOTS, DOTS);
    const { largestSum, smallestSum, entropy } = result;
    cell.result = { largestSum, smallestSum, entropy };
    const text = `layer ${head.layer}, head ${head.number}: column sums ${decimal(smallestSum)} to ${decimal(largestSum)}`;
    button.setAttribute("aria-label", text);
    button.title = text;
  }

  function mark() {
    for (const { head, button } of cells) {
      const here = head.layer === state.place.layer && head.number === state.place.head;
      button.setAttribute("aria-pressed", String(here));
      button.tabIndex = here ? 0 : -1;
    }
  }

  const figure = element(
    "figure",
    { class: "overview" },
    element("figcaption", {}, "All heads"),
    element("div", { class: "scroll" }, grid),
    behind.details,
  );
  return { figure, draw, mark, isSingle: cells.length === 1 };
}
