// The picture of one head: weights as a heat map, column sums as bars above it, row entropies as bars beside it.
import { css, shade } from "./colours.js";
import { decimal, settingsLabel, tokenLabels } from "./labels.js";
import { textWidth } from "./surfaces.js";

const SIZE = 11; // of labels, in pixels
const BARS = 92; // height of the bars above, with the space for their axis
const TITLE = 24;
const LEGEND = 40;
const LARGEST_CELL = 38;
const TALLEST = 880;

// Sizes and places of the parts of a picture that is `width` wide.
export function layout(data, head, width, titled = false) {
  const [rowLabels, columnLabels] = head.shape.map((size) => tokenLabels(data, size));
  const most = width < 480 ? 74 : 112;
  const widest = (labels, ids) => Math.min(most, Math.max(14, ...ids.map((id) => textWidth(labels.short(id), SIZE))));
  const left = Math.max(46, widest(rowLabels, head.rows) + 10);
  const right = width < 480 ? 40 : 66;
  const bottom = widest(columnLabels, head.columns) + 12;
  const cellWidth = Math.min(LARGEST_CELL, (width - left - right) / head.m);
  const square = Math.min(cellWidth, TALLEST / head.n);
  const cellHeight = head.n === head.m ? square : Math.min(22, Math.max(2, TALLEST / head.n));
  const top = BARS + (titled ? TITLE : 0);
  const map = { x: left, y: top, width: cellWidth * head.m, height: cellHeight * head.n };
  const height = top + map.height + bottom + LEGEND;
  return { width, height, left, right, bottom, top, cellWidth, cellHeight, map, rowLabels, columnLabels, titled };
}

// Draw a head with its result. `focus` has the numbers of the query and the key to point out, or null.
export function drawHead(surface, place, { head, result, softmax, settings }, { colours, root, focus, title }) {
  const strongest = scaleEnd(head, Math.max(result.largestWeight, softmax.largestWeight));
  const share = (weight) => (root ? Math.sqrt(weight / strongest) : weight / strongest);
  const scores = head.scores();
  surface.rect(0, 0, place.width, place.height, { fill: colours.paper });
  if (place.titled) {
    surface.text(`${title} · ${settingsLabel(head, settings)}`, 8, 14, { size: 12, fill: colours.ink, bold: true });
  }
  const { map } = place;
  const colour = (i, j) => {
    const k = i * head.m + j;
    return scores[k] === -Infinity ? colours.masked : shade(colours, share(result.weights[k]));
  };
  // The image of the cells is kept with the result, and drawn again when the pointer moves.
  const cache = { images: (result.images ??= {}), key: `${colours.name} ${root} ${strongest}` };
  surface.cells(map.x, map.y, map.width, map.height, head.n, head.m, colour, cache);
  surface.rect(map.x - 0.5, map.y - 0.5, map.width + 1, map.height + 1, { stroke: colours.rule });
  const at = { row: head.rows.indexOf(focus?.query ?? -1), column: head.columns.indexOf(focus?.key ?? -1) };
  drawSums(surface, place, head, result, softmax, colours, at);
  drawEntropies(surface, place, head, result, colours, at);
  drawLabels(surface, place, head, colours, at);
  drawFocus(surface, place, colours, at);
  drawLegend(surface, place, colours, strongest, root);
}

function drawSums(surface, { map, cellWidth }, head, result, softmax, colours, at) {
  const base = map.y - 8;
  const height = BARS - 30;
  const most = mostReceived({ result, softmax });
  const root = most > 5; // an even share would be too low to be seen
  const up = (sum) => height * (root ? Math.sqrt(sum / most) : sum / most);
  const bar = Math.max(0.6, cellWidth * 0.72);
  for (let j = 0; j < head.m; j++) {
    if (Number.isNaN(result.sums[j])) continue;
    const x = map.x + (j + 0.5) * cellWidth - bar / 2;
    const tall = Math.max(0.5, up(result.sums[j]));
    surface.rect(x, base - tall, bar, tall, { fill: j === at.column ? colours.even : colours.bar });
  }
  surface.line(map.x, base, map.x + map.width, base, { stroke: colours.faint });
  surface.line(map.x, base - up(1), map.x + map.width, base - up(1), { stroke: colours.even, dash: [4, 3] });
  const scale = { size: 10, fill: colours.faint, align: "end" };
  surface.text("1", map.x - 5, base - up(1), { ...scale, fill: colours.even });
  if (up(1) < height - 11) surface.text(decimal(most), map.x - 5, base - height, scale);
  if (root && up(4) < height - 11 && up(4) - up(1) > 11) surface.text("4", map.x - 5, base - up(4), scale);
  const title = `${sumsTitle(head)}${root ? " (root scale)" : ""}`;
  surface.text(title, map.x, base - height - 12, { size: 10, fill: colours.faint });
}

// The end of the scales of column sums, which stays where it is under SoftMax when they become even.
export const mostReceived = ({ result, softmax }) => Math.max(1.5, result.largestSum, softmax.largestSum);

const sumsTitle = (head) =>
  head.n === head.m && head.definition === "plain" ? "column sums" : "column sums, in even shares";

function drawEntropies(surface, { map, cellHeight, right }, head, result, colours, at) {
  const x = map.x + map.width + 8;
  const wide = right - 14;
  const most = Math.log(head.m) || 1;
  const bar = Math.max(0.6, cellHeight * 0.6);
  for (let i = 0; i < head.n; i++) {
    const y = map.y + (i + 0.5) * cellHeight - bar / 2;
    const long = Math.max(0.5, (wide * result.entropies[i]) / most);
    surface.rect(x, y, long, bar, { fill: i === at.row ? colours.even : colours.bar });
  }
  surface.line(x, map.y, x, map.y + map.height, { stroke: colours.faint });
  const scale = { size: 10, fill: colours.faint };
  surface.text("entropy", x + wide + 4, map.y - 8, { ...scale, align: "end" });
  if (wide > 30) {
    surface.text("0", x, map.y + map.height + 9, scale);
    surface.text(decimal(most), x + wide, map.y + map.height + 9, { ...scale, align: "end" });
  }
}

function drawLabels(surface, place, head, colours, at) {
  const { map, cellWidth, cellHeight, rowLabels, columnLabels } = place;
  const every = (cell) => Math.max(1, Math.ceil((SIZE + 1) / cell));
  const style = (isFocus) => ({ size: SIZE, fill: isFocus ? colours.even : colours.ink, bold: isFocus });
  const room = (k, focused, step) => focused < 0 || k === focused || Math.abs(k - focused) >= step; // for the label in focus
  head.rows.forEach((id, i) => {
    const step = every(cellHeight);
    if (i !== at.row && (i % step || !room(i, at.row, step))) return;
    const y = map.y + (i + 0.5) * cellHeight;
    surface.text(fitted(rowLabels.short(id), place.left - 10), map.x - 5, y, { ...style(i === at.row), align: "end" });
  });
  head.columns.forEach((id, j) => {
    const step = every(cellWidth);
    if (j !== at.column && (j % step || !room(j, at.column, step))) return;
    const x = map.x + (j + 0.5) * cellWidth;
    const label = fitted(columnLabels.short(id), place.bottom - 10);
    surface.text(label, x, map.y + map.height + 6, { ...style(j === at.column), align: "end", turn: -90 });
  });
}

function fitted(label, width) {
  let text = label;
  while (text.length > 1 && textWidth(text, SIZE) > width) text = `${[...text].slice(0, -2).join("")}…`;
  return text;
}

function drawFocus(surface, { map, cellWidth, cellHeight }, colours, at) {
  const stroke = { stroke: colours.even, thickness: 1.5 };
  if (at.row >= 0) surface.rect(map.x, map.y + at.row * cellHeight, map.width, cellHeight, stroke);
  if (at.column >= 0) surface.rect(map.x + at.column * cellWidth, map.y, cellWidth, map.height, stroke);
}

function drawLegend(surface, { map, height, width }, colours, strongest, root) {
  const [x, y, wide] = [map.x, height - 22, Math.min(120, width / 4)];
  for (let k = 0; k < 60; k++) {
    surface.rect(x + (k * wide) / 60, y, wide / 60 + 0.3, 8, { fill: css(shade(colours, (k + 0.5) / 60)) });
  }
  surface.rect(x, y, wide, 8, { stroke: colours.rule });
  const style = { size: 10, fill: colours.faint };
  surface.text("0", x - 5, y + 4, { ...style, align: "end" });
  surface.text(`weight ${decimal(strongest)}${root ? ", colour by its root" : ""}`, x + wide + 6, y + 4, style);
}

// The weight of the strongest colour: even attention is never as strong.
export const scaleEnd = (head, largestWeight) => Math.max(largestWeight, Math.min(1, 4 / head.m));

// The row and column of a head under a point of the picture; −1 outside the map, on the side where it is.
export function cellAt({ map, cellWidth, cellHeight }, head, x, y) {
  const within = (place, count) => (place >= 0 && place < count ? place : -1);
  const rowAt = within(Math.floor((y - map.y) / cellHeight), head.n);
  const columnAt = within(Math.floor((x - map.x) / cellWidth), head.m);
  const [besideRows, aboveColumns] = [x < map.x + map.width + 70, y > 0];
  return { row: besideRows ? rowAt : -1, column: aboveColumns ? columnAt : -1 };
}
