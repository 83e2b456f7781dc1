// An image with the attention of its patches over it.
import { css, shade } from "./colours.js";
import { decodeBase64 } from "./data.js";
import { element } from "./dom.js";
import { makeSentence } from "./sentence.js";
import { onTokens, pointAt } from "./subject.js";

const LARGEST = 300; // pixels of the page

export function makeImage(state, count) {
  const { grid, first, size, pixels } = state.data.subject;
  const [rows, columns] = grid;
  const [height, width] = size;
  const picture = pictureOf(decodeBase64(pixels), width, height);
  const scale = LARGEST / Math.max(width, height);
  const canvas = element("canvas", {
    class: "image",
    tabindex: 0,
    role: "img",
    width: Math.round(width * scale),
    height: Math.round(height * scale),
    "aria-label": "The image and its patches: point at one, or use the arrow keys",
  });
  const plain = element("canvas", {
    class: "image",
    width: canvas.width,
    height: canvas.height,
    role: "img",
    "aria-label": "The image",
  });
  const extra = first > 0 ? makeSentence(state, [...Array(first).keys()], count) : null;
  const cell = { width: canvas.width / columns, height: canvas.height / rows };

  const patchAt = (event) => {
    const box = canvas.getBoundingClientRect();
    const j = Math.floor(((event.clientX - box.left) / box.width) * columns);
    const i = Math.floor(((event.clientY - box.top) / box.height) * rows);
    return first + Math.min(rows - 1, Math.max(0, i)) * columns + Math.min(columns - 1, Math.max(0, j));
  };
  canvas.addEventListener("pointermove", (event) => pointAt(state, patchAt(event)));
  canvas.addEventListener("pointerleave", () => pointAt(state, null));
  canvas.addEventListener("click", (event) => {
    const id = patchAt(event);
    state.change({ pinned: !state.pinned, focus: { query: id, key: id } });
  });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
    if (!step) return;
    event.preventDefault();
    const from = state.focus.query ?? first;
    const id = Math.min(first + rows * columns - 1, Math.max(first, from + step));
    state.change({ focus: { query: id, key: id } });
  });

  function draw(shown, colours) {
    extra?.draw(shown, colours);
    const { values, most, focus } = onTokens(state, shown, count);
    for (const each of [plain, canvas]) {
      const context = each.getContext("2d");
      context.imageSmoothingEnabled = scale < 3;
      context.globalAlpha = 1;
      context.drawImage(picture, 0, 0, canvas.width, canvas.height);
    }
    const context = canvas.getContext("2d");
    context.globalAlpha = 0.7;
    for (let k = 0; k < rows * columns; k++) {
      const value = values.get(first + k);
      if (value === undefined || Number.isNaN(value)) continue;
      context.fillStyle = css(shade(colours, state.look.root ? Math.sqrt(value / most) : value / most));
      const [x, y] = [(k % columns) * cell.width, Math.floor(k / columns) * cell.height];
      context.fillRect(x, y, cell.width + 0.3, cell.height + 0.3);
    }
    context.globalAlpha = 1;
    if (focus !== null && focus >= first)
      for (const each of [plain, canvas]) outline(each.getContext("2d"), focus - first, colours);
  }
  function outline(context, k, colours) {
    context.strokeStyle = colours.even;
    context.lineWidth = 3;
    context.strokeRect(
      (k % columns) * cell.width + 1,
      Math.floor(k / columns) * cell.height + 1,
      cell.width - 2,
      cell.height - 2,
    );
  }
  const parts = element(
    "div",
    {},
    element("div", { class: "pictures" }, plain, canvas),
    ...(extra ? [extra.line] : []),
  );
  return { line: parts, draw };
}

// In grey, so that colours on it are those of attention.
function pictureOf(bytes, width, height) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [width, height];
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  for (let k = 0; k < width * height; k++) {
    const grey = 0.299 * bytes[3 * k] + 0.587 * bytes[3 * k + 1] + 0.114 * bytes[3 * k + 2];
    image.data.set([grey, grey, grey, 255], 4 * k);
  }
  context.putImageData(image, 0, 0);
  return canvas;
}
